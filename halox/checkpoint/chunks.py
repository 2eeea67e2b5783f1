"""Chunks of a whole field, the ranks that write or read them, and the ranks that own their cells; integers only.

All chunks have the same shape. Along an axis they are as long as the blocks of an even division, or a fraction of
these. If all blocks are equal, every chunk is within one block. Otherwise a chunk may span two or more blocks, and the
rank of one of these blocks writes the whole chunk::

    blocks      0 0 0 | 1 1 1 | 2 2 | 3 3
    chunks      0 0 0 | 1 1 1 | 2 2   3 | 3

In another division, each rank reads the cells of a chunk that it needs. If it needs parts of short rows, it reads whole
rows. The ranks that need other parts of these rows read the same rows, and one of the ranks adds them to the checksum::

    needed      0 0 1 1 | 0 0 1 1 | ...
    read        0 0 0 0 | 0 0 0 0 | ...    by rank 0
                1 1 1 1 | 1 1 1 1 | ...    by rank 1
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from halox.collectives.host.cell_sums import blocks
from halox.decomposition import FieldLayout

CHUNK_BYTES = 32 << 20
"""Maximum bytes of a chunk; a single element may be larger."""

RUN_BYTES = 128 << 10
"""Minimum contiguous bytes that a rank reads of a chunk; for fewer bytes, reading the gaps too is faster."""

MOST_READERS = 4
"""Maximum number of ranks that read the same bytes of a chunk; for more ranks, one rank reads and sends the cells."""

Cut = tuple[slice, ...]
"""A box of the whole field: a slice along every axis, component axes included."""


class Piece(NamedTuple):
    """Cells of a chunk that one rank owns."""

    rank: int
    cut: Cut


class ReadBox(NamedTuple):
    """Cells that a rank reads of a chunk; one of the ranks that read the same cells adds them to the checksum.

    From chunk to chunk, another rank adds them.
    """

    cut: Cut
    is_counted: bool


class Chunk(NamedTuple):
    """A chunk: its index along each axis, its cells, the rank that moves it, and the pieces of all ranks."""

    number: tuple[int, ...]
    cut: Cut
    mover: int
    pieces: tuple[Piece, ...]


def chunk_shape(layout: FieldLayout, itemsize: int) -> tuple[int, ...]:
    """Return the shape of the chunks for writing a field.

    Examples
    --------
    >>> from halox.decomposition import FieldSpec, decompose
    >>> grid = decompose((512, 512, 512), 4, proc_shape=(2, 2, 1))
    >>> chunk_shape(FieldLayout(grid, 0, FieldSpec(((1, 1),) * 3)), 8)
    (32, 256, 512)
    """
    first = len(layout.spec.components_before)
    shape = list(layout.global_shape)
    for axis, parts in enumerate(layout.decomposition.proc_shape, first):
        shape[axis] = -(-shape[axis] // parts)
    for axis, extent in enumerate(shape):
        excess = -(-prod(shape) * itemsize // CHUNK_BYTES)
        wanted = min(excess, extent)
        # A few more parts can keep chunks within blocks; many more parts would be too thin.
        even = (n for n in range(wanted, min(2 * wanted, extent) + 1) if extent % n == 0)
        shape[axis] = -(-extent // next(even, wanted))
    return tuple(shape)


@dataclass(frozen=True)
class ChunkGrid:
    """The chunks of a field, written by this or another grid, and their owners and movers in this grid."""

    layout: FieldLayout  # of the field on this rank
    shape: tuple[int, ...]  # extents of a chunk

    @cached_property
    def own(self) -> Cut:
        """The cells that this rank owns."""
        spec = self.layout.spec
        before, after = spec.components_before, spec.components_after
        full = [slice(0, n) for n in (*before, *after)]
        return (*full[: len(before)], *self.layout.owned, *full[len(before) :])

    @cached_property
    def _bounds(self) -> tuple[tuple[int, ...], ...]:
        """Return the first cell of each block along each grid axis, and the end of the last block."""
        spec, axes = self.layout.spec, self.layout.decomposition.axes
        found = []
        for number, axis in enumerate(axes):
            starts = [axis.owned_points(part, False)[0] for part in range(axis.parts)]
            bounds = (*starts, axis.points(spec.staggered[number]))
            if spec.parity is not None and number == len(axes) - 1:
                bounds = tuple(bound // 2 for bound in bounds)
            found.append(bounds)
        return tuple(found)

    def __iter__(self) -> Iterator[Chunk]:
        """Yield the chunks with cells of this rank, in one order on all ranks."""
        ranges = [
            range(cut.start // n, -(-cut.stop // n))
            for cut, n in zip(self.own, self.shape, strict=True)
        ]
        for number in product(*ranges):
            yield self.chunk(number)

    def chunk(self, number: tuple[int, ...]) -> Chunk:
        """Return a chunk."""
        whole = self.layout.global_shape
        cut = tuple(
            slice(k * n, min((k + 1) * n, extent))
            for k, n, extent in zip(number, self.shape, whole, strict=True)
        )
        first = len(self.layout.spec.components_before)
        grid = slice(first, first + self.layout.spec.ndim)
        along = [
            _overlaps(bounds, axis.start, axis.stop)
            for bounds, axis in zip(self._bounds, cut[grid], strict=True)
        ]
        decomposition = self.layout.decomposition
        pieces = []
        for parts in product(*along):
            rank = decomposition.rank_at([part for part, _ in parts])
            assert rank is not None
            pieces.append(Piece(rank, (*cut[:first], *(c for _, c in parts), *cut[grid.stop :])))
        turn = sum(number)
        mover = decomposition.rank_at([_mover(parts, turn) for parts in along])
        assert mover is not None
        return Chunk(number, cut, mover, tuple(pieces))

    def read_box(self, chunk: Chunk, itemsize: int) -> ReadBox | None:
        """Return the cells of a chunk that this rank reads to get its own cells; None if ranks would read too much.

        The box has this rank's cells along the first axes, and all cells of the chunk along the other axes, so that
        every rank reads at least `RUN_BYTES` contiguous bytes of the file. It may be the whole chunk.
        """
        cuts = list(zip(*(piece.cut for piece in chunk.pieces), strict=True))
        run_bytes, first_whole = itemsize, len(self.shape)
        while first_whole:
            fewest = min(cut.stop - cut.start for cut in cuts[first_whole - 1])
            if run_bytes * fewest >= RUN_BYTES:
                break
            first_whole -= 1
            run_bytes *= self.shape[first_whole]
        most = MOST_READERS * prod(
            min(cut.stop - cut.start for cut in along) for along in cuts[first_whole:]
        )
        if prod(extents(chunk.cut[first_whole:])) > most:
            return None
        starts = self._starts(chunk)[first_whole:]
        whole = [slice(at, at + n) for at, n in zip(starts, self.shape[first_whole:], strict=True)]
        own = self.own_cut(chunk)[:first_whole]
        readers = [one.rank for one in chunk.pieces if one.cut[:first_whole] == own]
        counting = readers[sum(chunk.number) % len(readers)]
        return ReadBox((*own, *whole), counting == self.layout.rank)

    def read_parts(self, chunk: Chunk, box: Cut, most: int) -> Iterator[tuple[int, Cut]]:
        """Yield parts of a box with their offsets, each contiguous in the file and of at most ``most`` cells."""
        first = len(box) - 1
        while first > 0 and extents(box)[first] == self.shape[first]:
            first -= 1
        begin = self._starts(chunk)
        for leading in product(*(range(cut.start, cut.stop) for cut in box[:first])):
            lead = tuple(slice(one, one + 1) for one in leading)
            for place in blocks(extents(box[first:]), most):
                part = (*lead, *_boxed(box[first:], place))
                at = 0
                for cut, start, extent in zip(part, begin, self.shape, strict=True):
                    at = at * extent + cut.start - start
                yield at, part

    def _starts(self, chunk: Chunk) -> list[int]:
        return [k * n for k, n in zip(chunk.number, self.shape, strict=True)]

    def own_cut(self, chunk: Chunk) -> Cut:
        """Return the cells of a chunk that this rank owns."""
        return next(piece.cut for piece in chunk.pieces if piece.rank == self.layout.rank)

    def is_full(self, chunk: Chunk) -> bool:
        """Whether a chunk does not extend beyond the end of the field."""
        return extents(chunk.cut) == self.shape

    def local(self, cut: Cut) -> Cut:
        """Return the position of this rank's cells within its block."""
        return relative(cut, self.own)


