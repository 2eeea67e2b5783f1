"""Strided copies between two layouts: loop nests that walk both sides, and cuts at positions of the packed bytes.

A :class:`Copy` has a source and a target, and each side has its own strided blocks. One loop nest can walk
both sides only if both have the same counts. :func:`pieces` finds a few loop nests that together perform the
copy. :func:`cut_parts` cuts the packing of a large message into fragments. This module does not use a GPU.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

from halox.datatypes import StridedBlocks
from halox.errors import DatatypeError

if TYPE_CHECKING:
    from halox.datatypes import Datatype


MAX_PARTS = 64
"""Largest number of strided parts that a datatype is packed as; with more parts, a list of blocks is used."""


class Side(NamedTuple):
    """One side of a copy: strided blocks, and the address that their offset is relative to.

    ``array`` is a number of the array: a launch can serve other arrays, by additions to the addresses of each number.
    """

    pointer: int
    strided: StridedBlocks
    array: int | None = None


class Copy(NamedTuple):
    """Copy of the source's bytes to the target, in packed order; both sides have equally many bytes."""

    source: Side
    target: Side


class Level(NamedTuple):
    """One loop over both sides; strides in bytes."""

    steps: int
    source_stride: int
    target_stride: int


class Piece(NamedTuple):
    """A loop nest that copies bytes from one address to another; outermost level first."""

    source: int
    target: int
    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True)
class ByteRun:
    """One side of a copy as an address and (count, stride) levels, the last of which walk single bytes."""

    pointer: int
    levels: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return prod(count for count, _ in self.levels)

    def range(self, start: int, nbytes: int) -> Iterator[ByteRun]:
        """Yield bytes ``[start, start + nbytes)``, in packed order, in a few runs."""
        if nbytes == 0:
            return
        if nbytes == self.nbytes:
            yield self
            return
        (_, stride), inner = self.levels[0], self.levels[1:]
        inner_nbytes = prod(count for count, _ in inner)
        item, skipped = divmod(start, inner_nbytes)
        if skipped:
            head = min(nbytes, inner_nbytes - skipped)
            yield from ByteRun(self.pointer + item * stride, inner).range(skipped, head)
            item += 1
            nbytes -= head
        whole, tail = divmod(nbytes, inner_nbytes)
        if whole:
            yield ByteRun(self.pointer + item * stride, _levels([(whole, stride), *inner]))
        yield from ByteRun(self.pointer + (item + whole) * stride, inner).range(0, tail)


