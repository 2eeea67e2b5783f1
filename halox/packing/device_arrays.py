"""GPU arrays of any library: their addresses, the memory that a datatype may touch, and checks of both."""

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

if TYPE_CHECKING:
    from halox.datatypes import Datatype


@dataclass(frozen=True)
class DeviceArray:
    """Address of an array, and the addresses that a datatype on the array may touch.

    ``pointer`` is the address of element [0, ..., 0]. Addresses from ``low`` to ``high``, excluded, may be
    touched. ``name`` is the caller's name of the array, for errors.
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
    """Describe a GPU array of CuPy, or of a library with DLPack or ``__cuda_array_interface__``.

    A datatype may touch the whole allocation of a CuPy array, but only the bytes between the first and the
    last byte of another library's array. Raises `FieldError` if ``array`` is not a device array, or if
    ``writable`` is True and the array is read-only.

    Notes
    -----
    If another library reports pending work on its array, CuPy's current stream on the array's GPU waits
    for this work. It does not wait while it is being captured, because a graph cannot contain work of
    other streams.
    """
    cupy()
    if is_cupy_array(array):
        place, memory = int(array.data.ptr), array.data.mem
        form = array.shape, array.strides, array.itemsize
        low, high = int(memory.ptr), int(memory.ptr) + int(memory.size)
        if high < place + array.nbytes:
            # CuPy's from_dlpack adds the extents for the size of the memory.
            first, past = _own_memory(place, form)
            low, high = min(low, first), max(high, past)
        return DeviceArray(name, place, low, high, int(array.device.id), *form)
    described, device = _foreign(array, name, writable)
    form = described.shape, described.strides, described.dtype.itemsize
    low, high = _own_memory(described.pointer, form)
    return DeviceArray(name, described.pointer, low, high, device, *form)


def _own_memory(
    pointer: int, form: tuple[tuple[int, ...], tuple[int, ...], int]
) -> tuple[int, int]:
    """Return the addresses of an array's first byte, and past its last byte."""
    low, high = (0, 0) if 0 in form[0] else StridedBlocks(0, *form).span
    return pointer + low, pointer + high


def _foreign(array: object, name: str, writable: bool) -> tuple[Described, int]:
    """Describe an array of any library on a GPU, and order the current stream after its work."""
    if not is_device_array(array):
        raise FieldError(f"{name}: got {type(array).__name__}, needs an array in device memory")
    described = describe(array, name)
    if writable and not described.writable:
        raise _read_only(name)
    assert described.device is not None
    if described.pointer and not is_cupy_array(array):
        _wait_for_producer(array, name, described.device)
    return described, described.device


def _read_only(name: str) -> FieldError:
    return FieldError(
        f"{name}: is read-only and would be written to; pass a writable array (JAX's never are: "
        "receive into one of CuPy or NumPy, and make it JAX's by jax.dlpack.from_dlpack)"
    )


def packed_bytes(
    array: object, name: str, nbytes: int, device: int, *, writable: bool = False
) -> int:
    """Return the device address of a packed buffer of at least ``nbytes`` bytes, for GPU ``device``.

    The buffer is in the memory of the GPU, in the memory of a GPU with peer access, or in page-locked host
    memory. Raises `FieldError` if the buffer is not a contiguous one-dimensional uint8 array, is too small,
    is in pageable host memory, or is read-only and ``writable`` is True. Raises `DeviceError` if the buffer
    is on a GPU without peer access.
    """
    array = as_ndarray(array, name)
    if isinstance(array, np.ndarray):
        return _pinned_bytes(array, name, nbytes, writable)
    described, its_device = _foreign(array, name, writable)
    _check_shape(name, nbytes, described.shape, described.dtype, described.strides)
    if nbytes and its_device != device:
        enable_peer_access(device, its_device, name)
    return described.pointer


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
    pointer = int(cupy().cuda.runtime.pointerGetAttributes(array.ctypes.data).devicePointer)
    if not pointer:
        raise FieldError(
            f"{name}: is in host memory that is not page-locked, which the GPU cannot reach; give "
            "an array of device memory, or page-locked memory such as cupyx.empty_pinned makes"
        )
    return pointer


@cache
def enable_peer_access(device: int, other: int, name: str = "array") -> None:
    """Enable peer access from GPU ``device`` to GPU ``other``; raises `DeviceError` if that is impossible."""
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
    """Make CuPy's current stream on a GPU wait for another library's work on an array there."""
    cuda = cupy().cuda
    with cuda.Device(device):
        stream = int(cuda.get_current_stream().ptr)
        if cuda.runtime.streamIsCapturing(stream):
            return
        if hasattr(type(array), "__dlpack__"):
            dlpack.export(array, name, stream=stream or 1)  # 1 is DLPack's number of stream 0
            return
        # 1 and 2 are the legacy and the per-thread default stream, in the interface and in CUDA.
        producer_stream = array.__cuda_array_interface__.get("stream")
        if producer_stream is not None and int(producer_stream) != stream:
            event = cuda.Event(disable_timing=True)
            cuda.runtime.eventRecord(event.ptr, int(producer_stream))
            cuda.runtime.streamWaitEvent(stream, event.ptr)
