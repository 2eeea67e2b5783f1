"""Keys of an engine, made in advance and reused: the pool, registrations, and the caches of both ends.

Mapping a layout to keys and sending keys to a peer cost more than a transfer, and applications use the same layouts
repeatedly. So a list of keys, once mapped, is cached by (layout, addresses, chunk size), together with the ranks
that have received it. A peer caches the lists that it has received by (rank, layout, addresses, chunk size). After
Suresh et al. 2022, section IV.E.

An address alone does not identify memory: freed memory may be allocated again, and an old registration then refers to
pages that no longer exist. So registrations are tied to the object that owns the memory, and every list of keys has a
*generation* that no other list of its process ever has.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from halox.errors import PathError
from halox.paths.scatter_gather.engine import (
    Direction,
    Engine,
    Key,
    RegisteredRegion,
    RemoteKey,
    Transfer,
)
from halox.paths.scatter_gather.windows import MessageBlocks, Window

LayoutKey = tuple[bytes, tuple[int, ...], int]
"""Digest of a block list, addresses of its arrays, and chunk size: the cache key of a list of keys."""


MOST_LISTS = 256
"""Largest number of cached lists that no plan uses."""


class KeyPool:
    """Keys of an engine that are not in use; `Limits.pool` keys are made at a time, before they are needed.

    If an engine's pool is 0, its keys cost nothing, and unused keys are destroyed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._free: list[Key] = []
        self._made = 0
        self.refill()

    @property
    def free(self) -> int:
        """Number of keys that can be allocated without making any."""
        return len(self._free)

    def refill(self) -> None:
        """Make more keys if half of a batch, or more, has been taken; as many as the engine still allows."""
        limits = self._engine.limits
        if 2 * len(self._free) <= limits.pool:
            self._make(limits.pool)

    def _make(self, number: int) -> None:
        for _ in range(min(number, self._engine.limits.keys - self._made)):
            self._free.append(self._engine.make_key())
            self._made += 1

    def allocate(self, number: int) -> list[Key]:
        """Return keys; fewer than asked for only if the engine has no more."""
        self._make(number - len(self._free))
        taken, self._free = self._free[:number], self._free[number:]
        return taken

    def put_back(self, keys: Sequence[Key]) -> None:
        """Return keys to the pool that are no longer in use."""
        if self._engine.limits.pool:
            self._free += keys
            return
        self._made -= len(keys)
        for key in keys:
            self._engine.destroy_key(key)

    def close(self) -> None:
        """Destroy all keys, which must have been put back."""
        for key in self._free:
            self._engine.destroy_key(key)
        self._free = []


@dataclass(eq=False)
class _Registration:
    region: RegisteredRegion
    owner: weakref.ref[object] | None


class Registrations:
    """Registered memory of this rank, by address; registered again if its owner is a different object than before."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._generations = engine, count(1)
        self._known: dict[tuple[int, int], _Registration] = {}

    def find(
        self, address: int, nbytes: int, owner: object, device: int | None = None
    ) -> RegisteredRegion:
        """Return the region of memory that an object owns, on the host or on a GPU."""
        known = self._known.get((address, nbytes))
        if known is not None and known.owner is not None and known.owner() is owner:
            return known.region
        if known is not None:
            self._engine.deregister(known.region)
        region = self._engine.register(address, nbytes, next(self._generations), device)
        ref: weakref.ref[object] | None = None
        # Arrays of other libraries may not support weak references; their memory is registered each time.
        with suppress(TypeError):
            ref = weakref.ref(owner)
        self._known[address, nbytes] = _Registration(region, ref)
        return region


@dataclass(eq=False)
class KeyList:
    """Keys of the windows of one message at one end.

    If an engine has fewer keys than the message has windows, the keys slide over the windows: in round r of n windows,
    key number k is mapped to window ``r * n + k``.
    """

    key: LayoutKey
    generation: int
    windows: list[Window]
    keys: list[Key]
    regions: tuple[RegisteredRegion, ...]
    sent_to: set[int] = field(default_factory=set)  # ranks that have the keys
    users: int = 0  # number of plans that use the keys
    mapped: tuple[int, int] | None = None  # round that the keys are mapped to, and its windows

    @property
    def slides(self) -> bool:
        """Whether there are fewer keys than windows."""
        return len(self.keys) < len(self.windows)


class Memory(NamedTuple):
    """Memory of one of a message's arrays; for a view, the memory of the array that owns it, registered as a whole."""

    base: int  # address of the array's first element
    address: int  # of the whole memory
    nbytes: int
    owner: object  # lives as long as the memory
    device: int | None = None  # None for memory of the host


