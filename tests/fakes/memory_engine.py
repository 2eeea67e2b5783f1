"""An RDMA engine in the memory of one process, which holds the arrays of all ranks; transfers copy bytes.

It enforces an adapter's limits, and refuses unmapped keys, blocks outside of registered memory, and registrations
that have ended.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halox.paths.scatter_gather.engine import (
    IMMEDIATE_BITS,
    Engine,
    Key,
    Limits,
    RegisteredRegion,
    RemoteKey,
)
from halox.paths.scatter_gather.windows import Window


@dataclass(eq=False)
class Fabric:
    """Connects the engines of some ranks: the owner of each key, and the notifications for each rank."""

    keys: dict[int, tuple[MemoryEngine, MemoryKey]] = field(default_factory=dict)
    letters: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))


class MemoryKey(Key):
    def __init__(self, number: int) -> None:
        self.number = number


def gathered(window: Window) -> np.ndarray:
    blocks = zip(window.addresses.tolist(), window.lengths.tolist(), strict=True)
    return np.frombuffer(b"".join(ctypes.string_at(a, n) for a, n in blocks), np.uint8)


def scatter(window: Window, values: np.ndarray) -> None:
    at, raw = 0, values.tobytes()
    for address, n in zip(window.addresses.tolist(), window.lengths.tolist(), strict=True):
        ctypes.memmove(address, raw[at : at + n], n)
        at += n
    assert at == len(raw)


class MemoryTransfer:
    def __init__(self, engine: MemoryEngine, direction: str, key: Any, remote: Any, peer: int):
        self.engine, self.direction, self.peer = engine, direction, peer
        self.key, self.remote = key, remote

    def __call__(self, immediate: int | None = None) -> None:
        engine = self.engine
        owner, theirs = engine.fabric.keys[self.remote.rkey]
        assert owner.rank == self.peer
        mine, other = engine.checked(self.key), owner.checked(theirs)
        assert mine.nbytes == other.nbytes, "windows of other bytes at both ends"
        if self.direction == "put":
            scatter(other, gathered(mine))
        else:
            scatter(mine, gathered(other))
        engine.log.append((self.direction, self.peer, mine.nbytes))
        if immediate is not None:
            assert self.direction == "put" and 0 <= immediate < 1 << IMMEDIATE_BITS
            engine.notify(self.peer, immediate)


class MemoryEngine(Engine):
    name = "memory"

    def __init__(self, rank: int = 0, fabric: Fabric | None = None, **limits: int) -> None:
        self.rank, self.fabric = rank, fabric or Fabric()
        self.limits = Limits(**{"entries": 4, "pool": 4, **limits})
        self.regions: dict[int, RegisteredRegion] = {}
        self.log: list[tuple[str, int, int]] = []
        self.made = self.mapped = self.exported = 0

    def register(
        self, address: int, nbytes: int, generation: int, device: int | None = None
    ) -> RegisteredRegion:
        region = RegisteredRegion(address, nbytes, generation, lkey=generation, rkey=generation)
        assert generation not in self.regions, "two registrations of one generation"
        self.regions[generation] = region
        return region

    def deregister(self, region: RegisteredRegion) -> None:
        del self.regions[region.generation]

    def make_key(self) -> MemoryKey:
        self.made += 1
        assert self.made <= self.limits.keys, "more keys than the adapter has"
        number = len(self.fabric.keys) + 1
        key = MemoryKey(number)
        self.fabric.keys[number] = self, key
        return key

    def destroy_key(self, key: Key) -> None:
        assert isinstance(key, MemoryKey)
        del self.fabric.keys[key.number]
        self.made -= 1

    def map(self, key: Key, window: Window) -> None:
        self.mapped += 1
        n = window.lengths.size
        if window.repeated is not None:
            n = -(-n // self.limits.repeats)
        assert 0 < n <= self.limits.entries and window.nbytes <= self.limits.key_bytes
        key.window = window

    def checked(self, key: Key) -> Window:
        """Return the window of a key, after a check that its blocks lie in registered memory."""
        window = key.window
        assert window is not None, "a key that is mapped to nothing"
        for address, n, lkey in zip(*map(np.ndarray.tolist, window[:3]), strict=True):
            region = self.regions[lkey]
            assert region.address <= address and address + n <= region.address + region.nbytes
        return window

    def export(self, key: Key) -> RemoteKey:
        assert isinstance(key, MemoryKey)
        self.exported += 1
        return RemoteKey(key.number)

    def transfer(self, direction: Any, key: Key, remote: RemoteKey, peer: int) -> MemoryTransfer:
        return MemoryTransfer(self, direction, key, remote, peer)

    def complete(self) -> None:
        pass

    def notify(self, peer: int, immediate: int) -> None:
        self.fabric.letters[peer].append((self.rank, immediate))

    def arrivals(self) -> list[tuple[int, int]]:
        found = self.fabric.letters[self.rank]
        self.fabric.letters[self.rank] = []
        return found
