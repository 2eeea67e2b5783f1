"""Device memory with guard bytes around it, known contents, a busy stream, and calls compared by the host's time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any

import cupy as cp
import numpy as np

DEVICE = 0
GUARD = 0xA5
MARGIN = 256


def coded(shape, dtype="u1") -> np.ndarray:
    """Bytes that differ from place to place and never equal the guard, on the host."""
    numbers = np.arange(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return (
        ((numbers * 7 + numbers // 251) % 251 % GUARD).astype(np.uint8).view(dtype).reshape(shape)
    )


class Guarded:
    """``nbytes`` of device memory at an offset from 256-byte alignment, guards on both sides."""

    def __init__(self, nbytes: int, offset: int = 0) -> None:
        self.memory = cp.full(nbytes + 2 * MARGIN + 16, GUARD, np.uint8)
        self.start, self.stop = MARGIN + offset, MARGIN + offset + nbytes
        self.pointer = int(self.memory.data.ptr) + self.start

    @property
    def array(self) -> Any:
        return self.memory[self.start : self.stop]

    def get(self) -> np.ndarray:
        everything = self.memory.get()
        assert (everything[: self.start] == GUARD).all(), "bytes before the target were written"
        assert (everything[self.stop :] == GUARD).all(), "bytes after the target were written"
        return everything[self.start : self.stop]


def on_device(array: np.ndarray, offset: int = 0) -> Guarded:
    """A copy of an array's bytes on the GPU."""
    guarded = Guarded(array.nbytes, offset)
    guarded.array[:] = cp.asarray(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return guarded


def stall() -> None:
    """Keep CuPy's current stream busy for some milliseconds."""
    large = cp.ones(1 << 25)
    for _ in range(30):
        cp.sqrt(large, out=large)


def host_us(calls: Mapping[str, Callable[[], Any]], rounds: int = 9) -> dict[str, float]:
    """Host's microseconds of each call, to be compared with one another; printed.

    The least of some rounds of 200 calls that do not wait, all in turn, so that whatever else the machine does is no
    one's alone.
    """
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            cp.cuda.runtime.deviceSynchronize()
            start = perf_counter_ns()
            for _ in range(200):
                call()
            least[name] = min(least[name], (perf_counter_ns() - start) / 200e3)
    print("\nhost microseconds:", {name: round(us, 2) for name, us in least.items()})
    return least
