"""Device memory with guard bytes and known contents, and a busy stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np

DEVICE = 0
GUARD = 0xA5
MARGIN = 256


def coded(shape, dtype="u1") -> np.ndarray:
    """Host array whose neighbouring bytes differ, and which never contains the guard byte."""
    numbers = np.arange(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    return (
        ((numbers * 7 + numbers // 251) % 251 % GUARD).astype(np.uint8).view(dtype).reshape(shape)
    )


class Guarded:
    """``nbytes`` of device memory, ``offset`` bytes from a 256-byte boundary, with guard bytes on both sides."""

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


class Settled(Guarded):
    """Device memory that holds given bytes, and waits for the whole GPU, since most streams do not wait for CuPy's."""

    def __init__(self, values: np.ndarray, offset: int = 0) -> None:
        super().__init__(values.size, offset)
        self.array[:] = cp.asarray(values)
        cp.cuda.runtime.deviceSynchronize()

    def get(self) -> np.ndarray:
        cp.cuda.runtime.deviceSynchronize()
        return super().get()


STREAMS: dict[str, Callable[[], Any]] = {
    "legacy": lambda: cp.cuda.Stream.null,
    "blocking": cp.cuda.Stream,
    "non-blocking": lambda: cp.cuda.Stream(non_blocking=True),
    "per thread": lambda: cp.cuda.Stream.ptds,
}
"""Each kind of stream; the driver refuses batched copies on the legacy stream."""


def on_device(array: np.ndarray, offset: int = 0) -> Guarded:
    """Copy the bytes of a host array to guarded device memory."""
    guarded = Guarded(array.nbytes, offset)
    guarded.array[:] = cp.asarray(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return guarded


def stall() -> None:
    """Keep CuPy's current stream busy for some milliseconds."""
    large = cp.ones(1 << 25)
    for _ in range(30):
        cp.sqrt(large, out=large)