def _levels(levels: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple(level for level in levels if level[0] != 1)


def contiguous_side(pointer: int, nbytes: int) -> Side:
    """Return a side of ``nbytes`` bytes without gaps."""
    return Side(pointer, StridedBlocks(0, (), (), nbytes))


def paired(
    pointer: int,
    datatype: Datatype,
    count: int,
    packed: int,
    *,
    array: int | None = None,
) -> list[tuple[Side, Side]] | None:
    """Pair the strided parts of some items with their places in packed memory.

    Displacement 0 is at address ``pointer`` of the array with the number ``array``, and the first packed byte is at
    ``packed``. The pairs, array side first, together hold every byte once. None if the items have more than
    `MAX_PARTS` parts.
    """
    parts = datatype.items(count).parts(MAX_PARTS)
    if parts is None:
        return None
    return [(Side(pointer, part.memory, array), Side(packed, part.packed)) for part in parts]


def pieces(copy: Copy) -> list[Piece]:
    """Return loop nests that together perform a copy.

    The last level of each nest walks single bytes; both its strides are 1. All other counts are above 1.
    Adjacent levels are merged if both sides allow it. There is one piece if the levels of the two sides are
    compatible, for example for a pack, an unpack, and boxes of equal shape. There are more pieces if blocks
    of different lengths meet, in the worst case one per block. Raises `DatatypeError` if the sides have
    different numbers of bytes.
    """
    source, target = _runs_of(copy)
    if copy.source.strided.nbytes == 0:
        return []
    return [
        Piece(first.pointer, second.pointer, _merged(levels))
        for first, second, levels in _refine(source, target, ())
    ]


def single_piece(copy: Copy) -> Piece | None:
    """Return the loop nest that performs a copy; None if the copy needs several loop nests or has no bytes."""
    source, target = _runs_of(copy)
    if not source.nbytes:
        return None
    levels: tuple[Level, ...] = ()
    while source.levels:
        peeled = _peeled(source, target)
        if peeled is None:
            return None
        source, target, level = peeled
        levels = (*levels, level)
    return Piece(source.pointer, target.pointer, _merged(levels))


def _runs_of(copy: Copy) -> tuple[ByteRun, ByteRun]:
    """Return both sides as runs, after a check that they have equally many bytes."""
    given, wanted = (side.strided.nbytes for side in copy)
    if given != wanted:
        raise DatatypeError(
            f"copy: the source has {given} bytes and the target {wanted}; both sides must have the "
            "same number"
        )
    return _run_of(copy.source), _run_of(copy.target)


def _run_of(side: Side) -> ByteRun:
    blocks = side.strided
    levels = [*zip(blocks.counts, blocks.strides, strict=True), (blocks.block_bytes, 1)]
    return ByteRun(side.pointer + blocks.offset, _levels(levels))


def _refine(
    source: ByteRun, target: ByteRun, outer: tuple[Level, ...]
) -> Iterator[tuple[ByteRun, ByteRun, tuple[Level, ...]]]:
    if not source.levels:  # The target has no levels either: both sides are a single byte.
        yield source, target, outer
        return
    peeled = _peeled(source, target)
    if peeled is not None:
        first, second, level = peeled
        yield from _refine(first, second, (*outer, level))
        return
    (n_source, s_stride), *s_inner = source.levels
    (n_target, t_stride), *t_inner = target.levels
    # The outermost counts have no common factor, so there is no common level. Split the side with
    # fewer, larger items into these items, and the other side into the matching ranges.
    sources, targets = [source], [target]
    if n_source < n_target:
        sources = [ByteRun(source.pointer + i * s_stride, tuple(s_inner)) for i in range(n_source)]
    else:
        targets = [ByteRun(target.pointer + i * t_stride, tuple(t_inner)) for i in range(n_target)]
    for first, second in _matched(sources, targets):
        yield from _refine(first, second, outer)


def _peeled(source: ByteRun, target: ByteRun) -> tuple[ByteRun, ByteRun, Level] | None:
    """Peel the largest common outer level off two runs; None if their outermost counts have no common factor."""
    (n_source, s_stride), *s_inner = source.levels
    (n_target, t_stride), *t_inner = target.levels
    common = gcd(n_source, n_target)
    if common == 1:
        return None
    s_left, t_left = n_source // common, n_target // common
    return (
        ByteRun(source.pointer, _levels([(s_left, s_stride), *s_inner])),
        ByteRun(target.pointer, _levels([(t_left, t_stride), *t_inner])),
        Level(common, s_stride * s_left, t_stride * t_left),
    )


def _matched(sources: list[ByteRun], targets: list[ByteRun]) -> Iterator[tuple[ByteRun, ByteRun]]:
    """Pair two sequences of runs with equally many bytes; runs are cut where a run of the other sequence ends."""
    sources, targets = sources[::-1], targets[::-1]  # stacks: the last entry is the next run
    while sources:
        source, target = sources.pop(), targets.pop()
        extra = source.nbytes - target.nbytes
        if extra == 0:
            yield source, target
            continue
        longer, shorter = (source, target) if extra > 0 else (target, source)
        parts = [*longer.range(0, shorter.nbytes), *longer.range(shorter.nbytes, abs(extra))]
        longer_stack, shorter_stack = (sources, targets) if extra > 0 else (targets, sources)
        longer_stack.extend(reversed(parts))
        shorter_stack.append(shorter)


def _merged(levels: tuple[Level, ...]) -> tuple[Level, ...]:
    """Merge adjacent levels that are contiguous on both sides; the last level walks single bytes."""
    merged = [] if levels and levels[-1][1:] == (1, 1) else [Level(1, 1, 1)]
    for level in reversed(levels):
        if merged:
            below = merged[-1]
            if level[1:] == (below.steps * below.source_stride, below.steps * below.target_stride):
                merged[-1] = below._replace(steps=below.steps * level.steps)
                continue
        merged.append(level)
    return tuple(reversed(merged))


def cut(copy: Copy, ends: Sequence[int]) -> list[list[Copy]]:
    """Cut a copy at byte positions of its packed order.

    ``ends`` are the ends of the parts, in ascending order; the last end is the copy's size. A part may be
    empty. Returns the copies of each part, which are few if both sides have few levels.
    """
    source, target = _runs_of(copy)
    parts, start = [], 0
    for end in ends:
        sides = ([*run.range(start, end - start)] for run in (source, target))
        numbers = copy.source.array, copy.target.array
        parts.append(
            [Copy(_side(a, numbers[0]), _side(b, numbers[1])) for a, b in _matched(*sides)]
        )
        start = end
    return parts


def _side(run: ByteRun, array: int | None) -> Side:
    *outer, last = run.levels or ((1, 1),)
    if last[1] != 1:
        outer, last = [*outer, last], (1, 1)
    counts, strides = (tuple(level[i] for level in outer) for i in (0, 1))
    return Side(run.pointer, StridedBlocks(0, counts, strides, last[0]), array)


def cut_parts(
    pointer: int,
    datatype: Datatype,
    count: int,
    packed: int,
    ends: Sequence[int],
    *,
    unpack: bool,
    array: int | None = None,
) -> list[list[Copy]] | int:
    """Cut the packing, or unpacking, of some items at positions of their packed bytes.

    The addresses are the same as for :func:`paired`. ``ends`` are the ends of the fragments, relative to
    ``packed`` and in ascending order; the last end is the items' size. A fragment may be empty. Returns the
    copies of each fragment. If the items are too irregular for strided copies, returns the number of the one
    fragment that must move all items. A part that cannot be cut is packed with the first fragment that
    contains one of its bytes, and unpacked with the last such fragment.
    """
    pairs = paired(pointer, datatype, count, packed, array=array)
    if pairs is None:
        return _fragment_of(ends, 0, ends[-1], unpack)
    fragments: list[list[Copy]] = [[] for _ in ends]
    for there, place in pairs:
        copy = Copy(place, there) if unpack else Copy(there, place)
        low, high = (place.pointer - packed + end for end in place.strided.span)
        if place.strided.counts:  # The part's packed bytes are not contiguous.
            fragments[_fragment_of(ends, low, high, unpack)].append(copy)
            continue
        own = [min(max(end - low, 0), high - low) for end in ends]
        for fragment, copies in zip(fragments, cut(copy, own), strict=True):
            fragment += copies
    return fragments


def _fragment_of(ends: Sequence[int], low: int, high: int, unpack: bool) -> int:
    """Return the first fragment with a byte of [low, high), or, for unpacking, the last fragment."""
    return bisect_left(ends, high) if unpack else bisect_right(ends, low)
