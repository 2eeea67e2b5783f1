"""What halox needs to know about an array, on the host or on a GPU, without importing a GPU package."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.datatypes import StridedBlocks
from halox.datatypes.boxes import contiguous_strides
from halox.errors import FieldError, HaloxError
from halox.runtime import dlpack
from halox.runtime.gpu.addresses import memory_kind
from halox.runtime.gpu.cuda import is_cupy_array, is_device_array
from halox.values import shown

WORDS: dict[int, np.dtype[Any]] = {
    16: np.dtype("c16"),
    8: np.dtype("u8"),
    4: np.dtype("u4"),
    2: np.dtype("u2"),
    1: np.dtype("u1"),
}
"""The dtype of a word by its bytes."""


@dataclass(frozen=True)
class Described:
    """Address, layout and place of an array.

    Attributes
    ----------
    pointer : int
        Address of the element [0, ..., 0].
    shape, strides : tuple of int
        Strides in bytes.
    dtype : numpy.dtype
    device : int or None
        Number of the GPU, None on the host.
    writable : bool
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int | None
    writable: bool


def describe(array: Any, name: str = "array") -> Described:
    """Describe an array of NumPy or CuPy, or anything with DLPack or ``__cuda_array_interface__``.

    Raises
    ------
    FieldError
        If ``array`` is none of these, its dtype has no fixed size, or it raises when asked for its memory; names
        the argument.

    Notes
    -----
    Element types that NumPy does not have, such as bfloat16, are described as opaque bytes (``V2``).
    An array that comes by DLPack of before version 1.0 alone counts as read-only.
    """
    try:
        if not isinstance(array, np.ndarray):
            if is_cupy_array(array):
                place = array.data
                return Described(
                    int(place.ptr),
                    array.shape,
                    array.strides,
                    array.dtype,
                    int(place.device_id),
                    True,
                )
            if is_device_array(array, name):
                return _on_gpu(array, name)
            array = as_ndarray(array, name)
        if isinstance(array, np.ndarray):
            if isinstance(array, np.ma.MaskedArray):
                raise FieldError(
                    f"{name} is a masked array; give its .data, since masks are not exchanged"
                )
            found = Described(
                array.__array_interface__["data"][0],
                array.shape,
                array.strides,
                array.dtype,
                None,
                array.flags.writeable,
            )
        else:
            raise FieldError(
                f"{name} must be a numpy.ndarray or an array on a GPU (or one of another library, with "
                f"__dlpack__ or __cuda_array_interface__), got {type(array).__module__}."
                f"{type(array).__qualname__}"
            )
    except HaloxError:
        raise
    except Exception as error:  # what an array says of itself is the code of its library
        raise dlpack.refused(name, error) from error
    if found.dtype.hasobject:
        raise FieldError(
            f"{name} has dtype {found.dtype}, which holds Python objects; use a fixed-size dtype"
        )
    return found


def _on_gpu(array: Any, name: str) -> Described:
    """Describe an array of another library than CuPy, which need not be there."""
    interface = _cuda_interface(array)
    if interface is None:
        pointer, shape, strides, dtype, writable = dlpack.shown(array, name)
    else:
        dtype = np.dtype(interface["typestr"])
        if dtype.kind == "V" and interface.get("descr"):
            dtype = np.dtype(interface["descr"])
        shape = tuple(interface["shape"])
        strides = tuple(interface.get("strides") or contiguous_strides(shape, dtype.itemsize))
        pointer, read_only = interface["data"]
        writable = not read_only
    kind, device = dlpack.device_of(array, name) or (dlpack.MANAGED, 0)
    if kind == dlpack.MANAGED and pointer:  # the driver knows for all
        device = memory_kind(pointer).device or 0
    return Described(int(pointer), shape, strides, dtype, device, writable)


def _cuda_interface(array: Any) -> Any:
    try:
        return getattr(array, "__cuda_array_interface__", None)
    except Exception:  # PyTorch's raises several kinds
        if hasattr(type(array), "__dlpack__"):
            return None  # and that says why, or takes more types
        raise


class _Shared:
    """Host memory that NumPy may look at; keeps its array alive."""

    def __init__(self, array: Any, shown: dlpack.Shown) -> None:
        self.array = array
        self.__array_interface__ = {
            "version": 3,
            "data": (shown.pointer, not shown.writable),
            "shape": shown.shape,
            "strides": shown.strides,
            "typestr": shown.dtype.str,
        }


def as_ndarray(array: Any, name: str = "array") -> Any:
    """View another library's array on the host as a NumPy array; return anything else as it is.

    Raises
    ------
    FieldError
        If the array does not show its memory; names the argument.
    """
    if isinstance(array, np.ndarray):
        return array
    device = dlpack.device_of(array, name)
    if device is None or device[0] not in dlpack.ON_HOST:
        return array
    return np.asarray(_Shared(array, dlpack.shown(array, name)))


def scalar_array(value: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a scalar as an array of shape (): NumPy's in their own dtype, Python's in the given one.

    Raises
    ------
    FieldError
        If the dtype cannot hold the value.
    """
    if isinstance(value, np.generic):
        return np.asarray(value)
    kind = np.asarray(value).dtype
    try:
        both_whole = kind.kind in "iu" and dtype.kind in "iu"
        if both_whole or np.can_cast(kind, dtype, "same_kind"):
            return np.asarray(value, dtype)
    except OverflowError:
        pass
    raise FieldError(f"array: {shown(value)} is no value of dtype {dtype}; convert it first")


def owner(array: Any) -> Any:
    """Return the array at the end of a chain of views: the one whose life is that of the memory."""
    root, base = array, getattr(array, "base", None)
    while base is not None:
        if isinstance(base, (np.ndarray, type(array))):
            root = base
        # as_strided() leaves an object between the arrays that has a base itself.
        base = getattr(base, "base", None)
    return root


def borrow(array: Any) -> npt.NDArray[Any]:
    """Return a view of the same memory of the host that does not keep it alive.

    Whoever borrows must let go before the memory's owner is gone.
    """
    array = as_ndarray(array)
    root = owner(array)
    low, high = np.lib.array_utils.byte_bounds(root)
    buffer: Any = (ctypes.c_char * (high - low)).from_address(low)
    memory: npt.NDArray[np.uint8] = np.ndarray((high - low,), np.uint8, buffer=buffer)
    offset = array.__array_interface__["data"][0] - low
    return np.ndarray(array.shape, array.dtype, buffer=memory, offset=offset, strides=array.strides)


def common_word(*layouts: tuple[int, StridedBlocks]) -> int:
    """Return the widest word, in bytes, in which all of some strided layouts can be moved.

    Parameters
    ----------
    *layouts : (origin, StridedBlocks)
        A layout and the address of its origin.
    """
    common = 16
    for origin, strided in layouts:
        common = gcd(common, origin + strided.offset, strided.block_bytes, *strided.strides)
    return common


def strided_view(
    memory: npt.NDArray[np.uint8], origin: int, strided: StridedBlocks, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """View strided blocks in a run of bytes as an array.

    Parameters
    ----------
    memory : ndarray of uint8, 1-D
        The bytes.
    origin : int
        Index in ``memory`` to which the layout's offset is relative.
    strided : StridedBlocks
        The layout.
    dtype : numpy.dtype
        Its size divides the block length.

    Returns
    -------
    ndarray, shape ``counts + (block_bytes // dtype.itemsize,)``
    """
    return np.ndarray(
        (*strided.counts, strided.block_bytes // dtype.itemsize),
        dtype,
        buffer=memory.data,
        offset=origin + strided.offset,
        strides=(*strided.strides, dtype.itemsize),
    )
