"""Lists of work units on a GPU, shared by equal layouts, in a cache of the most recently used lists.

A list holds only displacements. It depends only on the datatype's layout (Wu et al. 2016, section 3.2), so
one list serves every array, every packed buffer and every count. A list may stay in the cache after its last
user is gone.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from halox.packing.workunits_plan import (
    INLINE_WORDS,
    Rows,
    Units,
    converted,
    joined,
    most_words,
)
from halox.runtime.gpu.memory import DeviceBytes, uploaded

if TYPE_CHECKING:
    from halox.datatypes import Datatype, Layout

CACHE_BYTES = 64 << 20
"""Limit of the cached lists per device, in bytes; a dropped list stays alive while it is in use."""

_ENTRY_BYTES = 1024  # host memory of a cache entry without its list

_digests: WeakKeyDictionary[Layout, bytes] = WeakKeyDictionary()


class UnitList:
    """A converted datatype: its rows of units and its list, which is uploaded when first needed.

    The field ``list`` of the rows is an index into the words of the list. ``words`` is None if the list is
    too large for a kernel parameter; the constructor then uploads the list.
    """

    def __init__(self, units: Units, device: int, memory: DeviceBytes | None = None) -> None:
        self.rows: Rows = units.rows
        self.n_words = units.words.size
        self.words = units.words if self.n_words <= INLINE_WORDS else None
        self._device = device
        self._memory = memory
        self._lock = Lock()
        if self.words is None and memory is None:
            self._memory = uploaded(units.words, device)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        on_device = 4 * self.n_words if self._memory is None else self._memory.nbytes
        return _ENTRY_BYTES + self.rows.nbytes + on_device

    def address(self) -> int:
        """Return the address of the list on the device; the first call uploads a small list."""
        with self._lock:
            if self._memory is None and self.words is not None:
                self._memory = uploaded(self.words, self._device)
            assert self._memory is not None
            return self._memory.pointer


class ListCache:
    """The most recently used lists of each device, up to ``most_bytes`` per device."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._lists: dict[int, OrderedDict[Hashable, UnitList]] = {}
        self._lock = Lock()

    def get(self, device: int, key: Hashable) -> UnitList | None:
        """Look up a list, which becomes the most recently used list; None if it is not in the cache."""
        with self._lock:
            lists = self._lists.setdefault(device, OrderedDict())
            if key in lists:
                lists.move_to_end(key)
            return lists.get(key)

    def put(self, device: int, key: Hashable, units: UnitList) -> UnitList:
        """Add a list and return it; if another thread has added an equal list first, return that list."""
        dropped = []  # freed after the lock is released, because freeing device memory waits for the GPU
        with self._lock:
            lists = self._lists.setdefault(device, OrderedDict())
            stored = lists.setdefault(key, units)
            lists.move_to_end(key)
            while lists and sum(entry.nbytes for entry in lists.values()) > self.most_bytes:
                dropped.append(lists.popitem(last=False))
        return stored

    def clear(self) -> None:
        """Drop all lists."""
        with self._lock:
            dropped, self._lists = self._lists, {}
        del dropped

    def nbytes(self, device: int) -> int:
        """Return the bytes of a device's lists."""
        with self._lock:
            return sum(entry.nbytes for entry in self._lists.get(device, {}).values())


cache = ListCache(CACHE_BYTES)
"""The lists of this process."""


def layout_key(datatype: Datatype) -> Hashable:
    """Return the cache key, equal for equal layouts: a strided form, or a digest of the blocks."""
    strided = datatype.strided
    if strided is not None:
        return strided
    layout = datatype.layout
    key = _digests.get(layout)
    if key is None:
        blocks = datatype.blocks()
        digest = hashlib.blake2b(digest_size=32)
        for numbers in (blocks.offsets, blocks.lengths):
            digest.update(np.ascontiguousarray(numbers).data)
        key = _digests[layout] = digest.digest()
    return key


def unit_list(datatype: Datatype, unit_bytes: int, device: int) -> UnitList:
    """Return a datatype's list; convert and upload it unless the list of an equal layout is cached.

    May block; do not call while a stream is being captured.
    """
    key = (layout_key(datatype), unit_bytes)
    entry = cache.get(device, key)
    if entry is None:
        units = joined(converted(datatype.blocks(), unit_bytes))
        entry = cache.put(device, key, UnitList(units, device))
    return entry


def cached_list(datatype: Datatype, unit_bytes: int, device: int) -> UnitList | None:
    """Return a datatype's list if the list of an equal layout is cached, else None."""
    return cache.get(device, (layout_key(datatype), unit_bytes))


def pipelined_list(
    datatype: Datatype, unit_bytes: int, device: int, stream: int
) -> Iterator[tuple[Rows, int] | UnitList]:
    """Convert a datatype part by part; each part is uploaded while the next part is converted.

    For each part, yields its rows and the address of its list, which later work of ``stream`` may read.
    Finally yields the whole list, after adding it to the cache.
    """
    blocks = datatype.blocks()
    memory = DeviceBytes(4 * most_words(blocks, unit_bytes), device)
    parts, at = [], 0
    for part in converted(blocks, unit_bytes):
        memory.write(4 * at, part.words)
        memory.order(stream)
        yield part.rows, memory.pointer + 4 * at
        parts.append(part)
        at += part.words.size
    memory.wait()
    units = UnitList(joined(parts), device, memory)
    yield cache.put(device, (layout_key(datatype), unit_bytes), units)
