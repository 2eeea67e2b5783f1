"""Memory of a GPU for the tables that kernels read, and what fills it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from halox.runtime.gpu.cuda import cupy


class DeviceBytes:
    """Device memory of its own, with a stream to fill it.

    Not from CuPy's pool: it may be dropped while the last launch that reads it runs on any
    stream, and the pool knows only the stream that memory was made on. cudaFree waits.

    Parameters
    ----------
    nbytes : int
    device : int
        The GPU.

    Attributes
    ----------
    nbytes : int
    pointer : int
        Address on the GPU, aligned to 256 bytes.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        cp = cupy()
        self.nbytes = nbytes
        with cp.cuda.Device(device):
            self._memory = cp.cuda.Memory(max(16, nbytes))
            self._stream = cp.cuda.Stream(non_blocking=True)
            self._event = cp.cuda.Event(disable_timing=True)
        self.pointer = int(self._memory.ptr)
        self._kept: list[Any] = []  # host memory of uploads that may be under way

    def write(self, at: int, values: npt.NDArray[Any]) -> None:
        """Start to upload an array to byte ``at``."""
        if not values.nbytes:
            return
        values = np.ascontiguousarray(values)
        self._kept.append(values)
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(
            self.pointer + at,
            values.ctypes.data,
            values.nbytes,
            runtime.memcpyHostToDevice,
            self._stream.ptr,
        )

    def order(self, stream: int) -> None:
        """Make a stream wait for the uploads so far; the host does not wait."""
        self._event.record(self._stream)
        cupy().cuda.runtime.streamWaitEvent(stream, self._event.ptr)

    def wait(self) -> None:
        """Wait for all uploads; none can follow."""
        self._stream.synchronize()
        self._kept.clear()
        del self._stream, self._event


def uploaded(table: npt.NDArray[Any], device: int) -> DeviceBytes:
    """Return device memory with a copy of a table, which is there when this returns.

    Notes
    -----
    Not collective; waits for the copy alone. Not for use while a stream is being captured.
    """
    memory = DeviceBytes(table.nbytes, device)
    memory.write(0, table)
    memory.wait()
    return memory
