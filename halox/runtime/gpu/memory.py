"""Memory that GPUs reach: the kind behind an address, tables for kernels, mapped page-locked host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import ModuleType
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from halox.errors import DeviceError, FieldError
from halox.runtime.dlpack import Array
from halox.runtime.gpu import driver
from halox.runtime.gpu.cuda import cupy

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all contexts
_MAPPED = 2  # cudaHostRegisterMapped


class MemoryKind(NamedTuple):
    """Kind of the memory at an address: of a GPU, managed by the driver, page-locked host memory, or any other.

    ``device`` is the GPU, or the one that host memory was locked for; ``device_pointer`` the address on the GPU, which
    for page-locked memory need not be the host's.
    """

    kind: Literal["device", "managed", "pinned", "unregistered"]
    device: int | None
    device_pointer: int | None


def memory_kind(address: int) -> MemoryKind:
    """Return the kind of the memory at an address; waits for nothing. Raises `DeviceError` without a GPU."""
    cu = driver.bindings()
    ((where, managed, device),) = driver.call(
        cu.cuPointerGetAttributes, 3, _attributes(cu), address
    )
    if managed:
        return MemoryKind("managed", device, address)
    if where == cu.CUmemorytype.CU_MEMORYTYPE_DEVICE:
        return MemoryKind("device", device, address)
    if where == cu.CUmemorytype.CU_MEMORYTYPE_HOST:
        asked = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        code, mapped = cu.cuPointerGetAttribute(asked, address)
        return MemoryKind("pinned", device, None if code else int(mapped))
    return MemoryKind("unregistered", None, None)


def memory_range(address: int) -> tuple[int, int] | None:
    """Return address and bytes of the device allocation around an address; waits for nothing.

    It is the allocation as the driver made it, which for CuPy's arrays is the pool's; None outside of GPUs' memory.
    Raises `DeviceError` without a GPU.
    """
    if memory_kind(address).kind not in ("device", "managed"):
        return None
    look_up = driver.bindings().cuMemGetAddressRange
    code, base, nbytes = look_up(address)
    if code in (driver.INVALID_VALUE, driver.NOT_FOUND):
        return None
    if code:
        raise driver.failure(look_up, code)
    return int(base), int(nbytes)


@cache
def _attributes(cu: ModuleType) -> list[object]:
    asked = cu.CUpointer_attribute
    return [
        asked.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        asked.CU_POINTER_ATTRIBUTE_IS_MANAGED,
        asked.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    ]


class DeviceBytes:
    """Device memory at ``pointer``, aligned to 256 bytes, with a stream that fills it.

    Not from CuPy's pool: it may be dropped while the last launch that reads it runs on any stream, and the pool knows
    only the stream that memory was made on. cudaFree waits.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        cp = cupy()
        self.nbytes = nbytes
        with cp.cuda.Device(device):
            self._memory = cp.cuda.Memory(max(16, nbytes))
            self._stream = cp.cuda.Stream(non_blocking=True)
            self._event = cp.cuda.Event(disable_timing=True)
        self.pointer = int(self._memory.ptr)
        self._kept: list[object] = []  # host memory of uploads that may be under way

    def write(self, at: int, values: Array) -> None:
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


def uploaded(table: Array, device: int) -> DeviceBytes:
    """Return device memory with a copy of a table; waits for the copy. Not for use while a stream is captured."""
    memory = DeviceBytes(table.nbytes, device)
    memory.write(0, table)
    memory.wait()
    return memory


class _Pages:
    """Page-locked memory that lives as long as this owner, which NumPy views keep alive."""

    def __init__(self, nbytes: int) -> None:
        self._runtime = cupy().cuda.runtime
        flags = self._runtime.hostAllocPortable | self._runtime.hostAllocMapped
        self.pointer = 0
        self.pointer = int(self._runtime.hostAlloc(max(1, nbytes), flags))
        self.__array_interface__: dict[str, object] = {
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
    with _naming(f"cannot page-lock {nbytes} bytes of host memory"):
        return PinnedBuffer(_Pages(nbytes), nbytes)


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
    at = array.ctypes.data
    with _naming(f"cannot register {array.nbytes} bytes of host memory at {at:#x}"):
        return RegisteredBuffer(array)


@contextmanager
def _naming(failed: str) -> Iterator[None]:
    """Raise the runtime's errors as `DeviceError`."""
    try:
        yield
    except DeviceError:
        raise
    except RuntimeError as error:
        raise DeviceError(f"{failed}: {error}") from error


def _device_pointer(pointer: int) -> int:
    """Address of mapped host memory on the current device, which need not be the host's."""
    found = memory_kind(pointer).device_pointer
    if found is None:
        raise DeviceError(f"the host memory at {pointer:#x} has no address on the GPU")
    return found
