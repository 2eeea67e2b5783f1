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
from halox.engine.cuda import device_of
from halox.errors import FieldError

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
    """Describe a NumPy array or anything with ``__cuda_array_interface__``.

    Raises
    ------
    FieldError
        If ``array`` is neither, or its dtype has no fixed size; names the argument.
    """
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
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            raise FieldError(
                f"{name} must be a numpy.ndarray or an array on a GPU (with __cuda_array_interface__, such as "
                f"cupy.ndarray), got {type(array).__module__}.{type(array).__qualname__}"
            )
        dtype = np.dtype(interface["typestr"])
        if dtype.kind == "V" and interface.get("descr"):
            dtype = np.dtype(interface["descr"])
        shape = tuple(interface["shape"])
        strides = interface.get("strides") or contiguous_strides(shape, dtype.itemsize)
        pointer, read_only = interface["data"]
        device = getattr(getattr(array, "device", None), "id", None)
        if not isinstance(device, int):  # only CuPy says it like this; the driver knows for all
            device = device_of(pointer)
        found = Described(pointer, shape, tuple(strides), dtype, device, not read_only)
    if found.dtype.hasobject:
        raise FieldError(
            f"{name} has dtype {found.dtype}, which holds Python objects; use a fixed-size dtype"
        )
    return found


def owner(array: Any) -> Any:
    """Return the array at the end of a chain of views: the one whose life is that of the memory."""
    root, base = array, getattr(array, "base", None)
    while base is not None:
        if isinstance(base, (np.ndarray, type(array))):
            root = base
        # as_strided() leaves an object between the arrays that has a base itself.
        base = getattr(base, "base", None)
    return root


def borrow(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view of the same memory that does not keep it alive.

    Whoever borrows must let go before the memory's owner is gone.
    """
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
