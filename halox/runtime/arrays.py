"""Address, layout and device of arrays, on the host or on a GPU, without importing a GPU package."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, NamedTuple, TypeVar

import numpy as np

from halox.datatypes import StridedBlocks
from halox.datatypes.boxes import contiguous_strides
from halox.errors import FieldError, HaloxError
from halox.runtime import dlpack
from halox.runtime.dlpack import Array as Array
from halox.runtime.dlpack import DType as DType
from halox.runtime.gpu.cuda import cupy, is_cupy_array, is_device_array
from halox.values import check_unmasked, shown

T = TypeVar("T")

WORDS: dict[int, DType] = {
    np.dtype(t).itemsize: np.dtype(t) for t in ("c16", "u8", "u4", "u2", "u1")
}
"""The dtype of a word, by its size in bytes."""

MOST_AXES = 64
"""Largest number of axes of a NumPy array."""

MOST_BYTES = 1 << 56
"""Largest number of bytes that a process can address."""

_Byte = ctypes.c_char

# Work limit of numpy.shares_memory for interleaved arrays; above it the answer is unknown.
_MOST_WORK: Any = 1 << 20


@dataclass(slots=True, unsafe_hash=True)
class Described:
    """Address of an array's element [0, ..., 0], layout (strides in bytes), and GPU number (None on the host)."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: int | None
    writable: bool

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def borrowed(self) -> HostArray:
        """Borrow the memory of this host array alone, without the array that it is a view of."""
        before, behind = span(self.shape, self.strides, self.dtype.itemsize)
        return HostArray(memory_at(self.pointer - before, before + behind), before, self.pointer)


def check_extents(shape: tuple[int, ...], itemsize: int, what: str, remedy: str) -> None:
    """Raise `FieldError` for an impossibly large array, before its size in bytes overflows 64 bits."""
    needs = f"{len(shape)} axes" if len(shape) > MOST_AXES else ""
    if not needs:
        nbytes = prod(max(n, 1) for n in shape) * itemsize  # NumPy counts the bytes in the same way
        if nbytes > MOST_BYTES:
            needs = f"at least 2**{nbytes.bit_length() - 1} bytes"
    if needs:
        raise FieldError(
            f"{what} {shown(shape)} of {itemsize} bytes an element needs {needs}, and an array has at most {MOST_AXES} "
            f"axes and 2**{MOST_BYTES.bit_length() - 1} bytes; {remedy}"
        )


def describe(array: object, name: str = "array") -> Described:
    """Describe an array of NumPy or CuPy, or anything with DLPack or ``__cuda_array_interface__``.

    Raises `FieldError`, which names the argument, if ``array`` is not such an object, its dtype has no fixed size or
    is none of NumPy's (bfloat16), or it raises when asked for its memory. An array that offers only DLPack older than
    version 1.0 counts as read-only.
    """
    if type(array) is np.ndarray and not array.dtype.hasobject:
        flags = array.flags
        try:  # a third of the time of __array_interface__
            pointer = ctypes.addressof(_Byte.from_buffer(array))  # type: ignore[arg-type]
        except (TypeError, ValueError):  # not contiguous, read-only, empty, no buffers of the dtype
            pointer = array.__array_interface__["data"][0]
        return Described(pointer, array.shape, array.strides, array.dtype, None, flags.writeable)
    try:
        if is_cupy_array(array):
            pointer, device = int(array.data.ptr), int(array.data.device_id)
            return Described(pointer, array.shape, array.strides, array.dtype, device, True)
        if not isinstance(array, np.ndarray):
            if is_device_array(array, name):
                return _on_gpu(array, name)
            array = as_ndarray(array, name)
        if not isinstance(array, np.ndarray):
            remedy = ""
            if isinstance(array, list | tuple):
                remedy = (
                    "; give arrays one by one, a list of them with a star (*fields), or numpy.asarray(...) of "
                    "numbers"
                )
            if type(array).__module__.startswith("xarray."):
                remedy = (
                    "; give array.data of a labelled array with halo, as grid.dataarray(u, halo=True) is, or call "
                    "dataset.halox.exchange(grid)"
                )
            raise FieldError(
                f"{name} must be a numpy.ndarray or an array on a GPU (or one of another library, with "
                f"__dlpack__ or __cuda_array_interface__), got {type(array).__module__}."
                f"{type(array).__qualname__}{remedy}"
            )
        check_unmasked(array, name)
        pointer, writable = array.__array_interface__["data"][0], array.flags.writeable
        described = Described(pointer, array.shape, array.strides, array.dtype, None, writable)
    except HaloxError:
        raise
    except Exception as error:  # this runs code of any library
        raise dlpack.refused(name, error) from error
    if described.dtype.hasobject:
        raise FieldError(
            f"{name} has dtype {described.dtype}, which holds Python objects; use a fixed-size dtype"
        )
    return described