class ExportedKeys(NamedTuple):
    """A list of keys as sent to a peer; ``keys`` is None if the peer already has the keys.

    ``dropped`` are lists for the peer to forget, with their generations; ``at_once`` is the number of windows in a
    round.
    """

    key: LayoutKey
    generation: int
    at_once: int
    keys: tuple[RemoteKey, ...] | None
    dropped: tuple[tuple[LayoutKey, int], ...] = ()


class Keys:
    """All keys of this rank, and the known keys of its peers; local."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.pool = engine, KeyPool(engine)
        self.registrations = Registrations(engine)
        self._generations = count(1)
        self._local: dict[LayoutKey, KeyList] = {}  # least recently used first
        self._remote: dict[tuple[int, LayoutKey], ExportedKeys] = {}
        self._dropped: dict[int, list[tuple[LayoutKey, int]]] = {}

    def acquire(self, blocks: MessageBlocks, chunk_bytes: int, memory: Sequence[Memory]) -> KeyList:
        """Reserve the keys of a message until `release`; ``memory`` has one entry for each of the message's arrays.

        They are the keys of an earlier call with the same layout, addresses and chunk size, if the memory is the same.
        """
        bases = tuple([array.base for array in memory])
        regions = tuple(map(self._region, memory))
        key = blocks.identity, bases, chunk_bytes
        key_list = self._local.pop(key, None)
        if key_list is not None and (
            key_list.regions != regions or (key_list.slides and key_list.users)
        ):
            self.drop(key_list)
            key_list = None
        if key_list is None:
            key_list = self._mapped(key, blocks.windows(chunk_bytes, regions, bases), regions)
        self._local[key] = key_list
        key_list.users += 1
        if len(self._local) > MOST_LISTS:
            unused = next((other for other in self._local.values() if not other.users), None)
            if unused is not None:
                self.drop(unused)
        return key_list

    def _region(self, one: Memory) -> RegisteredRegion:
        if self.engine.needs_registration:
            return self.registrations.find(one.address, one.nbytes, one.owner, one.device)
        # Costs nothing, and identifies the engine's units of memory, such as segments.
        return self.engine.register(one.address, one.nbytes, 0, one.device)

    def _mapped(
        self, key: LayoutKey, windows: list[Window], regions: tuple[RegisteredRegion, ...]
    ) -> KeyList:
        wanted = min(len(windows), self.engine.limits.keys_per_list)
        keys = self.pool.allocate(wanted)
        for other in [*self._local.values()]:
            if len(keys) == wanted:
                break
            if not other.users:
                self.drop(other)
                keys += self.pool.allocate(wanted - len(keys))
        if not keys:
            raise PathError(
                f"the {self.engine.name} engine has no keys left: all {self.engine.limits.keys} are in use by plans; "
                "close plans that are not needed"
            )
        key_list = KeyList(key, next(self._generations), windows, keys, regions)
        self.map_round(key_list, 0)
        return key_list

    def map_round(self, key_list: KeyList, number: int, at_once: int = 0) -> None:
        """Map the keys to the windows of a round of ``at_once`` windows; no transfer may be using the keys."""
        at_once = at_once or len(key_list.keys)
        if key_list.mapped == (number, at_once):
            return
        # In round 0 the first keys have the same windows for any `at_once`.
        is_mapped = number == 0 and key_list.mapped == (0, len(key_list.keys))
        key_list.mapped = number, at_once
        if is_mapped:
            return
        for key, window in zip(
            key_list.keys[:at_once], key_list.windows[number * at_once :], strict=False
        ):
            self.engine.map(key, window)

    def release(self, key_list: KeyList) -> None:
        """Note that a plan no longer uses a list; the list stays mapped until other layouts need its keys."""
        key_list.users -= 1
        if not key_list.users and self._local.get(key_list.key) is not key_list:
            self._reclaim(key_list)
        self.pool.refill()

    def drop(self, key_list: KeyList) -> None:
        """Forget a list, here and at the peers; its keys are free when no plan uses it."""
        self._local.pop(key_list.key, None)
        for rank in key_list.sent_to:
            self._dropped.setdefault(rank, []).append((key_list.key, key_list.generation))
        if not key_list.users:
            self._reclaim(key_list)

    def _reclaim(self, key_list: KeyList) -> None:
        self.pool.put_back(key_list.keys)
        key_list.keys = []

    def export(self, key_list: KeyList, rank: int) -> ExportedKeys:
        """Export a list of keys to a peer, which must `accept` it."""
        keys = None if rank in key_list.sent_to else tuple(map(self.engine.export, key_list.keys))
        key_list.sent_to.add(rank)
        dropped = tuple(self._dropped.pop(rank, ()))
        return ExportedKeys(key_list.key, key_list.generation, len(key_list.keys), keys, dropped)

    def accept(self, rank: int, exported: ExportedKeys) -> tuple[RemoteKey, ...]:
        """Return the keys that a peer has exported, now or before; exports arrive in any order.

        Raises `PathError` if the keys are unknown, or if the known keys have a different generation.
        """
        for key, generation in exported.dropped:
            outdated = self._remote.get((rank, key))
            if outdated is not None and outdated.generation == generation:
                del self._remote[rank, key]
        if exported.keys is not None:
            self._remote[rank, exported.key] = exported
        known = self._remote.get((rank, exported.key))
        if known is None or known.keys is None or known.generation != exported.generation:
            raise PathError(
                f"rank {rank} counts on keys that are not known here (generation {exported.generation}); "
                "make the plan anew"
            )
        return known.keys

    def moved(
        self, rank: int, exported: ExportedKeys, bases: tuple[int, ...]
    ) -> tuple[RemoteKey, ...]:
        """Return a peer's exported keys for other arrays of the same layouts at some addresses."""
        shifts = [new - old for new, old in zip(bases, exported.key[1], strict=True)]
        return tuple([self.engine.moved(key, shifts) for key in self.accept(rank, exported)])


