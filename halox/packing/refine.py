"""Strided copies between two layouts, brought to common levels.

A :class:`Copy` names bytes twice, by a source and by a target, each as strided blocks of its own.
A loop can walk both at once only where both have the same counts; :func:`pieces` finds the few
loops that do it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

from halox.datatypes import StridedBlocks
from halox.errors import DatatypeError

if TYPE_CHECKING:
    from halox.datatypes import Datatype


MAX_PARTS = 64
"""Most strided parts of a type that is moved as such; more are a matter for lists of blocks."""


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

    Parameters
    ----------
    pointer : int
        Address of the element at displacement 0.
    datatype : Datatype
    count : int
        Items, one extent apart.
    packed : int
        Address of the first packed byte.
    limit : int
        Most parts.

    Returns
    -------
    list of (Side, Side) or None
        Array side and packed side of each part, together all bytes once; empty if there are none.
        None if it takes more than ``limit`` parts.

    Notes
    -----
    Not collective; touches no device.
    """
    parts = datatype.items(count).parts(limit)
    if parts is None:
        return None
    return [(Side(pointer, part.memory), Side(packed, part.packed)) for part in parts]


def pieces(copy: Copy) -> list[Piece]:
    """Loop nests that together perform a copy.

    Parameters
    ----------
    copy : Copy

    Returns
    -------
    list of Piece
        The last level of each walks single bytes, both strides 1; counts above 1 otherwise,
        neighbouring levels merged where both sides allow it. One piece where the two sides'
        levels fit together, as they do for a pack, an unpack and boxes of equal shape; more where
        blocks of different lengths meet.

    Raises
    ------
    DatatypeError
        If the two sides have different numbers of bytes.

    Notes
    -----
    Not collective; touches no device. Copies whose block lengths have no common pattern cost one
    piece a block.
    """
    source, target = run_of(copy.source), run_of(copy.target)
    if copy.source.strided.nbytes != copy.target.strided.nbytes:
        raise DatatypeError(
            f"copy: the source has {copy.source.strided.nbytes} bytes and the target "
            f"{copy.target.strided.nbytes}; both sides must have the same number"
        )
    if copy.source.strided.nbytes == 0:
        return []
    return [
        Piece(first.pointer, second.pointer, _merged(levels))
        for first, second, levels in _refine(source, target, ())
    ]


def run_of(side: Side) -> Run:
    """Return a side's bytes as one run."""
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
    (n_source, s_stride), *s_inner = source.levels
    (n_target, t_stride), *t_inner = target.levels
    common = gcd(n_source, n_target)
    if common > 1:
        s_left, t_left = n_source // common, n_target // common
        yield from _refine(
            Run(source.pointer, _levels([(s_left, s_stride), *s_inner])),
            Run(target.pointer, _levels([(t_left, t_stride), *t_inner])),
            (*outer, Level(common, s_stride * s_left, t_stride * t_left)),
        )
        return
    # The outermost counts have no common factor: no level fits both. The side with fewer, larger
    # items falls apart into them, the other into the ranges that match.
    if n_source < n_target:
        first = [Run(source.pointer + i * s_stride, tuple(s_inner)) for i in range(n_source)]
        yield from _match(first, [target], outer)
    else:
        second = [Run(target.pointer + i * t_stride, tuple(t_inner)) for i in range(n_target)]
        yield from _match([source], second, outer)


def _match(
    sources: list[Run], targets: list[Run], outer: tuple[Level, ...]
) -> Iterator[tuple[Run, Run, tuple[Level, ...]]]:
    """Cut two sequences of runs at each other's ends and refine the pairs."""
    sources, targets = sources[::-1], targets[::-1]  # stacks: the next run is the last
    while sources:
        source, target = sources.pop(), targets.pop()
        extra = source.nbytes - target.nbytes
        if extra == 0:
            yield from _refine(source, target, outer)
            continue
        longer, shorter = (source, target) if extra > 0 else (target, source)
        cut = [*longer.range(0, shorter.nbytes), *longer.range(shorter.nbytes, abs(extra))]
        longer_stack, shorter_stack = (sources, targets) if extra > 0 else (targets, sources)
        longer_stack.extend(reversed(cut))
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
