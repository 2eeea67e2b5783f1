"""Device memory with guard bytes around it, known contents, a busy stream, and the host's time of a call."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
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


def host_us(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median over some repeats of the host's microseconds a call, from 200 calls that do not wait."""
    times = []
    for _ in range(repeats):
        cp.cuda.runtime.deviceSynchronize()
        start = perf_counter_ns()
        for _ in range(200):
            call()
        times.append((perf_counter_ns() - start) / 200e3)
    return median(times)
