"""Plans for the traversal kernels: a simplified tree, serialised as records and lists.

This module does not use a GPU. The tree is written in preorder, with one record of fixed length per node.
Lists are in the lookaside buffer (Jenkins et al. 2013, section 3.1). Records and tables have the layouts of
the C structs in ``packing/kernels/traversal.cu``. A test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from halox.packing.strided_plan import CAPPED_IN_FLIGHT, IN_FLIGHT, divisor, most_threads
from halox.packing.traversal_tree import Branch, Gather, Regular, Repeat, Search, Tree

THREADS = (64, 128, 256)
"""Sizes of a thread block; the largest size that still gives every multiprocessor two blocks is chosen."""

CAPPED_THREADS = (128, 512, 1024)
"""Sizes of a thread block if the number of blocks is limited: only a block's own threads then hide latencies."""

FEW_BLOCKS = 4
"""Largest number of full blocks per SM of a small launch.

In a small launch each thread moves one word, because a second word would take longer than a second block.
"""

LISTED_IN_FLIGHT = {16: 2, 8: 4, 4: 4, 2: 4, 1: 4}
"""Words that a thread loads before it stores the first word, by bytes per word, in large launches that read lists.

The numbers are at least as large as in :data:`IN_FLIGHT`, because reading lists takes dependent loads.
"""

ROUNDS_PER_COPY = 4
"""Ratio of the bytes that a block moves to the bytes of lists that it copies, in large launches."""

MAX_WORDS = 2**31 - 2**14
"""Largest number of words for canonical numbers of 32 bits, with room for the last steps of a loop."""

CHAIN_NODES = 8
"""Largest number of records in the kernel parameter of a launch without branches."""

INLINE_BYTES = 1024
"""Largest lists, in bytes, in a kernel parameter of a launch of few blocks; this saves a dependent load."""

COPIED_LISTS = 4096
"""Largest lists, in bytes, that each block copies to shared memory and searches there."""

COPIED_NODES = 16384
"""Largest records, in bytes together, that each block copies to shared memory; every word reads several records."""


class RecordKind(IntEnum):
    """Kind of a record."""

    LEAF = 0
    REPEAT = 1
    GATHER = 2
    FAR_GATHER = 3
    SEARCH = 4
    BRANCH = 5


@cache
def node_dtype(index_bits: int) -> np.dtype[np.void]:
    """Return the layout of a record; ``index_bits``, 32 or 64, is the size of canonical numbers."""
    index = f"u{index_bits // 8}"
    return np.dtype(
        [
            ("stride", "i8"),
            ("words", index),
            ("magic", index),
            ("shift", "u4"),
            ("kind", "u4"),
            ("displacements", "u4"),
            ("prefix", "u4"),
            ("guide", "u4"),
            ("bucket", "u4"),
            ("children", "u4"),
            ("unused", "u4", (1 if index_bits == 32 else 3,)),
        ]
    )


@cache
def table_dtype(index_bits: int, *, inline: bool) -> np.dtype[np.void]:
    """Return the layout of the kernel parameter; with ``inline``, it has room for lists."""
    return np.dtype(
        [
            ("image", "u8"),
            ("words", "u8"),
            ("leaf_stride", "i8"),
            ("chunk_words", "u4"),
            ("levels", "u4"),
            ("chunks", "u4"),
            ("copied", "u4"),
            ("numbers", "u4"),
            ("displacements", "u4"),
            ("node", node_dtype(index_bits), (CHAIN_NODES,)),
            *([("inline", "u1", (INLINE_BYTES,))] if inline else []),
        ]
    )


class Shape(NamedTuple):
    """Shape of a launch: threads per block, words per thread in flight, words per chunk, blocks."""

    threads: int
    in_flight: int
    chunk_words: int
    blocks: int


