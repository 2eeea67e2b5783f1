"""Layouts of datatypes: strided blocks, block lists, and the tree between them.

A layout is a typemap without the types: blocks of bytes in order. A layout with regular strides reduces to
one :class:`StridedBlocks` in canonical form. The canonical form is unique: layouts that touch the same bytes
in the same order have equal forms. An irregular layout is a tree of `Listed`, `Chained` and `Indexed` nodes,
and expands into a :class:`BlockList` on demand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from halox.datatypes.arguments import Int64Array, frozen, total
from halox.errors import DatatypeError


class Layout(ABC):
    """Blocks of bytes in order, relative to an origin."""

    __slots__ = ()

    @property
    @abstractmethod
    def strided(self) -> StridedBlocks | None:
        """The canonical strided form, or None if the layout has none."""

    @abstractmethod
    def block_list(self) -> BlockList:
        """List the blocks, adjacent ones merged."""

    @abstractmethod
    def repeated(self, count: int, stride: int) -> Layout:
        """``count`` copies, ``stride`` bytes apart."""

    @property
    @abstractmethod
    def most_blocks(self) -> int:
        """Number of blocks before merging, computed without listing the blocks."""

    @abstractmethod
    def parts(self, limit: int) -> tuple[PackedPart, ...] | None:
        """Strided parts that together hold every byte once; None if there are more than ``limit``."""

    def shifted(self, offset: int) -> Layout:
        """Shift the layout by ``offset`` bytes."""
        return Indexed(self, _singleton(offset), _singleton(1), 0) if offset else self

    def indexed(self, displacements: Int64Array, lengths: Int64Array, stride: int) -> Layout:
        """``lengths[i]`` copies ``stride`` bytes apart at ``displacements[i]``, for each i."""
        return Indexed(self, displacements, lengths, stride)

    def same_as(self, other: Layout) -> bool:
        """Whether both layouts touch the same bytes in the same order."""
        mine, theirs = self.strided, other.strided
        if mine is not None or theirs is not None:
            return mine == theirs
        return self.block_list().same_as(other.block_list())


@dataclass(frozen=True, slots=True)
class StridedBlocks(Layout):
    """Equal blocks at nested equal strides.

    The block with index ``(i, j, ...)`` starts at byte
    ``offset + i * strides[0] + j * strides[1] + ...``. The last index runs fastest.

    Parameters
    ----------
    offset : int
        Byte displacement of the first block.
    counts, strides : tuple of int
        Number of blocks and bytes between blocks per level, outermost level first.
    block_bytes : int
        Contiguous bytes per block.

    Notes
    -----
    :meth:`canonical` makes the canonical form, and ``Datatype.strided`` always has it. In the
    canonical form no count is 1, the innermost stride differs from ``block_bytes``, and no level
    continues the next level (``strides[i] == counts[i+1] * strides[i+1]``). The canonical form of a
    layout without bytes is ``StridedBlocks(0, (), (), 0)``.

    Examples
    --------
    >>> StridedBlocks.canonical(8, (4, 1, 3), (96, 5, 8), 8)
    StridedBlocks(offset=8, counts=(4,), strides=(96,), block_bytes=24)
    """

    offset: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    block_bytes: int

    def __reduce__(self) -> tuple[type[StridedBlocks], tuple[object, ...]]:
        """Pickle the fields alone, because plans send many layouts."""
        return StridedBlocks, (self.offset, self.counts, self.strides, self.block_bytes)

    @staticmethod
    def canonical(
        offset: int, counts: Iterable[int], strides: Iterable[int], block_bytes: int
    ) -> StridedBlocks:
        """Reduce nested strides, outermost first, to the canonical form."""
        levels: list[tuple[int, int]] = []  # innermost first
        for count, stride in zip(reversed((*counts,)), reversed((*strides,)), strict=True):
            if count == 1:
                continue
            if count == 0 or not block_bytes:
                return EMPTY
            if not levels and stride == block_bytes:
                block_bytes *= count
            elif levels and stride == levels[-1][0] * levels[-1][1]:
                levels[-1] = count * levels[-1][0], levels[-1][1]
            else:
                levels.append((count, stride))
        if not block_bytes:
            return EMPTY
        levels.reverse()
        sizes, steps = zip(*levels, strict=True) if levels else ((), ())
        return StridedBlocks(offset, sizes, steps, block_bytes)

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return prod(self.counts) if self.block_bytes else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks together."""
        return prod(self.counts) * self.block_bytes

    @property
    def strided(self) -> StridedBlocks:
        return self

    @property
    def most_blocks(self) -> int:
        return self.n_blocks

    @property
    def span(self) -> tuple[int, int]:
        """Half-open range of the bytes touched: the first byte, and one past the last."""
        reach = [(n - 1) * stride for n, stride in zip(self.counts, self.strides, strict=True)]
        low = self.offset + sum(r for r in reach if r < 0)
        return low, self.offset + sum(r for r in reach if r > 0) + self.block_bytes

    def parts(self, limit: int) -> tuple[PackedPart, ...] | None:
        if not self.nbytes:
            return ()
        return (PackedPart(self, StridedBlocks(0, (), (), self.nbytes)),) if limit else None

    @property
    def overlaps(self) -> bool:
        """Whether a byte may be touched twice; False means that no byte is."""
        reach = self.block_bytes
        levels = sorted(
            zip(self.strides, self.counts, strict=True), key=lambda level: abs(level[0])
        )
        for stride, count in levels:
            if abs(stride) < reach:
                return True
            reach += abs(stride) * (count - 1)
        return False

    def repeated(self, count: int, stride: int) -> StridedBlocks:
        """``count`` copies, ``stride`` bytes apart, in canonical form."""
        counts, strides = (count, *self.counts), (stride, *self.strides)
        return StridedBlocks.canonical(self.offset, counts, strides, self.block_bytes)

    def shifted(self, offset: int) -> StridedBlocks:
        if not self.block_bytes:
            return self
        return StridedBlocks(self.offset + offset, self.counts, self.strides, self.block_bytes)

    def indexed(self, displacements: Int64Array, lengths: Int64Array, stride: int) -> Layout:
        if not self.counts and stride == self.block_bytes:
            return Listed(BlockList(displacements + self.offset, lengths * stride))
        return Indexed(self, displacements, lengths, stride)

    def offsets(self) -> Int64Array:
        """Byte displacement of every block, in order; adjacent blocks are not merged."""
        _check_listable(self.n_blocks)
        starts = np.array([self.offset] if self.block_bytes else [], dtype=np.int64)
        for count, stride in zip(self.counts, self.strides, strict=True):
            starts = _outer_sum(starts, np.arange(count, dtype=np.int64) * stride)
        return starts

    def block_list(self) -> BlockList:
        starts = self.offsets()
        return BlockList(starts, np.full(starts.size, self.block_bytes, dtype=np.int64)).merged()


