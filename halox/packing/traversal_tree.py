"""Simplified trees of datatypes' layouts, for walks from the root to a byte.

Every regular subtree becomes a :class:`Regular` leaf. Empty list entries are dropped. Equal subtrees are
one object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from halox.datatypes.layout import (
    BlockList,
    Chained,
    Indexed,
    Layout,
    Listed,
    StridedBlocks,
    spread,
)

if TYPE_CHECKING:
    from halox.datatypes import Datatype

Int64Array = npt.NDArray[np.int64]

FLAT_BLOCKS = 64
"""Largest number of blocks of an irregular subtree that becomes one list; one search is faster than several steps."""

MOST_BLOCKS = 1 << 20
"""Largest number of blocks of a subtree that is expanded to check whether it is regular."""

MOST_UNITS = 2
"""Largest average number of equal units per block when blocks of different lengths are cut.

One multiplication finds an entry in a list of equal units. With two units per block, this list is no longer
than a list to search, which has two numbers per block.
"""

FEW_UNITS = 4096
"""Entries of a list that stays in a cache; in lists up to this size, blocks are cut into up to FEW_TIMES units."""

FEW_TIMES = 16
"""Same as MOST_UNITS, in lists of up to FEW_UNITS entries."""

MOST_NESTED = 64
"""Deepest nesting of irregular constructors."""


@dataclass(frozen=True, slots=True, eq=False)
class Regular:
    """Equal blocks at nested equal strides; the first block is at 0."""

    blocks: StridedBlocks

    @property
    def size(self) -> int:
        """Bytes of data."""
        return self.blocks.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """``count`` copies of an irregular child, ``stride`` bytes apart."""

    count: int
    stride: int
    child: Tree

    @property
    def size(self) -> int:
        """Bytes of data."""
        return self.count * self.child.size


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """One child at each displacement."""

    displacements: Int64Array
    child: Tree

    @property
    def size(self) -> int:
        """Bytes of data."""
        return self.displacements.size * self.child.size


@dataclass(frozen=True, slots=True, eq=False)
class _Entries:
    """Bytes at displacements; entry ``i`` has ``ends[i] - ends[i - 1]`` bytes."""

    displacements: Int64Array
    ends: Int64Array

    @property
    def size(self) -> int:
        """Bytes of data."""
        return int(self.ends[-1])


@dataclass(frozen=True, slots=True, eq=False)
class Search(_Entries):
    """The first bytes of a child at each displacement."""

    child: Tree


@dataclass(frozen=True, slots=True, eq=False)
class Branch(_Entries):
    """Different children, each at its displacement."""

    children: tuple[Tree, ...]


Tree = Regular | Repeat | Gather | Search | Branch

Placed = tuple[int, Tree]
"""The displacement of a tree's origin, and the tree."""


def simplified(
    datatype: Datatype,
    count: int = 1,
    *,
    flat_blocks: int = FLAT_BLOCKS,
    few_units: int = FEW_UNITS,
) -> Placed | None:
    """Return the displacement of the origin and the simplified tree of some items of a datatype; None without bytes.

    The datatype must be nested at most :data:`MOST_NESTED` deep. Every ``Repeat``, ``Gather``, ``Search``
    and ``Branch`` has two entries or more. Time and memory are proportional to the lists of the datatype,
    not to its bytes.

    Examples
    --------
    >>> from halox.datatypes import indexed, vector
    >>> simplified(vector(3, 1, 2, "f8"), 2)
    (0, Regular(blocks=StridedBlocks(offset=0, counts=(2, 3), strides=(40, 16), block_bytes=8)))
    >>> offset, tree = simplified(indexed([1, 5, 1], [4, 6, 0], "f8"), 3)
    >>> tree.count, type(tree.child).__name__, tree.child.displacements.tolist()
    (3, 'Gather', [32, 48, 56, 64, 72, 80, 0])
    """
    if count == 0 or datatype.size == 0:
        return None
    simplification = _Simplification(flat_blocks, few_units)
    placed = simplification.place(datatype.layout)
    return None if placed is None else simplification.repeat(placed, count, datatype.extent)


def nesting(datatype: Datatype) -> int:
    """Return the nesting depth of a datatype's irregular constructors.

    Examples
    --------
    >>> from halox.datatypes import contiguous, indexed
    >>> nesting(contiguous(3, indexed([1, 2], [0, 2], "f8")))
    2
    """
    depth: dict[int, int] = {}
    pending = [datatype]
    while pending:
        here = pending[-1]
        olds = () if _is_regular(here) else here.olds
        unknown = [old for old in olds if id(old) not in depth]
        if unknown:
            pending += unknown
            continue
        depth[id(here)] = 1 + max(depth[id(old)] for old in olds) if olds else 0
        pending.pop()
    return depth[id(datatype)]


def common_word(tree: Tree) -> int:
    """Return the largest power of two, at most 16, that divides all lengths and distances.

    Examples
    --------
    >>> from halox.datatypes import vector
    >>> common_word(simplified(vector(3, 3, 5, "i4"))[1])
    4
    """
    bits, done, pending = 16, set(), [tree]
    while pending:
        here = pending.pop()
        if id(here) in done:
            continue
        done.add(id(here))
        match here:
            case Regular(blocks):
                for number in (blocks.block_bytes, *blocks.strides):
                    bits |= number
            case Repeat(_, stride, child):
                bits |= stride
                pending.append(child)
            case Gather(displacements, child):
                bits |= _any_bit(displacements)
                pending.append(child)
            case Search(displacements, ends, child):
                bits |= _any_bit(displacements) | _any_bit(ends)
                pending.append(child)
            case Branch(displacements, _, children):
                bits |= _any_bit(displacements)
                pending += children
    return bits & -bits