@dataclass(frozen=True)
class TraversalPlan:
    """Tables and shape of one launch of a traversal kernel; see :func:`plan`."""

    word_bytes: int
    index_bits: int  # size of canonical numbers
    # Suffix of the kernel's name: "_regular" for a tree of strides, "_chain" for a tree without
    # branches, "" for any tree. The first two have their records in a kernel parameter.
    entry: str
    nodes: npt.NDArray[np.void]  # dtype: node_dtype
    numbers: npt.NDArray[np.generic]  # lookaside: prefix sums in words, guides, child records
    displacements: npt.NDArray[np.generic]  # lookaside: displacements of entries, in bytes
    words: int  # number of all words
    shape: Shape
    inline: bool  # whether the lists are a kernel parameter

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """Compile-time parameters of the kernel."""
        return (
            ("WORD_BYTES", str(self.word_bytes)),
            ("INDEX_BITS", str(self.index_bits)),
            ("THREADS", str(self.shape.threads)),
            ("IN_FLIGHT", str(self.shape.in_flight)),
        )

    @cached_property
    def image(self) -> npt.NDArray[np.uint8]:
        """Records of a branching tree, numbers and displacements; each section begins at a multiple of 16 bytes."""
        return np.concatenate([_padded(part) for part in self._sections])

    @property
    def copied(self) -> int:
        """Bytes of the image that each block copies to shared memory."""
        nodes, numbers, displacements = (_padded(part).size for part in self._sections)
        if self.inline:
            return nodes + numbers + displacements
        if nodes > COPIED_NODES:
            return 0
        # Without searches, each list entry is read once, so copying the lists does not pay.
        if numbers > COPIED_LISTS or not (self.nodes["kind"] >= RecordKind.SEARCH).any():
            return nodes
        lists = numbers + displacements
        return nodes + (lists if lists <= COPIED_LISTS else numbers)

    def table(self, image: int) -> npt.NDArray[np.void]:
        """Return the kernel parameter; ``image`` is the image's device address."""
        listed = self.entry != "_regular"
        table = np.zeros((), table_dtype(self.index_bits, inline=listed))
        nodes, numbers, _ = (_padded(part).size for part in self._sections)
        table["image"] = 0 if self.inline else image
        table["words"] = self.words
        table["chunk_words"] = self.shape.chunk_words
        table["chunks"] = -(-self.words // self.shape.chunk_words)
        table["copied"] = self.copied
        table["numbers"] = nodes
        table["displacements"] = nodes + numbers
        if self.entry:
            table["node"][: len(self.nodes)] = self.nodes
            table["levels"] = len(self.nodes) - 1
            table["leaf_stride"] = self.nodes[-1]["stride"]
        if self.inline:
            table["inline"][: self.image.size] = self.image
        return table

    @property
    def _sections(self) -> tuple[npt.NDArray[np.generic], ...]:
        return self.nodes[: 0 if self.entry else None], self.numbers, self.displacements


def plan(
    tree: Tree,
    word_bytes: int,
    *,
    sms: int,
    max_blocks: int | None = None,
    index_bits: int | None = None,
    shape: Shape | None = None,
) -> TraversalPlan:
    """Plan the launch that packs or unpacks a tree.

    ``word_bytes`` must divide the tree's :func:`~traversal_tree.common_word`. The words are distributed
    over ``sms`` multiprocessors, with one thread block per chunk, unless ``max_blocks`` limits the blocks.
    Canonical numbers (the numbers of words in packed order) have 64 bits if 32 bits do not suffice;
    ``index_bits`` overrides this choice. ``shape`` overrides the launch shape.

    Examples
    --------
    >>> from halox.datatypes import vector
    >>> from halox.packing.traversal_tree import simplified
    >>> _, tree = simplified(vector(5, 3, 4, "f8"))
    >>> planned = plan(tree, 8, sms=132)
    >>> planned.entry, planned.nodes["kind"].tolist(), planned.nodes["stride"].tolist(), planned.words
    ('_regular', [1, 0], [32, 8], 15)
    """
    words = tree.size // word_bytes
    bits = index_bits or (32 if words <= MAX_WORDS else 64)
    writer = _Writer(word_bytes, bits)
    writer.write(tree)
    entry = _entry(writer.nodes)
    planned = TraversalPlan(
        word_bytes=word_bytes,
        index_bits=bits,
        entry=entry,
        nodes=np.array(writer.nodes, node_dtype(bits)),
        numbers=writer.numbers.array,
        displacements=writer.displacements.array,
        words=words,
        shape=shape or _shape(words, word_bytes, entry != "_regular", sms, max_blocks),
        inline=False,
    )
    if (
        planned.image.size
        and planned.image.size <= INLINE_BYTES
        and planned.shape.blocks <= 2 * sms
    ):
        return replace(planned, inline=True)
    return planned if shape else replace(planned, shape=_rounds(planned, sms))


def _entry(nodes: list[tuple[int, ...]]) -> str:
    kinds = {node[_KIND] for node in nodes}
    if len(nodes) > CHAIN_NODES or RecordKind.BRANCH in kinds:
        return ""
    return "_regular" if kinds <= {RecordKind.LEAF, RecordKind.REPEAT} else "_chain"


def _shape(words: int, word_bytes: int, listed: bool, sms: int, max_blocks: int | None) -> Shape:
    in_flight = LISTED_IN_FLIGHT[word_bytes] if listed else IN_FLIGHT[word_bytes]
    if words <= FEW_BLOCKS * sms * THREADS[-1]:
        in_flight = 1
    shape = _spread(words, in_flight, 2 * sms, THREADS)
    if max_blocks is None or shape.blocks <= max_blocks:
        return shape
    shape = _spread(words, CAPPED_IN_FLIGHT, max_blocks, CAPPED_THREADS)
    return shape._replace(blocks=min(shape.blocks, max_blocks))


def _spread(words: int, in_flight: int, blocks: int, choices: tuple[int, ...]) -> Shape:
    """Return a shape with one round per chunk, and the largest thread block that still makes ``blocks`` blocks."""
    work = words // in_flight
    threads = most_threads(work, blocks, choices)
    chunk_words = threads * in_flight
    return Shape(threads, in_flight, chunk_words, -(-words // chunk_words))


def _rounds(planned: TraversalPlan, sms: int) -> Shape:
    """Return the shape with longer chunks if blocks copy lists, as long as enough blocks remain."""
    shape = planned.shape
    wanted = -(-ROUNDS_PER_COPY * planned.copied // (shape.chunk_words * planned.word_bytes))
    possible = shape.blocks // (2 * FEW_BLOCKS * sms)
    rounds = max(1, min(wanted, possible))
    chunk_words = rounds * shape.chunk_words
    chunks = -(-planned.words // chunk_words)
    return shape._replace(chunk_words=chunk_words, blocks=min(chunks, shape.blocks))


class _Lookaside:
    """A section of the lookaside buffer: lists one after another."""

    def __init__(self, dtype: str) -> None:
        self._parts = [np.zeros(0, dtype)]
        self._size = 0

    def add(self, numbers: npt.NDArray[np.int64]) -> int:
        """Append a list, and return the index of its first entry."""
        at = self._size
        self._size += numbers.size
        self._parts.append(numbers.astype(self._parts[0].dtype))
        return at

    @property
    def array(self) -> npt.NDArray[np.generic]:
        return np.concatenate(self._parts)


class _Writer:
    """Writes a tree in preorder: a child follows its node, but a branch has a list of its children's records."""

    def __init__(self, word_bytes: int, bits: int) -> None:
        self._word_bytes = word_bytes
        self._bits = bits
        self.nodes: list[tuple[int, ...]] = []
        self.numbers = _Lookaside(f"u{bits // 8}")
        self.displacements = _Lookaside("i8")
        self._children: dict[int, int] = {}
        self._lists: dict[int, dict[str, int]] = {}

    def write(self, tree: Tree) -> None:
        match tree:
            case Regular():
                self._regular(tree)
            case Repeat():
                self._node(
                    RecordKind.REPEAT, tree.child.size // self._word_bytes, stride=tree.stride
                )
                self.write(tree.child)
            case Gather():
                self._gather(tree)
                self.write(tree.child)
            case Search():
                self._node(RecordKind.SEARCH, **self._listed(tree))
                self.write(tree.child)
            case Branch():
                self._branch(tree)

    def _regular(self, tree: Regular) -> None:
        blocks, word = tree.blocks, self._word_bytes
        levels = list(zip(blocks.counts, blocks.strides, strict=True))
        # If each block is one word, the innermost level walks the words.
        leaf = levels.pop()[1] if levels and blocks.block_bytes == word else word
        below = tree.size // word
        for count, stride in levels:
            below //= count
            self._node(RecordKind.REPEAT, below, stride=stride)
        self._node(RecordKind.LEAF, stride=leaf)

    def _gather(self, tree: Gather) -> None:
        """Write displacements in words from the smallest displacement, if these numbers fit the index type."""
        if id(tree) not in self._lists:
            least = int(tree.displacements.min())
            reach = (int(tree.displacements.max()) - least) // self._word_bytes
            if reach >= 1 << min(self._bits, 63):
                fields = {"displacements": self.displacements.add(tree.displacements)}
            else:
                steps = (tree.displacements - least) // self._word_bytes
                fields = {"displacements": self.numbers.add(steps), "stride": least}
            self._lists[id(tree)] = fields
        fields = self._lists[id(tree)]
        kind = RecordKind.GATHER if "stride" in fields else RecordKind.FAR_GATHER
        self._node(kind, tree.child.size // self._word_bytes, **fields)

    def _branch(self, tree: Branch) -> None:
        at = len(self.nodes)
        self._node(RecordKind.BRANCH)
        children = [self._child(child) for child in tree.children]
        fields = dict(self._listed(tree), children=self.numbers.add(np.array(children)))
        self.nodes[at] = self._record(RecordKind.BRANCH, 0, fields)

    def _child(self, tree: Tree) -> int:
        """Return the record number of a branch's child; several branches may share a child."""
        if id(tree) not in self._children:
            self._children[id(tree)] = len(self.nodes)
            self.write(tree)
        return self._children[id(tree)]

    def _listed(self, tree: Search | Branch) -> dict[str, int]:
        """Return the fields of a node's record that refer to its lists; the first call writes the lists."""
        if id(tree) not in self._lists:
            ends = tree.ends // self._word_bytes
            prefix = np.concatenate([[0], ends[:-1]])
            guide, bucket = _guide(prefix, int(ends[-1]))
            self._lists[id(tree)] = {
                "displacements": self.displacements.add(tree.displacements),
                "prefix": self.numbers.add(prefix),
                "guide": self.numbers.add(guide),
                "bucket": bucket,
            }
        return self._lists[id(tree)]

    def _node(self, kind: RecordKind, words: int = 0, **fields: int) -> None:
        self.nodes.append(self._record(kind, words, fields))

    def _record(self, kind: RecordKind, words: int, fields: dict[str, int]) -> tuple[int, ...]:
        magic, shift = divisor(words, self._bits) if words > 1 else (0, 0)  # 0 means no division
        stride = fields.get("stride", 0)
        # Strides wrap around at 64 bits, like addresses.
        stride = (stride + (1 << 63)) % (1 << 64) - (1 << 63)
        rest = [fields.get(name, 0) for name in _LIST_FIELDS]
        return (stride, words, magic, shift, kind, *rest, 0)


_KIND = 4
_LIST_FIELDS = ("displacements", "prefix", "guide", "bucket", "children")


def _guide(prefix: npt.NDArray[np.int64], words: int) -> tuple[npt.NDArray[np.int64], int]:
    """Return the guide for searches: the entry with the first word of each bucket, and the bits of a bucket.

    A bucket has 2**bits words, and there are about as many buckets as entries. The guide has one more
    number, for the end of the last bucket. A search starts with the entries from its bucket's number to
    the next bucket's number, which are usually one or two entries apart.

    Examples
    --------
    >>> guide, bits = _guide(np.array([0, 2, 3, 9]), 16)
    >>> guide.tolist(), bits
    ([0, 2, 2, 3, 3], 2)
    """
    bits = max(0, (words // prefix.size).bit_length() - 1)
    firsts = np.arange(-(-words // (1 << bits)) + 1) << bits
    return np.searchsorted(prefix, firsts, side="right") - 1, bits


def _padded(part: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    flat = np.ascontiguousarray(part).view(np.uint8).reshape(-1)
    return np.concatenate([flat, np.zeros(-flat.size % 16, np.uint8)])
