"""Arrays of any library on a GPU: address, allocation, and checks of both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from halox.datatypes import StridedBlocks, contiguous
from halox.errors import DeviceError, FieldError
from halox.runtime import dlpack
from halox.runtime.arrays import Described, as_ndarray, describe
from halox.runtime.gpu.cuda import cupy, is_cupy_array, is_device_array
from halox.runtime.gpu.memory import memory_kind

if TYPE_CHECKING:
    from halox.datatypes import Datatype


@dataclass(frozen=True)
class DeviceArray:
    """An array's first element and the bytes around it that belong to its allocation.

    ``pointer`` is the address of element [0, ..., 0]; ``low`` and ``high`` are the half-open range of
    addresses that may be touched. ``name`` is the caller's name of the array, for errors.
    """

    name: str
    pointer: int
    low: int
    high: int
    device: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    itemsize: int = 1

    def check_bounds(self, datatype: Datatype, count: int = 1) -> None:
        """Raise `FieldError` if ``count`` items of a datatype touch bytes outside the allocation."""
        items = contiguous(count, datatype)
        if items.size == 0:
            return
        first, end = items.true_lb, items.true_lb + items.true_extent
        if self.pointer + first < self.low or self.pointer + end > self.high:
            raise FieldError(
                f"{self.name}: {count} item(s) of the datatype touch bytes [{first}, {end}) from "
                f"the array's first element, but its memory is bytes [{self.low - self.pointer}, "
                f"{self.high - self.pointer}); use a smaller count or a datatype made for this "
                "array"
            )


def device_array(array: object, name: str, *, writable: bool = False) -> DeviceArray:
    """Describe an array on a GPU, of CuPy or of a library that offers its memory.

    A CuPy array may be touched anywhere in its allocation, others between their own first and last
    byte. Raises `FieldError` if it is no device array, or is ``writable`` and read-only.

    Notes
    -----
    Later work of CuPy's current stream on the array's GPU is ordered after pending work of another
    library on the array, as far as that library says; not while the stream is being captured, whose
    graph cannot hold work of other streams.
    """
    cupy()
    if is_cupy_array(array):
        memory = array.data.mem
        low, high = int(memory.ptr), int(memory.ptr) + int(memory.size)
        place, form = (int(array.data.ptr), low, high), (array.shape, array.strides, array.itemsize)
        return DeviceArray(name, *place, int(array.device.id), *form)
    found, device = _foreign(array, name, writable)
    form = found.shape, found.strides, found.dtype.itemsize
    low, high = (0, 0) if 0 in found.shape else StridedBlocks(0, *form).span
    place = found.pointer, found.pointer + low, found.pointer + high
    return DeviceArray(name, *place, device, *form)


def _foreign(array: object, name: str, writable: bool) -> tuple[Described, int]:
    """Describe an array of any library on a GPU, and order the current stream after its work."""
    if not is_device_array(array):
        raise FieldError(f"{name}: got {type(array).__name__}, needs an array in device memory")
    found = describe(array, name)
    if writable and not found.writable:
        raise _read_only(name)
    assert found.device is not None
    if found.pointer and not is_cupy_array(array):
        _wait_for_producer(array, name, found.device)
    return found, found.device


def _read_only(name: str) -> FieldError:
    return FieldError(
        f"{name}: is read-only and would be written to; pass a writable array (JAX's never are: "
        "receive into one of CuPy or NumPy, and make it JAX's by jax.dlpack.from_dlpack)"
    )


def packed_bytes(
    array: object, name: str, nbytes: int, device: int, *, writable: bool = False
) -> int:
    """Address, for a GPU, of a packed buffer of at least ``nbytes`` bytes.

    The buffer is in the GPU's memory, in that of another GPU that it can reach, or in page-locked host
    memory. Raises `FieldError` if it is not a contiguous one-dimensional uint8 array of that size, is
    ``writable`` and read-only, or is in other host memory; `DeviceError` if it is on a GPU that this
    one cannot reach.
    """
    array = as_ndarray(array, name)
    if isinstance(array, np.ndarray):
        return _pinned_bytes(array, name, nbytes, writable)
    found, its_device = _foreign(array, name, writable)
    _check_shape(name, nbytes, found.shape, found.dtype, found.strides)
    if nbytes and its_device != device:
        reach(device, its_device, name)
    return found.pointer


def _check_shape(
    name: str,
    nbytes: int,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    strides: tuple[int, ...],
) -> None:
    fits = len(shape) == 1 and dtype == np.uint8 and shape[0] >= nbytes
    if not fits or (shape[0] > 1 and strides != (1,)):
        raise FieldError(
            f"{name}: got shape {shape}, dtype {dtype}, strides {strides}; needs a "
            f"contiguous one-dimensional uint8 array of at least {nbytes} bytes"
        )


def _pinned_bytes(array: npt.NDArray[np.generic], name: str, nbytes: int, writable: bool) -> int:
    _check_shape(name, nbytes, array.shape, array.dtype, array.strides)
    if writable and not array.flags.writeable:
        raise _read_only(name)
    if not nbytes:
        return 0
    kind = memory_kind(array.ctypes.data)
    if kind.kind != "pinned" or kind.device_pointer is None:
        raise FieldError(
            f"{name}: is in host memory that is not page-locked, which the GPU cannot reach; give "
            "an array of device memory, or page-locked memory such as cupyx.empty_pinned makes"
        )
    return kind.device_pointer


@cache
def reach(device: int, other: int, name: str = "array") -> None:
    """Let a GPU use another one's memory; raises `DeviceError` if the two are not connected for that."""
    runtime = cupy().cuda.runtime
    if not runtime.deviceCanAccessPeer(device, other):
        raise DeviceError(
            f"{name}: is on device {other}, which device {device} cannot reach; put both on one "
            "device, or go through page-locked host memory"
        )
    with cupy().cuda.Device(device):
        try:
            runtime.deviceEnablePeerAccess(other)
        except runtime.CUDARuntimeError as error:
            if "PeerAccessAlreadyEnabled" not in str(error):
                raise DeviceError(f"{name}: no access to device {other}: {error}") from error


def _wait_for_producer(array: Any, name: str, device: int) -> None:
    """Order CuPy's current stream on a GPU after another library's work on an array there."""
    cuda = cupy().cuda
    with cuda.Device(device):
        stream = int(cuda.get_current_stream().ptr)
        if cuda.runtime.streamIsCapturing(stream):
            return
        if hasattr(type(array), "__dlpack__"):
            dlpack.shown(array, name, stream)
            return
        # The interface's numbers 1 and 2 are the legacy and the per-thread default stream, as
        # CUDA's are.
        made_on = array.__cuda_array_interface__.get("stream")
        if made_on is not None and int(made_on) != stream:
            event = cuda.Event(disable_timing=True)
            cuda.runtime.eventRecord(event.ptr, int(made_on))
            cuda.runtime.streamWaitEvent(stream, event.ptr)
