"""Boxes of arrays: subarrays of contiguous arrays, slabs of arrays with any strides."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import mul
from typing import Literal

from halox.datatypes.algebra import box_of
from halox.datatypes.arguments import integer_tuple, same_lengths
from halox.datatypes.datatype import Datatype
from halox.datatypes.numpy_types import TypeLike, as_datatype
from halox.errors import DatatypeError
from halox.values import shown


def subarray(
    sizes: Sequence[int],
    subsizes: Sequence[int],
    starts: Sequence[int],
    old: TypeLike,
    order: Literal["C", "F"] = "C",
) -> Datatype:
    """Box of a contiguous array; the datatype has the extent of the whole array.

    Parameters
    ----------
    sizes, subsizes : sequence of int, length ndim
        Shape of the array, and shape of the box.
    starts : sequence of int, length ndim
        Index of the box's first element.
    old : Datatype or dtype-like
        The element type.
    order : {"C", "F"}
        Whether the last or the first index runs fastest.

    Raises
    ------
    DatatypeError
        If the lists differ in length or are empty.
        If a size or subsize is below 1, or the box is not within the array.
        If ``order`` is neither ``"C"`` nor ``"F"``.

    Examples
    --------
    >>> subarray((4, 4, 4), (4, 4, 1), (0, 0, 3), "f8").strided
    StridedBlocks(offset=24, counts=(16,), strides=(32,), block_bytes=8)
    """
    shape = integer_tuple("sizes", sizes)
    box = integer_tuple("subsizes", subsizes)
    corner = integer_tuple("starts", starts)
    same_lengths(sizes=shape, subsizes=box, starts=corner)
    if not shape:
        raise DatatypeError("sizes must have one entry or more, got none")
    for axis, (size, subsize, start) in enumerate(zip(shape, box, corner, strict=True)):
        if size < 1 or subsize < 1 or start < 0 or start + subsize > size:
            raise DatatypeError(
                f"axis {axis}: the box from {start} of {subsize} elements must hold one element or "
                f"more and lie within the array's {size}"
            )
    if not isinstance(order, str) or order not in ("C", "F"):
        raise DatatypeError(f"order must be 'C' or 'F', got {shown(order)}")
    inner = as_datatype(old)
    steps = contiguous_strides(shape, inner.extent, order)
    offset = sum(map(mul, corner, steps))
    call = ("subarray", (shape, box, corner, order))
    if order == "F":  # outermost first means the last axis first
        box, steps = box[::-1], steps[::-1]
    datatype = box_of(call, inner, box, steps, offset)
    bounds = datatype.bounds.resized(0, prod(shape) * inner.extent)
    return datatype.with_bounds(bounds) if inner.size or inner.bounds.marked else datatype


def slab(
    shape: Sequence[int],
    strides: Sequence[int],
    starts: Sequence[int],
    subsizes: Sequence[int],
    dtype: TypeLike,
) -> Datatype:
    """Box of an array with any strides.

    Parameters
    ----------
    shape, strides : sequence of int, length ndim
        Shape and byte strides of the array, as in NumPy; strides of any sign.
    starts, subsizes : sequence of int, length ndim
        Index of the box's first element, and the box's shape; with a subsize of 0 the box has no bytes.
    dtype : Datatype or dtype-like
        The element type.

    Returns
    -------
    Datatype
        Displacements are relative to the array's element ``[0, ..., 0]``. Elements are in C order of
        their indices, regardless of the strides.

    Raises
    ------
    DatatypeError
        If the lists differ in length, or the box is not within the array.

    Examples
    --------
    >>> import numpy as np
    >>> array = np.zeros((4, 6))[:, ::-1]
    >>> slab(array.shape, array.strides, (0, 1), (4, 2), array.dtype).strided
    StridedBlocks(offset=-8, counts=(4, 2), strides=(48, -8), block_bytes=8)
    """
    sizes = integer_tuple("shape", shape)
    steps = integer_tuple("strides", strides)
    corner = integer_tuple("starts", starts)
    box = integer_tuple("subsizes", subsizes)
    same_lengths(shape=sizes, strides=steps, starts=corner, subsizes=box)
    for axis, (size, start, subsize) in enumerate(zip(sizes, corner, box, strict=True)):
        if start < 0 or subsize < 0 or start + subsize > size:
            raise DatatypeError(
                f"axis {axis}: the box from {start} of {subsize} elements must lie within the "
                f"array's {size}"
            )
    call = ("slab", (sizes, steps, corner, box))
    return box_of(call, as_datatype(dtype), box, steps, sum(map(mul, corner, steps)))


def contiguous_strides(shape: tuple[int, ...], extent: int, order: str = "C") -> tuple[int, ...]:
    """Return the byte strides of a contiguous array with elements of ``extent`` bytes."""
    steps = []
    for size in shape if order == "F" else shape[::-1]:
        steps.append(extent)
        extent *= size
    return tuple(steps if order == "F" else steps[::-1])
