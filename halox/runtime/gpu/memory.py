"""Memory that GPUs can access: tables for kernels, mapped page-locked host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.errors import DeviceError
from halox.runtime.arrays import DType, HostBytes, span
from halox.runtime.dlpack import Array
from halox.runtime.gpu.cuda import cupy

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all contexts
_MAPPED = 2  # cudaHostRegisterMapped


class DeviceBytes:
    """Device memory at ``pointer``, aligned to 256 bytes, with a stream that fills it.

    The memory is not from CuPy's pool, since it may be dropped while a kernel on any stream still reads it. The pool
    orders reuse only with the stream on which memory was allocated, but cudaFree waits for all work.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        cp = cupy()
        self.nbytes = nbytes
        with cp.cuda.Device(device):
            self._memory = cp.cuda.Memory(max(16, nbytes))
            self._stream = cp.cuda.Stream(non_blocking=True)
            self._event = cp.cuda.Event(disable_timing=True)
        self.pointer = int(self._memory.ptr)
        self._uploads: list[object] = []  # host memory of pending uploads

    def write(self, at: int, values: Array) -> None:
        """Start the upload of an array to byte offset ``at``."""
        if not values.nbytes:
            return
        values = np.ascontiguousarray(values)
        self._uploads.append(values)
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(
            self.pointer + at,
            values.ctypes.data,
            values.nbytes,
            runtime.memcpyHostToDevice,
            self._stream.ptr,
        )

    def order(self, stream: int) -> None:
        """Make a stream wait for all uploads so far; does not block the host."""
        self._event.record(self._stream)
        cupy().cuda.runtime.streamWaitEvent(stream, self._event.ptr)

    def wait(self) -> None:
        """Wait for all uploads; no upload is possible afterwards."""
        self._stream.synchronize()
        self._uploads.clear()
        del self._stream, self._event


def device_view(
    pointer: int, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...], device: int
) -> Any:
    """Return a CuPy array whose element [0, ..., 0] is at an address; the caller keeps the memory alive."""
    cuda = cupy().cuda
    before, behind = span(shape, strides, dtype.itemsize)
    memory = cuda.UnownedMemory(pointer - before, before + behind, None, device)
    return cupy().ndarray(shape, dtype, cuda.MemoryPointer(memory, before), strides)


def uploaded(table: Array, device: int) -> DeviceBytes:
    """Return device memory with a copy of a table; waits for the copy. Must not be called during capture."""
    memory = DeviceBytes(table.nbytes, device)
    memory.write(0, table)
    memory.wait()
    return memory


class PinnedBuffer:
    """Mapped page-locked host memory; made by :func:`pinned`. ``device_pointer`` is the address on the GPU."""

    def __init__(self, nbytes: int) -> None:
        cuda = cupy().cuda
        flags = cuda.runtime.hostAllocPortable | cuda.runtime.hostAllocMapped
        pages = cuda.PinnedMemory(max(1, nbytes), flags)
        view = HostBytes(int(pages.ptr), (nbytes,), writable=True, owner=pages)
        self._array: npt.NDArray[np.uint8] | None = np.asarray(view)
        self.nbytes = nbytes
        self.device_pointer = _device_pointer(int(pages.ptr))

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        if self._array is None:
            raise DeviceError("this pinned buffer has been closed")
        return self._array

    def close(self) -> None:
        """Release the memory, which is freed when its last array is deleted. Harmless when repeated."""
        self._array = None


class RegisteredBuffer:
    """Host memory of another owner, page-locked and mapped by :func:`register`; ``array`` has its bytes.

    ``device_pointer`` is its address on the GPU.
    """

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self.array = array
        self.nbytes = array.nbytes
        self._runtime = cupy().cuda.runtime
        self._pointer = 0
        pointer = int(array.ctypes.data)
        if array.nbytes:
            self._runtime.hostRegister(pointer, array.nbytes, _PORTABLE | _MAPPED)
            self._pointer = pointer
        self.device_pointer = _device_pointer(pointer) if array.nbytes else pointer

    def close(self) -> None:
        """Unregister the memory; must precede its unmapping. Harmless when repeated."""
        pointer, self._pointer = self._pointer, 0
        if pointer:
            self._runtime.hostUnregister(pointer)

    def __del__(self) -> None:
        """Unregister the memory; ignore errors, since the driver may already have shut down."""
        with suppress(Exception):
            self.close()


def pinned(nbytes: int) -> PinnedBuffer:
    """Allocate page-locked host memory that the GPU can access; may block until the GPU is idle.

    Kernels that use the memory must have ended before its last array is dropped. Raises `DeviceError` without a GPU,
    or if the memory cannot be allocated.
    """
    with _as_device_error(f"cannot page-lock {nbytes} bytes of host memory"):
        return PinnedBuffer(nbytes)


def register(array: npt.NDArray[np.uint8]) -> RegisteredBuffer:
    """Page-lock and map host memory of another owner, such as shared memory; may block until the GPU is idle.

    The buffer keeps ``array``, one-dimensional and contiguous, alive until it is closed. Raises `DeviceError` without a
    GPU, or if CUDA cannot lock the memory, for example because it is already registered.
    """
    at = array.ctypes.data
    with _as_device_error(f"cannot register {array.nbytes} bytes of host memory at {at:#x}"):
        return RegisteredBuffer(array)


@contextmanager
def _as_device_error(failed: str) -> Iterator[None]:
    """Raise errors of the CUDA runtime as `DeviceError`, with the text ``failed`` in front."""
    try:
        yield
    except DeviceError:
        raise
    except RuntimeError as error:
        raise DeviceError(f"{failed}: {error}") from error


def _device_pointer(pointer: int) -> int:
    """Return the device address of mapped host memory, which may differ from the host address."""
    device_pointer = int(cupy().cuda.runtime.pointerGetAttributes(pointer).devicePointer)
    if not device_pointer:
        raise DeviceError(f"the host memory at {pointer:#x} has no address on the GPU")
    return device_pointer
