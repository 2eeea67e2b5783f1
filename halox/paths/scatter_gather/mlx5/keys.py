"""Keys of an adapter, made in advance and reused: the pool, registrations, and the caches of both ends.

Mapping a layout to keys and sending keys to a peer cost more than a transfer, and applications use the same layouts
repeatedly. So a list of keys, once mapped, is cached by (layout, addresses, chunk size), together with the ranks
that have received it. A peer caches the lists that it has received by their ranks and numbers. After Suresh et al.
2022, section IV.E.

An address alone does not identify memory: freed memory may be allocated again, and an old registration then refers to
pages that no longer exist. So registrations are tied to the object that owns the memory, and no two lists of a process
ever have the same number.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from halox.errors import PathError
from halox.paths.scatter_gather.mlx5.engine import MemoryKey, Mlx5Engine
from halox.paths.scatter_gather.mlx5.windows import MessageBlocks, Registration

LayoutKey = tuple[bytes, tuple[int, ...], int]
"""Digest of a block list, addresses of its arrays, and chunk size: the cache key of a list of keys."""


class KeyPool:
    """Keys of an adapter that are not in use, made `Limits.pool` at a time, the first before they are needed."""

    def __init__(self, engine: Mlx5Engine) -> None:
        self._engine = engine
        self._free: list[MemoryKey] = []
        self._made = 0
        self._make(engine.limits.pool)

    def _make(self, number: int) -> None:
        for _ in range(min(number, self._engine.limits.keys - self._made)):
            self._free.append(self._engine.make_key())
            self._made += 1

    def allocate(self, number: int) -> list[MemoryKey]:
        """Return keys; fewer than asked for only if there are no more."""
        missing = number - len(self._free)
        if missing > 0:
            self._make(max(missing, self._engine.limits.pool))
        taken, self._free = self._free[:number], self._free[number:]
        return taken

    def put_back(self, keys: Sequence[MemoryKey]) -> None:
        self._free += keys


class Registrations:
    """Registered memory of this rank, by address; registered again if its owner is a different object than before."""

    def __init__(self, engine: Mlx5Engine) -> None:
        self._engine = engine
        self._known: dict[tuple[int, int], tuple[Registration, weakref.ref[object] | None]] = {}

    def find(self, memory: Memory) -> Registration:
        place = memory.address, memory.nbytes
        known, owner = self._known.get(place, (None, None))
        if known is not None and owner is not None and owner() is memory.owner:
            return known
        if known is not None:
            self._engine.deregister(known)
        new = self._engine.register(*place, memory.device)
        ref: weakref.ref[object] | None = None
        # Arrays of other libraries may not support weak references; their memory is registered each time.
        with suppress(TypeError):
            ref = weakref.ref(memory.owner)
        self._known[place] = new, ref
        return new


@dataclass(eq=False)
class KeyList:
    """Keys of the windows of one message at one end, mapped to these windows."""

    key: LayoutKey
    number: int
    keys: list[MemoryKey]
    registrations: tuple[Registration, ...]
    sent_to: set[int] = field(default_factory=set)  # ranks that have the keys
    users: int = 0  # number of plans that use the keys


class Memory(NamedTuple):
    """Memory of one of a message's arrays; for a view, the memory of the array that owns it, registered as a whole."""

    base: int  # address of the array's first element
    address: int  # of the whole memory
    nbytes: int
    owner: object  # lives as long as the memory
    device: int | None = None  # None for memory of the host


class ExportedKeys(NamedTuple):
    """A list of keys as sent to a peer; ``rkeys`` is None if the peer already has the keys.

    ``dropped`` are numbers of lists for the peer to forget.
    """

    number: int
    rkeys: tuple[int, ...] | None
    dropped: tuple[int, ...] = ()


class Keys:
    """All keys of this rank, and the known keys of its peers; local."""

    def __init__(self, engine: Mlx5Engine) -> None:
        self.engine, self.pool = engine, KeyPool(engine)
        self._registrations = Registrations(engine)
        self._numbers = count(1)
        self._local: dict[LayoutKey, KeyList] = {}  # least recently used first
        self._remote: dict[tuple[int, int], tuple[int, ...]] = {}  # by rank and number
        self._dropped: dict[int, list[int]] = {}

    def acquire(self, blocks: MessageBlocks, chunk_bytes: int, memory: Sequence[Memory]) -> KeyList:
        """Reserve the keys of a message until `release`; ``memory`` has one entry for each of the message's arrays.

        They are the keys of an earlier call with the same layout, addresses and chunk size, if the memory is the same.
        """
        bases = tuple([array.base for array in memory])
        registrations = tuple(map(self._registrations.find, memory))
        key = blocks.identity, bases, chunk_bytes
        key_list = self._local.pop(key, None)
        if key_list is not None and key_list.registrations != registrations:
            self.drop(key_list)
            key_list = None
        if key_list is None:
            windows = blocks.windows(chunk_bytes, bases, registrations)
            keys = self._allocate(len(windows))
            key_list = KeyList(key, next(self._numbers), keys, registrations)
            for one, window in zip(keys, windows, strict=True):
                self.engine.map(one, window)
        self._local[key] = key_list
        key_list.users += 1
        return key_list

    def _allocate(self, number: int) -> list[MemoryKey]:
        """Return keys from the pool; lists that no plan uses give theirs, the least recently used list first."""
        keys = self.pool.allocate(number)
        for other in [*self._local.values()]:
            if len(keys) == number:
                break
            if not other.users:
                self.drop(other)
                keys += self.pool.allocate(number - len(keys))
        if len(keys) < number:
            self.pool.put_back(keys)
            raise PathError(
                f"the adapter has no {number} keys left: of {self.engine.limits.keys} most are in use by plans; "
                "close plans that are not needed"
            )
        return keys

    def release(self, key_list: KeyList) -> None:
        """Note that a plan no longer uses a list; the list stays mapped until other layouts need its keys."""
        key_list.users -= 1
        if not key_list.users and self._local.get(key_list.key) is not key_list:
            self._reclaim(key_list)

    def drop(self, key_list: KeyList) -> None:
        """Forget a list, here and at the peers; its keys are free when no plan uses it."""
        self._local.pop(key_list.key, None)
        for rank in key_list.sent_to:
            self._dropped.setdefault(rank, []).append(key_list.number)
        if not key_list.users:
            self._reclaim(key_list)

    def _reclaim(self, key_list: KeyList) -> None:
        self.pool.put_back(key_list.keys)
        key_list.keys = []

    def export(self, key_list: KeyList, rank: int) -> ExportedKeys:
        """Export a list of keys to a peer, which must `accept` it."""
        rkeys = None if rank in key_list.sent_to else tuple([key.rkey for key in key_list.keys])
        key_list.sent_to.add(rank)
        return ExportedKeys(key_list.number, rkeys, tuple(self._dropped.pop(rank, ())))

    def accept(self, rank: int, exported: ExportedKeys) -> tuple[int, ...]:
        """Return the rkeys that a peer has exported, now or before; raise `PathError` if they are unknown."""
        for number in exported.dropped:
            self._remote.pop((rank, number), None)
        if exported.rkeys is not None:
            self._remote[rank, exported.number] = exported.rkeys
        known = self._remote.get((rank, exported.number))
        if known is None:
            raise PathError(
                f"rank {rank} counts on keys that are not known here; make the plan anew"
            )
        return known