def _on_gpu(array: Any, name: str) -> Described:
    interface = _cuda_interface(array)
    if interface is None:
        view = describe(cupy().from_dlpack(array), name)
        pointer, shape, strides, dtype = view.pointer, view.shape, view.strides, view.dtype
        writable = dlpack.is_writable(array, name)
    else:
        dtype = np.dtype(interface["typestr"])
        if dtype.kind == "V" and interface.get("descr"):
            dtype = np.dtype(interface["descr"])
        shape = tuple(interface["shape"])
        strides = tuple(interface.get("strides") or contiguous_strides(shape, dtype.itemsize))
        pointer, read_only = interface["data"]
        writable = not read_only
    kind, device = dlpack.device_of(array, name) or (dlpack.MANAGED, 0)
    if kind == dlpack.MANAGED and pointer:  # the driver knows the device of any pointer
        device = int(cupy().cuda.runtime.pointerGetAttributes(pointer).device)
    return Described(int(pointer), shape, strides, dtype, device, writable)


def _cuda_interface(array: object) -> Mapping[str, Any] | None:
    try:
        return getattr(array, "__cuda_array_interface__", None)
    except Exception:  # PyTorch's raises several kinds
        if hasattr(type(array), "__dlpack__"):
            return None  # __dlpack__ gives the reason
        raise


class HostBytes:
    """Bytes of host memory at an address, for `numpy.asarray`; keeps their owner alive."""

    def __init__(
        self,
        pointer: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        *,
        writable: bool = False,
        owner: object = None,
    ) -> None:
        self.base = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, not writable),
            "shape": shape,
            "strides": strides,
            "typestr": "|u1",
        }


def as_ndarray(array: Any, name: str = "array") -> Any:
    """View another library's array on the host as a NumPy array; return anything else as it is.

    Raises `FieldError`, which names the argument, if the array does not expose its memory.
    """
    if isinstance(array, np.ndarray):
        return array
    device = dlpack.device_of(array, name)
    if device is None or device[0] not in dlpack.ON_HOST:
        return array
    try:
        return np.from_dlpack(array)
    except Exception as error:  # this runs code of any library
        raise dlpack.refused(name, error) from error


def scalar_array(value: object, dtype: DType) -> Array:
    """Return a scalar as an array of shape (): NumPy scalars keep their dtype, Python scalars get the given dtype.

    Raises `FieldError` if the dtype cannot hold the value.
    """
    if isinstance(value, np.generic):
        return np.asarray(value)
    kind = np.asarray(value).dtype
    try:
        both_whole = kind.kind in "iu" and dtype.kind in "iu"
        if both_whole or np.can_cast(kind, dtype, "same_kind"):
            with np.errstate(over="ignore"):
                scalar = np.asarray(value, dtype)
            if kind == dtype or np.isfinite(scalar) or not np.isfinite(value):  # type: ignore[call-overload]
                return scalar
    except OverflowError:
        pass
    raise FieldError(f"array: {shown(value)} is not a value of dtype {dtype}; convert it first")


def owner(array: T) -> T | Array:
    """Return the array at the end of a chain of views, which owns the memory."""
    root: T | Array
    root, base = array, getattr(array, "base", None)
    while base is not None:
        if isinstance(base, (np.ndarray, type(array))):
            root = base
        # as_strided() puts an object that is not an array between the view and its base.
        base = getattr(base, "base", None)
    return root


class HostArray(NamedTuple):
    """Borrowed memory of a host array: references to it must not outlive the owner.

    ``memory`` is the memory of the owning array. ``origin`` is the index in ``memory`` of the element [0, ..., 0] of
    the borrowed array, and ``pointer`` is the address of this element. ``owner()`` returns the owning array, or None
    once it was freed.
    """

    memory: memoryview
    origin: int
    pointer: int
    owner: Callable[[], object] = lambda: None

    def check_inside(self, first: int, stop: int) -> None:
        """Raise `FieldError` if bytes, relative to the element [0, ..., 0], are outside the memory."""
        low, high = -self.origin, len(self.memory) - self.origin
        if first < low or stop > high:
            raise FieldError(
                f"the datatype touches bytes {first} to {stop} from the array's first element, but its memory holds "
                f"bytes {low} to {high}"
            )