def relative(cut: Cut, base: Cut) -> Cut:
    """Return the position of a box within another box.

    Examples
    --------
    >>> relative((slice(5, 8),), (slice(4, 9),))
    (slice(1, 4, None),)
    """
    return tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(cut, base, strict=True))


def intersection(one: Cut, other: Cut) -> Cut | None:
    """Return the common cells of two boxes, None if they are disjoint.

    Examples
    --------
    >>> intersection((slice(2, 9),), (slice(0, 4),)), intersection((slice(2, 9),), (slice(0, 2),))
    ((slice(2, 4, None),), None)
    """
    found = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return found if all(cut.start < cut.stop for cut in found) else None


def extents(cut: Cut) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(c.stop - c.start for c in cut)


def _boxed(box: Cut, place: tuple[slice | int, ...]) -> Cut:
    """Return a part of a box, as a box with the same number of axes.

    Examples
    --------
    >>> _boxed((slice(4, 9), slice(2, 6)), (1, slice(0, 9)))
    (slice(5, 6, None), slice(2, 6, None))
    """
    found = []
    for cut, one in zip(box, place, strict=False):
        start, stop = (one, one + 1) if isinstance(one, int) else (one.start, one.stop)
        found.append(slice(cut.start + start, min(cut.start + stop, cut.stop)))
    return (*found, *box[len(place) :])


def _overlaps(bounds: tuple[int, ...], start: int, stop: int) -> list[tuple[int, slice]]:
    """Return the blocks of an axis that own points of an interval, each with these points."""
    part = bisect_right(bounds, start) - 1
    found = []
    while part < len(bounds) - 1 and bounds[part] < stop:
        low, high = max(start, bounds[part]), min(stop, bounds[part + 1])
        if low < high:
            found.append((part, slice(low, high)))
        part += 1
    return found


def _mover(parts: list[tuple[int, slice]], turn: int) -> int:
    """Return the block of the chunk's mover; blocks with at least half of the largest share take turns."""
    most = max(cut.stop - cut.start for _, cut in parts)
    likely = [part for part, cut in parts if 2 * (cut.stop - cut.start) >= most]
    return likely[turn % len(likely)]