EMPTY = StridedBlocks(0, (), (), 0)
"""The layout without bytes."""


class PackedPart(NamedTuple):
    """Strided blocks in memory, and the positions of the same bytes in the packed data."""

    memory: StridedBlocks
    packed: StridedBlocks

    def repeated(self, count: int, stride: int, nbytes: int) -> PackedPart:
        return PackedPart(self.memory.repeated(count, stride), self.packed.repeated(count, nbytes))

    def shifted(self, offset: int, packed: int) -> PackedPart:
        return PackedPart(self.memory.shifted(offset), self.packed.shifted(packed))


def _nbytes(parts: tuple[PackedPart, ...]) -> int:
    return sum(part.memory.nbytes for part in parts)


@dataclass(frozen=True, slots=True, eq=False)
class BlockList:
    """Blocks of bytes in order, of any displacements and lengths.

    Parameters
    ----------
    offsets, lengths : ndarray of int64, shape (n_blocks,)
        First byte and number of bytes of each block; read-only.
    """

    offsets: Int64Array
    lengths: Int64Array

    def __post_init__(self) -> None:
        frozen(self.offsets)
        frozen(self.lengths)

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return int(self.offsets.size)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks together."""
        return int(self.lengths.sum())

    @property
    def overlaps(self) -> bool:
        """Whether a byte is touched twice."""
        order = np.argsort(self.offsets, kind="stable")
        starts, lengths = self.offsets[order], self.lengths[order]
        return bool((starts[:-1] + lengths[:-1] > starts[1:]).any())

    def same_as(self, other: BlockList) -> bool:
        """Whether both lists hold the same blocks in the same order."""
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(
            self.lengths, other.lengths
        )

    def merged(self) -> BlockList:
        """Drop empty blocks, and merge consecutive blocks that are adjacent in memory."""
        offsets, lengths = self.offsets, self.lengths
        if not lengths.all():
            offsets, lengths = offsets[lengths != 0], lengths[lengths != 0]
        apart = offsets[1:] != offsets[:-1] + lengths[:-1]
        if not apart.all():
            starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
            offsets, lengths = offsets[starts], np.add.reduceat(lengths, starts)
        return BlockList(offsets, lengths)

    def shifted(self, offset: int) -> BlockList:
        """Shift the blocks by ``offset`` bytes."""
        return BlockList(self.offsets + offset, self.lengths) if offset else self

    def at(self, displacements: Int64Array) -> BlockList:
        """Repeat the list at each displacement, in order, and merge."""
        _check_listable(displacements.size * self.offsets.size)
        offsets = _outer_sum(displacements, self.offsets)
        return BlockList(offsets, np.tile(self.lengths, displacements.size)).merged()

    def strided(self) -> StridedBlocks | None:
        """Find the canonical strided form of a merged list, or None if it has none.

        Notes
        -----
        If the last block of a row ends where the next row begins, merging has joined the two
        blocks. The first and the last column of an array, for example, are adjacent in memory. The
        first block then has the length of one block, and every other block has once or twice this
        length. The method splits the joined blocks again.
        """
        if not self.n_blocks:
            return EMPTY
        offsets, lengths = self.offsets, self.lengths
        block = int(lengths[0])
        if not (lengths == block).all():
            if not np.isin(lengths, (block, 2 * block)).all():
                return None
            offsets = spread(offsets, lengths // block, block)
        levels = _regular_levels(offsets)
        return None if levels is None else StridedBlocks(int(offsets[0]), *levels, block)


class _Irregular(Layout):
    """Base class of the irregular layouts, which search for a strided form once and keep the result."""

    @cached_property
    def strided(self) -> StridedBlocks | None:
        return self._blocks.strided()

    @property
    def most_blocks(self) -> int:
        """Number of blocks of the strided form; without one, number of blocks before merging."""
        return self._count_blocks() if self.strided is None else self.strided.n_blocks

    def parts(self, limit: int) -> tuple[PackedPart, ...] | None:
        if self.strided is not None:
            return self.strided.parts(limit)
        parts = self._irregular_parts(limit)
        return None if parts is None or len(parts) > limit else parts

    def block_list(self) -> BlockList:
        """List the blocks, adjacent ones merged; kept after the first call."""
        return self._blocks

    def repeated(self, count: int, stride: int) -> Layout:
        return self if count == 1 else Indexed(self, _singleton(0), _singleton(count), stride)

    @property
    @abstractmethod
    def _blocks(self) -> BlockList:
        """The merged blocks, kept after the first use."""

    @abstractmethod
    def _count_blocks(self) -> int: ...

    @abstractmethod
    def _irregular_parts(self, limit: int) -> tuple[PackedPart, ...] | None:
        """Parts of a layout without a strided form; None, or more than ``limit`` parts, if there are too many."""


class Listed(_Irregular):
    """Blocks given as a list."""

    def __init__(self, given: BlockList) -> None:
        self.given = given

    def _count_blocks(self) -> int:
        return self.given.n_blocks

    def _irregular_parts(self, limit: int) -> tuple[PackedPart, ...] | None:
        blocks = self.block_list()
        if blocks.n_blocks > limit:
            return None
        packed = np.cumsum(blocks.lengths) - blocks.lengths
        return tuple(
            PackedPart(StridedBlocks(offset, (), (), length), StridedBlocks(at, (), (), length))
            for offset, length, at in zip(
                blocks.offsets.tolist(), blocks.lengths.tolist(), packed.tolist(), strict=True
            )
        )

    @cached_property
    def _blocks(self) -> BlockList:
        return self.given.merged()


class Chained(_Irregular):
    """Several layouts one after another."""

    def __init__(self, layouts: tuple[Layout, ...]) -> None:
        self.layouts = layouts

    def _count_blocks(self) -> int:
        return sum(layout.most_blocks for layout in self.layouts)

    def _irregular_parts(self, limit: int) -> tuple[PackedPart, ...] | None:
        all_parts: list[PackedPart] = []
        packed = 0
        for layout in self.layouts:
            parts = layout.parts(limit)
            if parts is None or len(all_parts) + len(parts) > limit:
                return None
            all_parts += [part.shifted(0, packed) for part in parts]
            packed += _nbytes(parts)
        return tuple(all_parts)

    @cached_property
    def _blocks(self) -> BlockList:
        lists = [layout.block_list() for layout in self.layouts]
        return BlockList(
            np.concatenate([blocks.offsets for blocks in lists]),
            np.concatenate([blocks.lengths for blocks in lists]),
        ).merged()


class Indexed(_Irregular):
    """Copies of a layout: ``lengths[i]`` copies, ``stride`` bytes apart, from ``displacements[i]`` on.

    The layout has a strided form only if its part has one, because repetition does not make an
    irregular sequence of blocks regular. In a regular sequence the step changes only at multiples
    of one run length. If the repeated sequence had this property, every copy would have it, too,
    and the part would be regular.
    """

    def __init__(
        self, part: Layout, displacements: Int64Array, lengths: Int64Array, stride: int
    ) -> None:
        used = lengths != 0
        self.part, self.stride = part, stride
        self.displacements, self.lengths = displacements[used], lengths[used]

    @cached_property
    def strided(self) -> StridedBlocks | None:
        if not self.lengths.size:
            return EMPTY
        part = self.part.strided
        if part is None:
            return None
        length = int(self.lengths[0])
        if (self.lengths == length).all():
            levels = _regular_levels(self.displacements)
            if levels is not None:
                form = part.repeated(length, self.stride).shifted(int(self.displacements[0]))
                for count, stride in zip(reversed(levels[0]), reversed(levels[1]), strict=True):
                    form = form.repeated(count, stride)
                return form
        return self._blocks.strided()

    def _count_blocks(self) -> int:
        return int(self.lengths.sum()) * self.part.most_blocks

    def _irregular_parts(self, limit: int) -> tuple[PackedPart, ...] | None:
        if self.lengths.size > limit:
            return None
        parts = self.part.parts(limit)
        if parts is None:
            return None
        nbytes = _nbytes(parts)
        all_parts: list[PackedPart] = []
        packed = 0
        for displacement, length in zip(
            self.displacements.tolist(), self.lengths.tolist(), strict=True
        ):
            all_parts += [
                part.repeated(length, self.stride, nbytes).shifted(displacement, packed)
                for part in parts
            ]
            packed += length * nbytes
        return tuple(all_parts)

    @cached_property
    def _blocks(self) -> BlockList:
        return self.part.block_list().at(spread(self.displacements, self.lengths, self.stride))


MOST_LISTED = 1 << 32
"""Largest number of blocks to list; each takes 16 bytes or more."""


def _check_listable(n_blocks: int) -> None:
    if n_blocks > MOST_LISTED:
        raise DatatypeError(
            f"the datatype has {n_blocks} blocks, too many to list one by one; use smaller counts, or "
            "vectors and subarrays in place of lists"
        )


def _singleton(value: int) -> Int64Array:
    return np.array([value], dtype=np.int64)


def _outer_sum(outer: Int64Array, inner: Int64Array) -> Int64Array:
    return np.add.outer(outer, inner).reshape(-1)


def spread(starts: Int64Array, counts: Int64Array, stride: int) -> Int64Array:
    """``starts[i] + j * stride`` for each i and ``j < counts[i]``, in order."""
    _check_listable(total(counts))
    first = np.cumsum(counts) - counts
    step = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(first, counts)
    return np.repeat(starts, counts) + step * stride


def _regular_levels(offsets: Int64Array) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Find counts and strides, outermost first, that generate ``offsets``; None if there are no such counts."""
    counts: list[int] = []
    strides: list[int] = []
    while offsets.size > 1:
        steps = np.diff(offsets)
        changes = np.flatnonzero(steps != steps[0])
        run = int(changes[0]) + 1 if changes.size else int(offsets.size)
        if offsets.size % run:
            return None
        rows = offsets.reshape(-1, run)
        if changes.size and (np.diff(rows, axis=1) != steps[0]).any():
            return None
        counts.insert(0, run)
        strides.insert(0, int(steps[0]))
        offsets = rows[:, 0]
    return tuple(counts), tuple(strides)
