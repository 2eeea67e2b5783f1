"""Host memory that a GPU reads and writes by itself: page-locked and mapped."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.errors import DeviceError, FieldError
from halox.runtime.gpu.addresses import memory_kind
from halox.runtime.gpu.cuda import cupy

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all contexts
_MAPPED = 2  # cudaHostRegisterMapped


class _Pages:
    """Page-locked memory that lives as long as this owner, which NumPy views keep alive."""

    def __init__(self, nbytes: int) -> None:
        self._runtime = cupy().cuda.runtime
        flags = self._runtime.hostAllocPortable | self._runtime.hostAllocMapped
        self.pointer = 0
        self.pointer = int(self._runtime.hostAlloc(max(1, nbytes), flags))
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
        }

    def __del__(self) -> None:
        # The driver may be gone at the interpreter's end, and the memory with it.
        if getattr(self, "pointer", 0):
            with suppress(Exception):
                self._runtime.freeHost(self.pointer)


class PinnedBuffer:
    """Mapped page-locked host memory; made by :func:`pinned`. ``device_pointer`` is its address on the GPU."""

    def __init__(self, pages: _Pages, nbytes: int) -> None:
        self._array: npt.NDArray[np.uint8] | None = np.asarray(pages)
        self.nbytes = nbytes
        self.device_pointer = _device_pointer(pages.pointer)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory, as the host sees it."""
        if self._array is None:
            raise DeviceError("this pinned buffer has been closed")
        return self._array

    def close(self) -> None:
        """Release the memory, which is freed with its last array. Harmless when repeated."""
        self._array = None


class RegisteredBuffer:
    """Page-locked and mapped host memory of another owner, as ``array`` of bytes; made by :func:`register`.

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
        """Undo the registration, before the memory is unmapped. Harmless when repeated."""
        pointer, self._pointer = self._pointer, 0
        if pointer:
            self._runtime.hostUnregister(pointer)

    def __del__(self) -> None:
        """Undo the registration, if the driver is still there."""
        with suppress(Exception):
            self.close()


def pinned(nbytes: int) -> PinnedBuffer:
    """Allocate page-locked host memory that the GPU reads and writes; may block until the GPU is idle.

    Kernels that use the memory must have ended before its last array is dropped. Raises `DeviceError` without a GPU,
    or if the memory cannot be allocated.
    """
    if nbytes < 0:
        raise DeviceError(f"nbytes: got {nbytes}, must not be negative")
    try:
        return PinnedBuffer(_Pages(nbytes), nbytes)
    except RuntimeError as error:
        if isinstance(error, DeviceError):
            raise
        raise DeviceError(f"cannot page-lock {nbytes} bytes of host memory: {error}") from error


def register(array: npt.NDArray[np.uint8]) -> RegisteredBuffer:
    """Page-lock and map host memory of another owner, such as a shared window; may block until the GPU is idle.

    ``array`` is one-dimensional, contiguous and of bytes, or a `FieldError` is raised; it is kept alive until the
    buffer is closed. Raises `DeviceError` without a GPU, or if CUDA refuses memory that is registered already, or of a
    kind it cannot lock.
    """
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise FieldError(
            f"array: got dtype {array.dtype} and shape {array.shape}; memory is registered as a "
            "contiguous one-dimensional uint8 array, such as array.reshape(-1).view('u1')"
        )
    try:
        return RegisteredBuffer(array)
    except RuntimeError as error:
        if isinstance(error, DeviceError):
            raise
        raise DeviceError(
            f"cannot register {array.nbytes} bytes of host memory at {array.ctypes.data:#x}: "
            f"{error}"
        ) from error


def _device_pointer(pointer: int) -> int:
    """Address of mapped host memory on the current device, which need not be the host's."""
    found = memory_kind(pointer).device_pointer
    if found is None:
        raise DeviceError(f"the host memory at {pointer:#x} has no address on the GPU")
    return found
