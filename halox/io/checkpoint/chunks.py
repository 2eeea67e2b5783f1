"""Shards of a whole field, the ranks that write them, and the ranks that own their cells; integers only.

A shard is one file or object; it consists of chunks, which are compressed and checked one by one, so that a load reads
few cells that it does not need. All shards have the same shape. Along an axis they are as long as the blocks of an even
division, or a fraction of these. If all blocks are equal, a shard is usually within one block. Otherwise a shard may
span two or more blocks, and the rank of one of these blocks writes the whole shard::

    blocks      0 0 0 | 1 1 1 | 2 2 | 3 3
    shards      0 0 0 | 1 1 1 | 2 2   3 | 3
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from halox.decomposition import FieldLayout
from halox.io.regions import Cut, place_of, points_before, points_of, region_shape

SHARD_BYTES = 32 << 20
"""Maximum bytes of a shard before its extents are rounded up to whole chunks; a single element may be larger."""

CHUNK_BYTES = 1 << 20
"""Maximum bytes of a chunk; a single element may be larger."""


class OwnedPiece(NamedTuple):
    """Cells of a shard that one rank owns."""

    rank: int
    cut: Cut


class Shard(NamedTuple):
    """A shard: its cells, the rank that writes it, and the pieces of all ranks."""

    cut: Cut
    writer: int
    pieces: tuple[OwnedPiece, ...]


def shard_shapes(
    layout: FieldLayout, itemsize: int, region: Cut = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the shards and of their chunks for writing a field, or a region of it.

    Shards are cut along the first axes, so that their files are read in long runs; chunks are nearly cubes, so that
    any division reads few of them in part.

    Examples
    --------
    >>> from halox.decomposition import FieldSpec, decompose
    >>> grid = decompose((512, 512, 512), 4, proc_shape=(2, 2, 1))
    >>> shard_shapes(FieldLayout(grid, 0, FieldSpec(((1, 1),) * 3)), 8)
    ((32, 256, 512), (32, 64, 64))
    """
    shard = [max(1, extent) for extent in region_shape(layout, region)]  # no rows of particles
    for axis, parts in zip(layout.spec.grid_axes, layout.decomposition.proc_shape, strict=True):
        shard[axis] = -(-shard[axis] // parts)
    for axis, extent in enumerate(shard):
        excess = -(-prod(shard) * itemsize // SHARD_BYTES)
        shard[axis] = _divided(extent, min(excess, extent))
    chunk = list(shard)
    while prod(chunk) * itemsize > CHUNK_BYTES and max(chunk) > 1:
        axis = chunk.index(max(chunk))
        chunk[axis] = _divided(chunk[axis], 2)
    shard = [-(-extent // part) * part for extent, part in zip(shard, chunk, strict=True)]
    return tuple(shard), tuple(chunk)


def _divided(extent: int, parts: int) -> int:
    """Return the extent of the parts, which are equal if up to twice as many parts allow it."""
    even = (n for n in range(parts, min(2 * parts, extent) + 1) if extent % n == 0)
    return -(-extent // next(even, parts))


@dataclass(frozen=True)
class ShardGrid:
    """The shards of a field, written by this or another grid, and their owners and writers in this grid.

    With a ``region``, the shards contain only its points, and all boxes count these points.
    """

    layout: FieldLayout  # of the field on this rank
    shape: tuple[int, ...]  # extents of a shard
    region: Cut = ()  # a slice per grid axis, as of `region_shape`

    @cached_property
    def own(self) -> Cut:
        """The cells that this rank owns; empty if the region has none of them."""
        owned = self.layout.owned
        return self._box(place_of(self.region, owned) if self.region else owned)

    @cached_property
    def own_cells(self) -> Cut:
        """The index of this rank's cells of the region, in the array of all cells that this rank owns."""
        return self._box(points_of(self.region, self.layout.owned))

    def _box(self, cuts: Cut) -> Cut:
        """Return cuts of the grid axes, with all components."""
        spec = self.layout.spec
        before, after = spec.components_before, spec.components_after
        return (*(slice(0, n) for n in before), *cuts, *(slice(0, n) for n in after))

    @cached_property
    def _bounds(self) -> tuple[tuple[int, ...], ...]:
        """Return the first cell of each block along each grid axis, and the end of the last block."""
        spec, axes = self.layout.spec, self.layout.decomposition.axes
        all_bounds = []
        for number, axis in enumerate(axes):
            starts = [axis.owned_points(part, False)[0] for part in range(axis.parts)]
            bounds = (*starts, axis.points(spec.staggered[number]))
            if spec.parity is not None and number == len(axes) - 1:
                bounds = tuple(bound // 2 for bound in bounds)
            if self.region:
                bounds = tuple(points_before(self.region[number], bound) for bound in bounds)
            all_bounds.append(bounds)
        return tuple(all_bounds)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The shards with cells of this rank, in one order on all ranks."""
        return tuple(map(self._shard, self._numbers()))

    @cached_property
    def own_cuts(self) -> tuple[Cut, ...]:
        """The cells that this rank owns, of each of its shards."""
        return tuple(
            tuple(
                slice(max(k * n, own.start), min((k + 1) * n, own.stop))
                for k, n, own in zip(number, self.shape, self.own, strict=True)
            )
            for number in self._numbers()
        )

    @cached_property
    def local_cuts(self) -> tuple[Cut, ...]:
        """The positions of ``own_cuts`` within the block of this rank."""
        return tuple(relative(cut, self.own) for cut in self.own_cuts)

    def _numbers(self) -> Iterator[tuple[int, ...]]:
        return product(
            *(
                range(cut.start // n, -(-cut.stop // n) if cut.stop > cut.start else 0)
                for cut, n in zip(self.own, self.shape, strict=True)
            )
        )

    def _shard(self, number: tuple[int, ...]) -> Shard:
        whole = region_shape(self.layout, self.region)
        cut = tuple(
            slice(k * n, min((k + 1) * n, extent))
            for k, n, extent in zip(number, self.shape, whole, strict=True)
        )
        grid = self.layout.spec.grid_slice
        along = [
            _overlaps(bounds, axis.start, axis.stop)
            for bounds, axis in zip(self._bounds, cut[grid], strict=True)
        ]
        decomposition = self.layout.decomposition
        pieces = []
        for parts in product(*along):
            rank = decomposition.rank_at([part for part, _ in parts])
            assert rank is not None
            pieces.append(
                OwnedPiece(rank, (*cut[: grid.start], *(c for _, c in parts), *cut[grid.stop :]))
            )
        turn = sum(number)
        writer = decomposition.rank_at([_writer(parts, turn) for parts in along])
        assert writer is not None
        return Shard(cut, writer, tuple(pieces))


def relative(cut: Cut, base: Cut) -> Cut:
    """Return the position of a box within another box.

    Examples
    --------
    >>> relative((slice(5, 8),), (slice(4, 9),))
    (slice(1, 4, None),)
    """
    return tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(cut, base, strict=True))


def extents(cut: Cut) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(c.stop - c.start for c in cut)


def _overlaps(bounds: tuple[int, ...], start: int, stop: int) -> list[tuple[int, slice]]:
    """Return the blocks of an axis that own points of an interval, each with these points."""
    part = bisect_right(bounds, start) - 1
    shares = []
    while part < len(bounds) - 1 and bounds[part] < stop:
        low, high = max(start, bounds[part]), min(stop, bounds[part + 1])
        if low < high:
            shares.append((part, slice(low, high)))
        part += 1
    return shares


def _writer(parts: list[tuple[int, slice]], turn: int) -> int:
    """Return the block of the shard's writer; blocks with at least half of the largest share take turns."""
    most = max(cut.stop - cut.start for _, cut in parts)
    likely = [part for part, cut in parts if 2 * (cut.stop - cut.start) >= most]
    return likely[turn % len(likely)]
