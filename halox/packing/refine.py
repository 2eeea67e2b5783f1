"""Strided copies between two layouts: refined to common levels, cut at packed byte ranges.

A :class:`Copy` names bytes twice, by a source and by a target, each as strided blocks of its own.
A loop can walk both at once only where both have the same counts; :func:`pieces` finds the few
loops that do it. :func:`cut_parts` cuts the packing of a large message into fragments.
No GPU is touched here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

from halox.datatypes import StridedBlocks
from halox.errors import DatatypeError

if TYPE_CHECKING:
    from halox.datatypes import Datatype


MAX_PARTS = 64
"""Most strided parts of a type that is moved as such; a type of more is moved by a list of blocks."""


class Side(NamedTuple):
    """One side of a copy: strided blocks whose offset counts from an address."""

    pointer: int
    strided: StridedBlocks


class Copy(NamedTuple):
    """Bytes to move from one side to the other; both sides have equally many, in packed order."""

    source: Side
    target: Side


class Level(NamedTuple):
    """One loop over both sides; strides in bytes."""

    steps: int
    source_stride: int
    target_stride: int


class Piece(NamedTuple):
    """A loop nest over bytes, outermost level first, from one address to another."""

    source: int
    target: int
    levels: tuple[Level, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One side's bytes: an address and (count, stride) levels down to the single byte."""

    pointer: int
    levels: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the run."""
        return prod(count for count, _ in self.levels)

    def range(self, start: int, nbytes: int) -> Iterator[Run]:
        """Bytes ``[start, start + nbytes)`` in packed order, as few runs as levels demand."""
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
            yield from Run(self.pointer + item * stride, inner).range(skipped, head)
            item += 1
            nbytes -= head
        whole, tail = divmod(nbytes, inner_nbytes)
        if whole:
            yield Run(self.pointer + item * stride, _levels([(whole, stride), *inner]))
        yield from Run(self.pointer + (item + whole) * stride, inner).range(0, tail)


def _levels(levels: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple(level for level in levels if level[0] != 1)


def contiguous_side(pointer: int, nbytes: int) -> Side:
    """Return a side of ``nbytes`` bytes without gaps."""
    return Side(pointer, StridedBlocks(0, (), (), nbytes))


def paired(
    pointer: int, datatype: Datatype, count: int, packed: int, limit: int = MAX_PARTS
) -> list[tuple[Side, Side]] | None:
    """Pair the strided parts of some items with their places in packed memory.

    Displacement 0 is at address ``pointer``, the first packed byte at ``packed``. The pairs, array side
    first, hold all bytes once. None if the items have more than ``limit`` parts.
    """
    parts = datatype.items(count).parts(limit)
    if parts is None:
        return None
    return [(Side(pointer, part.memory), Side(packed, part.packed)) for part in parts]


def pieces(copy: Copy) -> list[Piece]:
    """Loop nests that together perform a copy.

    The last level of each walks single bytes, both strides 1; other counts are above 1, and
    neighbouring levels are merged where both sides allow it. One piece where the two sides' levels
    fit together, as for a pack, an unpack and boxes of equal shape; more where blocks of different
    lengths meet, at worst one a block. Raises `DatatypeError` if the sides differ in bytes.
    """
    source, target = _runs_of(copy)
    if copy.source.strided.nbytes == 0:
        return []
    return [
        Piece(first.pointer, second.pointer, _merged(levels))
        for first, second, levels in _refine(source, target, ())
    ]


def single_piece(copy: Copy) -> Piece | None:
    """Return the loop nest that performs a copy, None if it takes several, or the copy has no bytes."""
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


def _runs_of(copy: Copy) -> tuple[Run, Run]:
    """Both sides as runs, after a check that they are of equal size."""
    given, wanted = (side.strided.nbytes for side in copy)
    if given != wanted:
        raise DatatypeError(
            f"copy: the source has {given} bytes and the target {wanted}; both sides must have the "
            "same number"
        )
    return _run_of(copy.source), _run_of(copy.target)


def _run_of(side: Side) -> Run:
    blocks = side.strided
    levels = [*zip(blocks.counts, blocks.strides, strict=True), (blocks.block_bytes, 1)]
    return Run(side.pointer + blocks.offset, _levels(levels))


def _refine(
    source: Run, target: Run, outer: tuple[Level, ...]
) -> Iterator[tuple[Run, Run, tuple[Level, ...]]]:
    """Peel levels off two runs of equal size, outermost first."""
    if not source.levels:  # then the target has none left either: a single byte
        yield source, target, outer
        return
    peeled = _peeled(source, target)
    if peeled is not None:
        first, second, level = peeled
        yield from _refine(first, second, (*outer, level))
        return
    (n_source, s_stride), *s_inner = source.levels
    (n_target, t_stride), *t_inner = target.levels
    # The outermost counts have no common factor: no level fits both. The side with fewer, larger
    # items falls apart into them, the other into the ranges that match.
    sources, targets = [source], [target]
    if n_source < n_target:
        sources = [Run(source.pointer + i * s_stride, tuple(s_inner)) for i in range(n_source)]
    else:
        targets = [Run(target.pointer + i * t_stride, tuple(t_inner)) for i in range(n_target)]
    for first, second in _matched(sources, targets):
        yield from _refine(first, second, outer)


def _peeled(source: Run, target: Run) -> tuple[Run, Run, Level] | None:
    """Take the largest common level off the outside of two runs; None if their outermost counts have no factor."""
    (n_source, s_stride), *s_inner = source.levels
    (n_target, t_stride), *t_inner = target.levels
    common = gcd(n_source, n_target)
    if common == 1:
        return None
    s_left, t_left = n_source // common, n_target // common
    return (
        Run(source.pointer, _levels([(s_left, s_stride), *s_inner])),
        Run(target.pointer, _levels([(t_left, t_stride), *t_inner])),
        Level(common, s_stride * s_left, t_stride * t_left),
    )


def _matched(sources: list[Run], targets: list[Run]) -> Iterator[tuple[Run, Run]]:
    """Pair two sequences of runs of equally many bytes, cut at each other's ends."""
    sources, targets = sources[::-1], targets[::-1]  # stacks: the next run is the last
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
    """Merge neighbouring levels that are one on both sides; end in a level of single bytes."""
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

    ``ends`` are the ends of the parts, ascending, the last one at the copy's size; a part may be
    empty. For each part the copies that move its bytes: few, as long as both sides are few nested
    loops. Raises `DatatypeError` if the sides differ in bytes, or ``ends`` does not end at their size.
    """
    source, target = _runs_of(copy)
    nbytes = copy.source.strided.nbytes
    if not ends or ends[-1] != nbytes or any(a > b for a, b in pairwise(ends)):
        raise DatatypeError(f"ends: got {list(ends)}, must ascend to the copy's {nbytes} bytes")
    parts, start = [], 0
    for end in ends:
        sides = ([*run.range(start, end - start)] for run in (source, target))
        parts.append([Copy(_side(a), _side(b)) for a, b in _matched(*sides)])
        start = end
    return parts


def _side(run: Run) -> Side:
    *outer, last = run.levels or ((1, 1),)
    if last[1] != 1:
        outer, last = [*outer, last], (1, 1)
    counts, strides = (tuple(level[i] for level in outer) for i in (0, 1))
    return Side(run.pointer, StridedBlocks(0, counts, strides, last[0]))


def cut_parts(
    pointer: int,
    datatype: Datatype,
    count: int,
    packed: int,
    ends: Sequence[int],
    *,
    unpack: bool,
) -> list[list[Copy]] | int:
    """Cut the packing, or unpacking, of some items at positions of their packed bytes.

    Addresses as for :func:`paired`; ``ends`` are the ends of the fragments, counted from ``packed``:
    ascending, the last one at the items' size. Fragments may be empty. Returns the copies of each
    fragment; or, if the items are too irregular to be moved as strided copies, the number of the one
    fragment with which all of them must be moved. A part that cannot be cut is packed for the first
    fragment that has a byte of it, and unpacked with the last one.
    """
    pairs = paired(pointer, datatype, count, packed)
    if pairs is None:
        return _bearer(ends, 0, ends[-1], unpack)
    fragments: list[list[Copy]] = [[] for _ in ends]
    for array, place in pairs:
        copy = Copy(place, array) if unpack else Copy(array, place)
        low, high = (place.pointer - packed + end for end in place.strided.span)
        if place.strided.counts:  # scattered over the packed bytes
            fragments[_bearer(ends, low, high, unpack)].append(copy)
            continue
        own = [min(max(end - low, 0), high - low) for end in ends]
        for fragment, copies in zip(fragments, cut(copy, own), strict=True):
            fragment += copies
    return fragments


def _bearer(ends: Sequence[int], low: int, high: int, unpack: bool) -> int:
    """Return the first fragment that has a byte of [low, high), or for unpacking the last one."""
    return bisect_left(ends, high) if unpack else bisect_right(ends, low)
