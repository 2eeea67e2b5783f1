"""Serialised trees: records in preorder, and a lookaside buffer for their lists (Jenkins et al. 2013, section 3.1).

This module does not use a GPU. The traversal packer uploads the records and lists that :func:`serialised` returns, and
passes :func:`table` to the kernel. Records and table have the layouts of the C structs in
``packing/kernels/traversal.cu``. A test compares the two.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from halox.packing.strided_plan import divisor
from halox.packing.traversal_tree import Branch, Gather, Int64Array, Regular, Repeat, Search, Tree

NODES = 32
"""Largest number of records in the kernel parameter, as in ``traversal.cu``; more records are in device memory."""


class RecordKind(IntEnum):
    """Kind of a record."""

    LEAF = 0
    REPEAT = 1
    GATHER = 2
    SEARCH = 3
    BRANCH = 4


NODE = np.dtype(
    [
        ("kind", "u4"),
        ("shift", "u4"),
        ("words", "u8"),
        ("magic", "u8"),
        ("stride", "u8"),
        ("displacements", "u8"),
        ("entries", "u8"),
        ("prefix", "u8"),
        ("children", "u8"),
    ]
)
TABLE = np.dtype(
    [
        ("nodes", "u8"),
        ("lists", "u8"),
        ("words", "u8"),
        ("n_nodes", "u8"),
        ("node", NODE, (NODES,)),
    ]
)


def serialised(tree: Tree, word_bytes: int) -> tuple[npt.NDArray[np.void], Int64Array]:
    """Return a tree's records and its lookaside buffer.

    ``word_bytes`` must divide the tree's :func:`~halox.packing.traversal_tree.common_word`.

    Examples
    --------
    >>> from halox.datatypes import indexed, vector
    >>> from halox.packing.traversal_tree import simplified
    >>> records, lists = serialised(simplified(vector(5, 3, 4, "f8"))[1], 8)
    >>> records["kind"].tolist(), records["stride"].tolist(), lists.tolist()
    ([1, 0], [32, 8], [])
    >>> records, lists = serialised(simplified(indexed([1, 3], [0, 5], "f8"))[1], 8)
    >>> records["kind"].tolist(), lists.tolist()  # prefix sums in words, displacements in bytes
    ([3, 0], [0, 1, 0, 40])
    """
    writer = _Writer(word_bytes)
    writer.write(tree)
    nodes = np.zeros(len(writer.nodes), NODE)
    for node, fields in zip(nodes, writer.nodes, strict=True):
        for name, value in fields.items():
            node[name] = value
    return nodes, np.concatenate([np.zeros(0, np.int64), *writer.lists])


def table(
    nodes: npt.NDArray[np.void], words: int, *, nodes_address: int, lists_address: int
) -> bytes:
    """Return the table parameter of the kernel.

    The addresses are in device memory. ``nodes_address`` is 0 to include the records in the parameter, and
    ``lists_address`` is 0 without lists.
    """
    made = np.zeros((), TABLE)
    made["nodes"], made["lists"] = nodes_address, lists_address
    made["words"], made["n_nodes"] = words, nodes.size
    if not nodes_address:
        made["node"][: nodes.size] = nodes
    return made.tobytes()


class _Writer:
    """Writes a tree in preorder: a child follows its node, but a branch has a list of its children's records."""

    def __init__(self, word_bytes: int) -> None:
        self._word_bytes = word_bytes
        self.nodes: list[dict[str, int]] = []
        self.lists: list[Int64Array] = []
        self._entries = 0
        self._listed: dict[Tree, dict[str, int]] = {}  # fields of nodes whose lists are written
        # Records of children, which several branches may share.
        self._children: dict[Tree, int] = {}

    def write(self, tree: Tree) -> None:
        match tree:
            case Regular():
                self._write_regular(tree)
            case Repeat(_, stride, child):
                self._write_equal(RecordKind.REPEAT, child.size, stride=stride % 2**64)
                self.write(child)
            case Gather(_, child):
                self._write_equal(RecordKind.GATHER, child.size, **self._lists_of(tree))
                self.write(child)
            case Search(_, _, child):
                self.nodes.append({"kind": RecordKind.SEARCH, **self._lists_of(tree)})
                self.write(child)
            case Branch():
                node = {"kind": RecordKind.BRANCH, **self._lists_of(tree)}
                self.nodes.append(node)
                records = [self._child(child) for child in tree.children]
                node["children"] = self._add(np.array(records, np.int64))

    def _write_regular(self, tree: Regular) -> None:
        blocks, below = tree.blocks, tree.size
        levels = list(zip(blocks.counts, blocks.strides, strict=True))
        # If each block is one word, the innermost level walks the words.
        is_word = bool(levels) and blocks.block_bytes == self._word_bytes
        stride = levels.pop()[1] if is_word else self._word_bytes
        for count, step in levels:
            below //= count
            self._write_equal(RecordKind.REPEAT, below, stride=step % 2**64)
        self.nodes.append({"kind": RecordKind.LEAF, "stride": stride % 2**64})

    def _write_equal(self, kind: RecordKind, child_bytes: int, **fields: int) -> None:
        """Write a record with children of one size; a division finds the child of a word."""
        words = child_bytes // self._word_bytes
        magic, shift = divisor(words, 64) if words > 1 else (0, 0)
        self.nodes.append({"kind": kind, "words": words, "magic": magic, "shift": shift, **fields})

    def _lists_of(self, tree: Gather | Search | Branch) -> dict[str, int]:
        """Return the fields of a record that refer to its lists; the first call writes the lists."""
        if tree not in self._listed:
            fields = {}
            if not isinstance(tree, Gather):
                ends = tree.ends // self._word_bytes
                fields["entries"] = ends.size
                fields["prefix"] = self._add(np.concatenate([[0], ends[:-1]]))
            fields["displacements"] = self._add(tree.displacements)
            self._listed[tree] = fields
        return self._listed[tree]

    def _child(self, tree: Tree) -> int:
        if tree not in self._children:
            self._children[tree] = len(self.nodes)
            self.write(tree)
        return self._children[tree]

    def _add(self, numbers: Int64Array) -> int:
        """Append a list to the lookaside buffer, and return the index of its first entry."""
        first = self._entries
        self.lists.append(numbers)
        self._entries += numbers.size
        return first