class Rounds:
    """Rounds of one end of a message after the peer has exported its keys, with the transfers of each round's windows.

    The ``count`` of rounds, equal at both ends, is 1 unless an engine has fewer keys than the message has windows.
    """

    def __init__(
        self,
        keys: Keys,
        own: KeyList,
        peer: int,
        theirs: ExportedKeys,
        remote: tuple[RemoteKey, ...],
    ) -> None:
        self._keys, self._own, self._peer, self._remote = keys, own, peer, remote
        self.n_windows = len(own.windows)
        # Any further keys are mapped to windows of a later round, when that round begins.
        self.at_once = min(len(own.keys), theirs.at_once)
        self.count = -(-self.n_windows // self.at_once)
        self._transfers: dict[tuple[Direction, int], Transfer] = {}

    @property
    def keys(self) -> list[Key]:
        """Keys of this end."""
        return self._own.keys

    def enter(self, number: int) -> None:
        """Map the keys of this end to the windows of a round; local; no transfer may be using the keys."""
        self._keys.map_round(self._own, number, self.at_once)

    def transfers(self, direction: Direction, number: int) -> list[Transfer]:
        """Return the transfers of a round's windows; each is made only once."""
        windows = range(min(self.at_once, self.n_windows - number * self.at_once))
        return [self.transfer(direction, slot) for slot in windows]

    def transfer(self, direction: Direction, slot: int) -> Transfer:
        """Return the transfer of the window that a key is mapped to."""
        transfer = self._transfers.get((direction, slot))
        if transfer is None:
            transfer = self._transfers[direction, slot] = self._keys.engine.transfer(
                direction, self._own.keys[slot], self._remote[slot], self._peer
            )
        return transfer
