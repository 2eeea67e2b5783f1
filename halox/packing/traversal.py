"""Traversal packer on a GPU, for any datatype: each thread walks the tree down to its words.

:mod:`halox.packing.traversal_tree` simplifies the tree, and :mod:`halox.packing.traversal_plan`
serialises it. This module uploads the tree and launches the kernel.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, ClassVar

from halox.packing.device_packer import DevicePacker, table_launch
from halox.packing.traversal_plan import NODES, serialised, table
from halox.packing.traversal_tree import Tree, common_word, simplified
from halox.runtime.gpu.cuda import multiprocessors
from halox.runtime.gpu.memory import uploaded

if TYPE_CHECKING:
    from halox.datatypes import Datatype

THREADS = 128
"""Threads of a block."""

CAPPED_THREADS = 512
"""Threads of a block if the number of blocks is limited: few blocks must keep many words in flight."""

THREADS_PER_SM = 1024
"""Threads of a launch on each multiprocessor; more words than threads are moved in a loop."""

_ADDRESSES = 2**64 - 1


class TraversalPacker(DevicePacker):
    """Packs any datatype by walking its tree of constructors; see :class:`DevicePacker`.

    A thread computes the place of a word from the word's number: by division for regular nodes and lists
    of equal blocks, and by a search over prefix sums for other lists. No list of blocks is expanded, so the
    tables are as small as the datatype's description, for any ``count``.

    A word has 16, 8, 4, 2 bytes or 1: the largest size that divides all lengths and distances of the
    datatype and both addresses. The first call with a word size blocks. Capture a graph only after a call
    with equally aligned addresses. Thread-safe.

    References
    ----------
    Jenkins, Dinan, Balaji, Peterka, Samatova, Thakur: Processing MPI derived datatypes on
    noncontiguous GPU-resident data, IEEE Transactions on Parallel and Distributed Systems 25
    (2014), section 3.
    """

    method: ClassVar[str] = "traversal"

    def __init__(
        self, datatype: Datatype, count: int, device: int, max_blocks: int | None = None
    ) -> None:
        super().__init__(datatype, count, device, max_blocks)
        placed = simplified(datatype, count)
        self._variants: dict[int, _Variant] = {}
        self._lock = Lock()
        if placed is not None:
            self._offset, self._tree = placed
            self._word = common_word(self._tree)

    def pack(self, array: int, packed: int, stream: int) -> None:
        if self.nbytes:
            first = (array + self._offset) & _ADDRESSES
            self._variant(first, packed).pack.launch_at(stream, first, packed)

    def unpack(self, packed: int, array: int, stream: int) -> None:
        if self.nbytes:
            first = (array + self._offset) & _ADDRESSES
            self._variant(first, packed).unpack.launch_at(stream, first, packed)

    def _variant(self, first: int, packed: int) -> _Variant:
        bits = first | packed | self._word
        word_bytes = bits & -bits
        variant = self._variants.get(word_bytes)
        if variant is not None:
            return variant
        with self._lock:
            if word_bytes not in self._variants:
                variant = _Variant(self._tree, word_bytes, self.device, self.max_blocks)
                self._variants[word_bytes] = variant
            return self._variants[word_bytes]


class _Variant:
    """Pack and unpack launches for one word size, and the tables that they read."""

    def __init__(self, tree: Tree, word_bytes: int, device: int, max_blocks: int | None) -> None:
        nodes, lists = serialised(tree, word_bytes)
        self._nodes = uploaded(nodes, device) if nodes.size > NODES else None
        self._lists = uploaded(lists, device) if lists.size else None
        words = tree.size // word_bytes
        text = table(
            nodes,
            words,
            nodes_address=self._nodes.pointer if self._nodes else 0,
            lists_address=self._lists.pointer if self._lists else 0,
        )
        threads = THREADS if max_blocks is None else CAPPED_THREADS
        resident = multiprocessors(device) * THREADS_PER_SM // threads
        blocks = min(-(-words // threads), max_blocks or resident, resident)
        self.pack, self.unpack = (
            table_launch(
                "traversal",
                f"traversal_{direction}",
                device,
                (blocks, threads),
                text,
                defines=(("WORD_BYTES", str(word_bytes)), ("THREADS", str(threads))),
            )
            for direction in ("pack", "unpack")
        )
