"""Simplified trees of datatypes' layouts, for walks from the root to a byte.

The traversal packer begins with :func:`simplified`. Every regular subtree becomes a :class:`Regular` leaf. Subtrees
that occur several times in a datatype are one object, and no list is expanded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from halox.datatypes.layout import Chained, Indexed, Layout, Listed, StridedBlocks

if TYPE_CHECKING:
    from halox.datatypes import Datatype

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Regular:
    """Equal blocks at nested equal strides; the first block is at 0."""

    blocks: StridedBlocks

    @property
    def size(self) -> int:
        """Bytes of data; every node has this property."""
        return self.blocks.nbytes

    @property
    def bits(self) -> int:
        """Low bits that are set in any length or distance; every node has this property."""
        return _any_bit(self.blocks.block_bytes, *self.blocks.strides)


@dataclass(frozen=True)
class Repeat:
    """``count`` copies of an irregular child, ``stride`` bytes apart."""

    count: int
    stride: int
    child: Tree

    @cached_property
    def size(self) -> int:
        return self.count * self.child.size

    @cached_property
    def bits(self) -> int:
        return _any_bit(self.stride, self.child.bits)


@dataclass(frozen=True, eq=False)
class Gather:
    """One child at each displacement."""

    displacements: Int64Array
    child: Tree

    @cached_property
    def size(self) -> int:
        return self.displacements.size * self.child.size

    @cached_property
    def bits(self) -> int:
        return _any_bit(self.displacements, self.child.bits)


@dataclass(frozen=True, eq=False)
class Search:
    """The first bytes of a child at each displacement; entry ``i`` has ``ends[i] - ends[i - 1]`` bytes."""

    displacements: Int64Array
    ends: Int64Array
    child: Tree

    @property
    def size(self) -> int:
        return int(self.ends[-1])

    @cached_property
    def bits(self) -> int:
        return _any_bit(self.displacements, self.ends, self.child.bits)


@dataclass(frozen=True, eq=False)
class Branch:
    """Different children, each at its displacement; child ``i`` has ``ends[i] - ends[i - 1]`` bytes."""

    displacements: Int64Array
    ends: Int64Array
    children: tuple[Tree, ...]

    @property
    def size(self) -> int:
        return int(self.ends[-1])

    @cached_property
    def bits(self) -> int:
        return _any_bit(self.displacements, *(child.bits for child in self.children))


Tree = Regular | Repeat | Gather | Search | Branch

Placed = tuple[int, Tree]
"""The displacement of a tree's origin, and the tree."""

_BYTE = Regular(StridedBlocks(0, (), (), 1))


def simplified(datatype: Datatype, count: int = 1) -> Placed | None:
    """Return the displacement of the origin and the simplified tree of some items of a datatype; None without bytes.

    Time and memory are proportional to the lists of the datatype, not to its bytes.

    Examples
    --------
    >>> from halox.datatypes import indexed, vector
    >>> simplified(vector(3, 1, 2, "f8"), 2)
    (0, Regular(blocks=StridedBlocks(offset=0, counts=(2, 3), strides=(40, 16), block_bytes=8)))
    >>> offset, tree = simplified(indexed([1, 5, 1], [4, 6, 0], "f8"), 3)
    >>> tree.count, type(tree.child).__name__, tree.child.displacements.tolist(), tree.child.ends.tolist()
    (3, 'Search', [32, 48, 0], [8, 48, 56])
    """
    if count == 0 or datatype.size == 0:
        return None
    placed = _place(datatype.layout, {})
    return None if placed is None else _repeat(placed, count, datatype.extent)


def common_word(tree: Tree) -> int:
    """Return the largest power of two, at most 16, that divides all lengths and distances.

    Examples
    --------
    >>> from halox.datatypes import vector
    >>> common_word(simplified(vector(3, 3, 5, "i4"))[1])
    4
    """
    bits = 16 | tree.bits
    return bits & -bits


def _place(layout: Layout, known: dict[int, Placed | None]) -> Placed | None:
    """Return the displacement of a layout's origin, and its tree; None if the layout has no bytes.

    ``known`` has the results of layouts by their ids.
    """
    if id(layout) not in known:
        known[id(layout)] = _new_place(layout, known)
    return known[id(layout)]


def _new_place(layout: Layout, known: dict[int, Placed | None]) -> Placed | None:
    match layout:
        case Indexed():
            part = _place(layout.part, known)
            if part is None or not layout.lengths.size:
                return None
            return _listed(layout.displacements, layout.lengths, part, layout.stride)
        case Chained():
            parts = [_place(each, known) for each in layout.layouts]
            return _chained([part for part in parts if part is not None])
        case Listed() if layout.strided is None:
            blocks = layout.block_list()
            return _listed(blocks.offsets, blocks.lengths, (0, _BYTE), 1)
    strided = layout.strided
    assert strided is not None, "layouts of all other classes are strided"
    return (strided.offset, _leaf(strided)) if strided.nbytes else None


def _listed(displacements: Int64Array, lengths: Int64Array, part: Placed, stride: int) -> Placed:
    """Return the tree of ``lengths[i]`` copies of a part, ``stride`` bytes apart, at ``displacements[i]``."""
    offset, child = _repeat(part, int(lengths.max()), stride)
    if (lengths == lengths[0]).all():
        return _gather(displacements, offset, child)
    return offset, Search(displacements, np.cumsum(lengths) * part[1].size, child)


def _chained(parts: list[Placed]) -> Placed | None:
    if not parts:
        return None
    starts = np.array([start for start, _ in parts], dtype=np.int64)
    trees = tuple(tree for _, tree in parts)
    if all(tree == trees[0] for tree in trees):
        return _gather(starts, 0, trees[0])
    ends = np.cumsum([tree.size for tree in trees], dtype=np.int64)
    return 0, Branch(starts, ends, trees)


def _gather(displacements: Int64Array, offset: int, child: Tree) -> Placed:
    """Return the tree of a child at each displacement; displacements at equal steps need no list."""
    steps = np.diff(displacements)
    if (steps == steps[:1]).all():
        step = int(steps[0]) if steps.size else 0
        return _repeat((offset + int(displacements[0]), child), displacements.size, step)
    return offset, Gather(displacements, child)


def _repeat(placed: Placed, count: int, stride: int) -> Placed:
    """Return the tree of ``count >= 1`` copies, ``stride`` bytes apart."""
    offset, tree = placed
    if count == 1:
        return placed
    if isinstance(tree, Regular):
        return offset, _leaf(tree.blocks.repeated(count, stride))
    if isinstance(tree, Repeat) and stride == tree.count * tree.stride:
        return offset, Repeat(count * tree.count, tree.stride, tree.child)
    return offset, Repeat(count, stride, tree)


def _leaf(blocks: StridedBlocks) -> Regular:
    return Regular(blocks.shifted(-blocks.offset))


def _any_bit(*numbers: int | Int64Array) -> int:
    """Return the low bits that are set in any number; they determine the common power of two up to 16."""
    bits = 0
    for number in numbers:
        bits |= number if isinstance(number, int) else int(np.bitwise_or.reduce(number))
    return bits & 31