class _Simplification:
    """One simplification, with a cache of its subtrees."""

    def __init__(self, flat_blocks: int, few_units: int) -> None:
        self._flat_blocks, self._few_units = flat_blocks, few_units
        self._placed: dict[int, Placed | None] = {}
        self._blocks: dict[int, int] = {}
        self._leaves: dict[StridedBlocks, Regular] = {}
        self._repeats: dict[tuple[int, int, int], Repeat] = {}

    def place(self, layout: Layout) -> Placed | None:
        """Return the displacement of a layout's origin, and its tree; None if the layout has no bytes."""
        if id(layout) not in self._placed:
            self._placed[id(layout)] = self._place(layout)
        return self._placed[id(layout)]

    def _place(self, layout: Layout) -> Placed | None:
        n_blocks = self._count_blocks(layout)
        # With more blocks, the search for a strided form would take longer than reading the lists.
        if isinstance(layout, (StridedBlocks, Listed)) or n_blocks <= MOST_BLOCKS:
            strided = layout.strided
            if strided is not None:
                return (strided.offset, self._leaf(strided)) if strided.nbytes else None
        if isinstance(layout, Indexed) and n_blocks > self._flat_blocks:
            placed = self.place(layout.part)
            if placed is None:  # pragma: no cover - then the layout itself would have no bytes
                return None
            return self._listed(layout.displacements, layout.lengths, placed, layout.stride)
        if isinstance(layout, Chained) and n_blocks > self._flat_blocks:
            return self._chained(layout)
        return self._flat(layout.block_list())

    def repeat(self, placed: Placed, count: int, stride: int) -> Placed:
        """Return the tree of ``count >= 1`` copies, ``stride`` bytes apart."""
        offset, tree = placed
        if count == 1:
            return placed
        if isinstance(tree, Regular):
            return offset, self._leaf(tree.blocks.repeated(count, stride))
        if isinstance(tree, Repeat) and stride == tree.count * tree.stride:
            count, stride, tree = count * tree.count, tree.stride, tree.child
        key = (count, stride, id(tree))
        if key not in self._repeats:
            self._repeats[key] = Repeat(count, stride, tree)
        return offset, self._repeats[key]

    def _flat(self, blocks: BlockList) -> Placed:
        """Return the tree of a list of blocks."""
        byte = (0, self._leaf(StridedBlocks(0, (), (), 1)))
        return self._listed(blocks.offsets, blocks.lengths, byte, 1)

    def _listed(
        self, displacements: Int64Array, lengths: Int64Array, placed: Placed, extent: int
    ) -> Placed:
        """Return the tree of ``lengths[i]`` items, ``extent`` bytes apart, at ``displacements[i]``."""
        used = lengths != 0
        displacements, lengths = displacements[used], lengths[used]
        unit, items = int(np.gcd.reduce(lengths)), int(lengths.sum())
        if items // unit <= self._most_units(lengths.size):
            starts = spread(displacements, lengths // unit, unit * extent)
            return self._gather(starts, self.repeat(placed, unit, extent))
        offset, child = self.repeat(placed, int(lengths.max()), extent)
        ends = np.cumsum(lengths) * placed[1].size
        return offset, Search(displacements, ends, child)

    def _most_units(self, entries: int) -> int:
        return max(MOST_UNITS * entries, min(FEW_TIMES * entries, self._few_units))

    def _gather(self, displacements: Int64Array, placed: Placed) -> Placed:
        offset, child = placed
        first = int(displacements[0])
        steps = np.diff(displacements)
        if not steps.size or (steps == steps[0]).all():
            step = int(steps[0]) if steps.size else 0
            return self.repeat((offset + first, child), displacements.size, step)
        return offset, Gather(displacements, child)

    def _chained(self, layout: Chained) -> Placed:
        placed = [self.place(each) for each in layout.layouts]
        parts = [part for part in placed if part is not None]
        starts = np.array([start for start, _ in parts], dtype=np.int64)
        trees = tuple(tree for _, tree in parts)
        if all(tree is trees[0] for tree in trees):
            return self._gather(starts, (0, trees[0]))
        sizes = np.array([tree.size for tree in trees], dtype=np.int64)
        if all(isinstance(tree, Regular) and not tree.blocks.counts for tree in trees):
            return self._flat(BlockList(starts, sizes).merged())
        return 0, Branch(starts, np.cumsum(sizes), trees)

    def _leaf(self, blocks: StridedBlocks) -> Regular:
        key = blocks.shifted(-blocks.offset)
        return self._leaves.setdefault(key, Regular(key))

    def _count_blocks(self, layout: Layout) -> int:
        """Count the blocks of an expansion before merging, without a search for a strided form."""
        if id(layout) not in self._blocks:
            match layout:
                case Listed():
                    count = layout.given.n_blocks
                case Chained():
                    count = sum(map(self._count_blocks, layout.layouts))
                case Indexed():
                    count = int(layout.lengths.sum()) * self._count_blocks(layout.part)
                case _:
                    count = layout.most_blocks
            self._blocks[id(layout)] = count
        return self._blocks[id(layout)]


def _is_regular(datatype: Datatype) -> bool:
    """Whether the strided form of a datatype is known without a search."""
    return isinstance(datatype.layout, StridedBlocks)


def _any_bit(numbers: Int64Array) -> int:
    """Return the low bits that are set in any number; they determine the common power of two up to 16."""
    return int(np.bitwise_or.reduce(numbers)) & 31
