"""Free ranges of memory, against a map of its bytes; segments of a GPU's memory, without a GPU."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from halox.runtime import device_arena
from halox.runtime.device_arena import DeviceArena
from halox.runtime.segments import FreeList, Place


@pytest.mark.parametrize("seed", range(5))
def test_what_is_taken_is_nobody_elses(seed: int) -> None:
    rng = np.random.default_rng(seed)
    free, taken = FreeList(100), np.zeros(100, bool)
    pieces: list[tuple[int, int]] = []
    for _ in range(300):
        if pieces and rng.random() < 0.5:
            offset, nbytes = pieces.pop(rng.integers(len(pieces)))
            free.release(offset, nbytes)
            taken[offset : offset + nbytes] = False
        else:
            nbytes = int(rng.integers(1, 30))
            gaps = "".join("x" if one else "." for one in taken).split("x")
            found = free.allocate(nbytes)
            assert (found is None) == (max(map(len, gaps)) < nbytes), "neighbours are merged"
            if found is not None:
                assert not taken[found : found + nbytes].any()
                taken[found : found + nbytes] = True
                pieces.append((found, nbytes))
        assert free.is_whole == (not taken.any())


def test_the_smallest_range_that_fits_is_taken_from() -> None:
    free = FreeList(100)
    assert [free.allocate(n) for n in (40, 10, 20, 10)] == [0, 40, 50, 70]
    free.release(0, 40)
    free.release(50, 20)
    assert free.allocate(15) == 50 and free.allocate(30) == 0 and free.allocate(30) is None


class Memory:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class Driver:
    """The parts of CuPy that the arena of a GPU uses; memory has addresses only."""

    def __init__(self) -> None:
        self.allocated: dict[int, int] = {}
        self.opened: list[bytes] = []
        self.cuda = SimpleNamespace(
            Device=lambda number: nullcontext(SimpleNamespace(synchronize=lambda: None)),
            Memory=self.make,
            runtime=SimpleNamespace(
                ipcGetMemHandle=lambda pointer: b"%d" % pointer,
                ipcOpenMemHandle=self.open,
                ipcCloseMemHandle=lambda pointer: self.opened.pop(),
                cudaIpcMemLazyEnablePeerAccess=1,
            ),
        )

    def make(self, nbytes: int) -> Memory:
        memory = Memory((len(self.allocated) + 1) << 40)
        self.allocated[memory.ptr] = nbytes
        weakref.finalize(memory, self.allocated.update, {memory.ptr: 0})
        return memory

    def open(self, handle: bytes, flags: int) -> int:
        self.opened.append(handle)
        return 7 << 50


def test_segments_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(device_arena, "cupy", lambda: driver)
    arena, other = DeviceArena(0), DeviceArena(0)
    first, second = arena.allocate(0), arena.allocate(700)
    assert (first.pointer, second.pointer) == (1 << 40, (1 << 40) + 512)
    large = arena.allocate(100 << 20)
    assert [*driver.allocated.values()] == [32 << 20, 100 << 20]
    inside = other.locate(second.pointer + 8, second.pointer + 700)
    assert inside == second.place.at(8) and other.pointer(inside) == second.pointer + 8
    assert arena.locate(second.pointer, second.pointer + (32 << 20)) is None
    # Memory that no peer can have mapped goes back to the driver with its last block.
    arena.release(large)
    assert driver.allocated[2 << 40] == 0
    # Exported memory stays, and is used again.
    assert arena.handles([first.place, second.place]) == {first.place.segment: b"%d" % (1 << 40)}
    arena.retire(first)
    arena.release(second)
    arena.reclaim()
    assert arena.allocate(32 << 20).pointer == first.pointer
    arena.free()
    assert driver.allocated[1 << 40] == 0
    arena.release(second)
    # A peer's memory is mapped once.
    for _ in range(2):
        arena.open({("of a peer", 3): b"handle"})
    assert driver.opened == [b"handle"]
    assert arena.pointer(Place(("of a peer", 3), 16)) == (7 << 50) + 16
    arena.unmap(["of a peer"])
    assert not driver.opened
