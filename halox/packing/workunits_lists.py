"""Lists of work units on a GPU, shared by equal layouts, in a cache of the most recently used lists.

A list holds only displacements. It depends only on the datatype's layout (Wu et al. 2016, section 3.2), so
one list serves every array, every packed buffer and every count. :func:`unit_list` looks into the cache, and
otherwise converts the datatype. A list may stay in the cache after its last user is gone.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from halox.packing.workunits_plan import Rows, Units, converted, joined, most_words
from halox.runtime.gpu.memory import DeviceBytes, uploaded

if TYPE_CHECKING:
    from halox.datatypes import BlockList, Datatype

CACHE_BYTES = 64 << 20
"""Limit of the cached lists, in bytes; a dropped list stays alive while it is in use."""

PIPELINED_BLOCKS = 1 << 15
"""Largest number of blocks to convert at once; with more, the first use packs a part while it converts the next."""

_ENTRY_BYTES = 1024  # host memory of a cache entry without its list


class UnitList(NamedTuple):
    """A converted datatype: its rows of units, and the device memory of its list, to which the rows refer."""

    rows: Rows
    memory: DeviceBytes | None

    @property
    def nbytes(self) -> int:
        return _ENTRY_BYTES + self.rows.nbytes + (self.memory.nbytes if self.memory else 0)


class ListCache:
    """The most recently used lists, up to ``most_bytes``."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._lists: OrderedDict[Hashable, UnitList] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable) -> UnitList | None:
        """Look up a list, which becomes the most recently used list; None if it is not in the cache."""
        with self._lock:
            if key in self._lists:
                self._lists.move_to_end(key)
            return self._lists.get(key)

    def put(self, key: Hashable, units: UnitList) -> UnitList:
        """Add a list and return it; if another thread has added an equal list first, return that list."""
        dropped = []  # freed after the lock is released, because freeing device memory waits for the GPU
        with self._lock:
            stored = self._lists.setdefault(key, units)
            self._lists.move_to_end(key)
            while self._lists and self._nbytes() > self.most_bytes:
                dropped.append(self._lists.popitem(last=False))
        return stored

    @property
    def nbytes(self) -> int:
        with self._lock:
            return self._nbytes()

    def _nbytes(self) -> int:
        return sum(units.nbytes for units in self._lists.values())


cache = ListCache(CACHE_BYTES)
"""The lists of this process."""


def unit_list(
    datatype: Datatype,
    unit_bytes: int,
    device: int,
    stream: int = 0,
    move: Callable[[Rows], None] | None = None,
) -> UnitList:
    """Return a datatype's list; convert and upload it unless the list of an equal layout is cached.

    With ``move``, a long list is converted part by part: the function is called with the rows of each part as
    soon as ``stream`` waits for the upload of their list. The GPU then moves a part while the host converts
    the next part. If the list is cached or short, ``move`` is not called.

    May block; do not call while a stream is being captured.
    """
    key = (device, _layout_key(datatype), unit_bytes)
    units = cache.get(key)
    if units is not None:
        return units
    blocks = datatype.blocks()
    if move is not None and blocks.n_blocks > PIPELINED_BLOCKS:
        return cache.put(key, _pipelined(blocks, unit_bytes, device, stream, move))
    whole = joined(converted(blocks, unit_bytes))
    memory = uploaded(whole.words, device) if whole.words.size else None
    return cache.put(key, UnitList(whole.rows_at(memory.pointer if memory else 0), memory))


def _layout_key(datatype: Datatype) -> Hashable:
    """Return a key that is equal for equal layouts: a strided form, or a digest of the blocks."""
    strided = datatype.strided
    if strided is not None:
        return strided
    blocks = datatype.blocks()
    digest = hashlib.blake2b(digest_size=32)
    for numbers in (blocks.offsets, blocks.lengths):
        digest.update(np.ascontiguousarray(numbers).data)
    return digest.digest()


def _pipelined(
    blocks: BlockList, unit_bytes: int, device: int, stream: int, move: Callable[[Rows], None]
) -> UnitList:
    """Convert blocks part by part; each part is uploaded and moved while the next part is converted."""
    memory = DeviceBytes(4 * most_words(blocks, unit_bytes), device)
    parts: list[Units] = []
    at = 0
    for part in converted(blocks, unit_bytes):
        memory.write(at, part.words)
        memory.order(stream)
        move(part.rows_at(memory.pointer + at))
        parts.append(part)
        at += part.words.nbytes
    memory.wait()
    return UnitList(joined(parts).rows_at(memory.pointer), memory)