def borrow(array: object) -> HostArray:
    """Borrow the memory of a host array and of the array that it views; `FieldError` if it is not a host array."""
    array = as_ndarray(array)
    if not isinstance(array, np.ndarray):
        raise FieldError(f"a NumPy array is needed, got {type(array).__name__}")
    check_unmasked(array, "array")
    if array.dtype.hasobject:
        raise FieldError(f"an array of dtype {array.dtype} holds references, which cannot be moved")
    root = owner(array)
    pointer = array.__array_interface__["data"][0]
    low = pointer if root is array else root.__array_interface__["data"][0]
    before, behind = span(root.shape, root.strides, root.itemsize)
    memory = memory_at(low - before, before + behind)
    return HostArray(memory, pointer - low + before, pointer, weakref.ref(root))


def address_of(memory: memoryview) -> int:
    """Return the address of writable host bytes, 0 if ``memory`` is empty."""
    return 0 if not len(memory) else ctypes.addressof(_Byte.from_buffer(memory))


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return a view of host bytes at an address."""
    return memoryview((_Byte * nbytes).from_address(address))


def span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return the number of bytes of an array's memory before its element [0, ..., 0], and from that element on."""
    if 0 in shape:
        return 0, 0
    reaches = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    low = sum([reach for reach in reaches if reach < 0])
    return -low, sum(reaches) - low + itemsize


def share_memory(a: Described, b: Described) -> bool:
    """Return whether two arrays share any byte of their elements, or may do so if this is too hard to decide.

    Uses addresses only, so arrays on a GPU are accepted.
    """
    if a.device != b.device:
        return False
    (low_a, high_a), (low_b, high_b) = (
        span(array.shape, array.strides, array.dtype.itemsize) for array in (a, b)
    )
    if a.pointer + high_a <= b.pointer - low_b or b.pointer + high_b <= a.pointer - low_a:
        return False
    try:
        return np.shares_memory(_shell(a), _shell(b), max_work=_MOST_WORK)
    except (np.exceptions.TooHardError, OverflowError):
        return True


def sharing(arrays: Sequence[Described]) -> tuple[int, int] | None:
    """Return the numbers of two arrays that share memory; None if there are no such arrays."""
    if len(arrays) < 2:
        return None
    ranges = []
    for number, array in enumerate(arrays):
        before, behind = span(array.shape, array.strides, array.dtype.itemsize)
        ranges.append((array.pointer - before, array.pointer + behind, number))
    ranges.sort()
    for place, (_, end, one) in enumerate(ranges):
        for begin, _, other in ranges[place + 1 :]:
            if begin >= end:
                break
            if share_memory(arrays[one], arrays[other]):
                return min(one, other), max(one, other)
    return None


def check_elements_apart(array: Described, name: str) -> None:
    """Raise `FieldError` if elements of an output array share memory, as in a broadcast array."""
    blocks = StridedBlocks.canonical(0, array.shape, array.strides, array.dtype.itemsize)
    if blocks.overlaps and (0 in blocks.strides or blocks.block_list().overlaps):
        raise FieldError(
            f"{name}: elements share memory (shape {tuple(array.shape)}, strides {tuple(array.strides)}), so that what "
            "is written to one changes others; give a copy"
        )


def check_no_gaps(name: str, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
    """Raise `FieldError` for a view with memory between its elements; any order of the axes is allowed.

    Consecutive items of a datatype are consecutive in memory, as in MPI, and not along such a view.
    """
    run = itemsize
    for stride, n in sorted((stride, n) for stride, n in zip(strides, shape, strict=True) if n > 1):
        if stride != run and 0 not in shape:
            raise FieldError(
                f"{name} is a view of shape {tuple(shape)} and strides {tuple(strides)} with memory between its "
                "elements, and displacements count bytes of memory, as in MPI: give the whole array that it is a view "
                "of, and describe the elements in it (halox.datatypes.slab, vector), or give a contiguous copy"
            )
        run *= n


def _shell(array: Described) -> Array:
    """Return a NumPy array with the addresses of the described array; its elements must not be accessed."""
    memory, origin, *_ = array.borrowed()
    return np.ndarray(array.shape, f"V{array.dtype.itemsize}", memory, origin, array.strides)


def common_word(*layouts: tuple[int, StridedBlocks]) -> int:
    """Return the widest word, in bytes, in which strided layouts at these origins can be moved."""
    common = 16
    for origin, strided in layouts:
        common = gcd(common, origin + strided.offset, strided.block_bytes, *strided.strides)
    return common
