"""Datatype constructors, by MPI's names and in MPI's argument orders.

The old type stands last, as a datatype or anything ``numpy.dtype`` takes; ``resized`` alone has it
first, as in MPI. None of them is collective, and none touches memory or a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

import numpy as np

from halox.datatypes import algebra
from halox.datatypes.arguments import (
    IntegerList,
    count_array,
    count_of,
    integer,
    integer_array,
    integer_tuple,
    same_lengths,
    scaled,
)
from halox.datatypes.datatype import Datatype
from halox.datatypes.numpy_types import TypeLike, as_datatype
from halox.errors import DatatypeError


def primitive(dtype: TypeLike) -> Datatype:
    """Datatype of one element of a dtype that has no fields.

    Parameters
    ----------
    dtype : dtype-like
        bool, integer, floating, complex, datetime, timedelta, string or raw bytes.

    Returns
    -------
    Datatype

    Raises
    ------
    DatatypeError
        If the dtype has fields or a shape, or elements of no fixed size.

    Examples
    --------
    >>> primitive("c16").extent
    16
    """
    made = as_datatype(dtype)
    if made.constructor != "primitive":
        raise DatatypeError(f"{dtype!r} is not primitive; use as_datatype({dtype!r})")
    return made


def contiguous(count: int, old: TypeLike) -> Datatype:
    """``count`` consecutive items of the old type.

    Parameters
    ----------
    count : int
        Number of items.
    old : Datatype or dtype-like
        The old type.

    Returns
    -------
    Datatype

    Raises
    ------
    DatatypeError
        If ``count`` is not an integer, or negative.

    Examples
    --------
    >>> contiguous(3, "f8").size
    24
    """
    count, inner = count_of("count", count), as_datatype(old)
    return algebra.strided_of(("contiguous", (count,)), inner, count, 1, inner.extent)


def vector(count: int, blocklength: int, stride: int, old: TypeLike) -> Datatype:
    """Equal blocks at equal distances, counted in items of the old type.

    Parameters
    ----------
    count : int
        Number of blocks.
    blocklength : int
        Items a block.
    stride : int
        Items from the start of one block to the start of the next; any sign.
    old : Datatype or dtype-like
        The old type.

    Returns
    -------
    Datatype

    Raises
    ------
    DatatypeError
        If an argument is not an integer, or ``count`` or ``blocklength`` is negative.

    Examples
    --------
    >>> vector(2, 3, 4, "f8").strided
    StridedBlocks(offset=0, counts=(2,), strides=(32,), block_bytes=24)
    """
    count, blocklength = count_of("count", count), count_of("blocklength", blocklength)
    stride, inner = integer("stride", stride), as_datatype(old)
    written = ("vector", (count, blocklength, stride))
    return algebra.strided_of(written, inner, count, blocklength, stride * inner.extent)


def hvector(count: int, blocklength: int, stride_bytes: int, old: TypeLike) -> Datatype:
    """Equal blocks at equal distances, counted in bytes.

    Parameters
    ----------
    count : int
        Number of blocks.
    blocklength : int
        Items a block.
    stride_bytes : int
        Bytes from the start of one block to the start of the next; any sign.
    old : Datatype or dtype-like
        The old type.

    Returns
    -------
    Datatype

    Raises
    ------
    DatatypeError
        If an argument is not an integer, or ``count`` or ``blocklength`` is negative.

    Examples
    --------
    >>> hvector(2, 1, -12, "f4").lb
    -12
    """
    count, blocklength = count_of("count", count), count_of("blocklength", blocklength)
    stride_bytes, inner = integer("stride_bytes", stride_bytes), as_datatype(old)
    written = ("hvector", (count, blocklength, stride_bytes))
    return algebra.strided_of(written, inner, count, blocklength, stride_bytes)


def indexed(blocklengths: IntegerList, displacements: IntegerList, old: TypeLike) -> Datatype:
    """Blocks of any lengths at any displacements, counted in items of the old type.

    Parameters
    ----------
    blocklengths : sequence of int or ndarray, shape (n,)
        Items in each block.
    displacements : sequence of int or ndarray, shape (n,)
        Start of each block, in extents of the old type; any sign and order.
    old : Datatype or dtype-like
        The old type.

    Returns
    -------
    Datatype

    Raises
    ------
    DatatypeError
        If the lists differ in length, are not lists of integers, or a block length is negative.

    Examples
    --------
    >>> indexed([1, 3], [0, 2], "i4").size
    16
    """
    lengths = count_array("blocklengths", blocklengths)
    starts = integer_array("displacements", displacements)
    same_lengths(blocklengths=lengths, displacements=starts)
    inner = as_datatype(old)
    return algebra.indexed_of(
        ("indexed", (lengths, starts)),
        inner,
        lengths,
        scaled("displacements", starts, inner.extent),
    )


def hindexed(blocklengths: IntegerList, byte_displacements: IntegerList, old: TypeLike) -> Datatype:
    """Blocks of any lengths at any displacements in bytes.

    Parameters
    ----------
    blocklengths : sequence of int or ndarray, shape (n,)
        Items in each block.
    byte_displacements : sequence of int or ndarray, shape (n,)
        First byte of each block; any sign and order.
    old : Datatype or dtype-like
        The old type.

    Returns
    -------
    Datatype

    Raises
    ------
    DatatypeError
        If the lists differ in length, are not lists of integers, or a block length is negative.

    Examples
    --------
    >>> hindexed([1, 1], [0, 20], "f4").true_extent
    24
    """
    lengths = count_array("blocklengths", blocklengths)
    starts = integer_array("byte_displacements", byte_displacements)
    same_lengths(blocklengths=lengths, byte_displacements=starts)
    return algebra.indexed_of(("hindexed", (lengths, starts)), as_datatype(old), lengths, starts)


def indexed_block(blocklength: int, displacements: IntegerList, old: TypeLike) -> Datatype:
    """Blocks of one length at any displacements, counted in items of the old type.

    Parameters
    ----------
    blocklength : int
        Items in every block.
    displacements : sequence of int or ndarray, shape (n,)
        Start of each block, in extents of the old type; any sign and order.
    old : Datatype or dtype-like
        The old type.

    Returns
    -------
    Datatype

    Raises
    ------
    DatatypeError
        If ``displacements`` is not a list of integers, or ``blocklength`` is negative.

    Examples
    --------
    >>> indexed_block(2, [0, 5, 10], "f8").strided
    StridedBlocks(offset=0, counts=(3,), strides=(40,), block_bytes=16)
    """
    blocklength = count_of("blocklength", blocklength)
    starts = integer_array("displacements", displacements)
    inner = as_datatype(old)
    return algebra.indexed_of(
        ("indexed_block", (blocklength, starts)),
        inner,
        np.full(starts.size, blocklength, dtype=np.int64),
        scaled("displacements", starts, inner.extent),
    )


def hindexed_block(blocklength: int, byte_displacements: IntegerList, old: TypeLike) -> Datatype:
    """Blocks of one length at any displacements in bytes.

    Parameters
    ----------
    blocklength : int
        Items in every block.
    byte_displacements : sequence of int or ndarray, shape (n,)
        First byte of each block; any sign and order.
    old : Datatype or dtype-like
        The old type.

    Returns
    -------
    Datatype

    Raises
    ------
    DatatypeError
        If ``byte_displacements`` is not a list of integers, or ``blocklength`` is negative.

    Examples
    --------
    >>> hindexed_block(1, [-8, 8], "f8").lb
    -8
    """
    blocklength = count_of("blocklength", blocklength)
    starts = integer_array("byte_displacements", byte_displacements)
    return algebra.indexed_of(
        ("hindexed_block", (blocklength, starts)),
        as_datatype(old),
        np.full(starts.size, blocklength, dtype=np.int64),
        starts,
    )


def struct(
    blocklengths: IntegerList, byte_displacements: IntegerList, types: Sequence[TypeLike]
) -> Datatype:
    """Blocks of unlike types at any displacements in bytes.

    Parameters
    ----------
    blocklengths : sequence of int or ndarray, shape (n,)
        Items in each block.
    byte_displacements : sequence of int or ndarray, shape (n,)
        First byte of each block; any sign and order.
    types : sequence of Datatype or dtype-like, length n
        The old type of each block.

    Returns
    -------
    Datatype

    Raises
    ------
    DatatypeError
        If the lists differ in length, are not lists of integers, or a block length is negative.

    Notes
    -----
    As in MPI, the extent is rounded up to the largest alignment of the primitives, unless a part
    was resized: explicit bounds outrank all others and are not rounded. A structured NumPy dtype
    counts as resized.

    Examples
    --------
    >>> struct([1, 1], [0, 8], ["f8", "i1"]).extent
    16
    """
    lengths = count_array("blocklengths", blocklengths)
    starts = integer_array("byte_displacements", byte_displacements)
    if isinstance(types, (str, Datatype)):
        raise DatatypeError(f"types must be a sequence, one type a block, got {types!r}")
    same_lengths(blocklengths=lengths, byte_displacements=starts, types=types)
    olds = tuple(as_datatype(old) for old in types)
    return algebra.struct_of(("struct", (lengths, starts)), lengths, starts, olds)


def subarray(
    sizes: Sequence[int],
    subsizes: Sequence[int],
    starts: Sequence[int],
    old: TypeLike,
    order: Literal["C", "F"] = "C",
) -> Datatype:
    """Box of a contiguous array; the extent is that of the whole array.

    Parameters
    ----------
    sizes, subsizes : sequence of int, length ndim
        Shape of the array and of the box.
    starts : sequence of int, length ndim
        Index of the box's first element.
    old : Datatype or dtype-like
        The element type.
    order : {"C", "F"}
        Whether the last or the first index runs fastest.

    Returns
    -------
    Datatype

    Raises
    ------
    DatatypeError
        If the lists differ in length or are empty.
        If a size or subsize is below 1, or the box does not lie within the array.
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
    if order not in ("C", "F"):
        raise DatatypeError(f"order must be 'C' or 'F', got {order!r}")
    inner = as_datatype(old)
    written = ("subarray", (shape, box, corner, order))
    if not inner.size:
        return algebra.nothing(written, inner)
    steps = _contiguous_strides(shape, inner.extent, order)
    offset = sum(start * step for start, step in zip(corner, steps, strict=True))
    if order == "F":  # outermost first means the last axis first
        box, steps = box[::-1], steps[::-1]
    made = algebra.box_of(written, inner, box, steps, offset)
    return made.with_bounds(made.bounds.resized(0, prod(shape) * inner.extent))


def resized(old: TypeLike, lb: int, extent: int) -> Datatype:
    """Give a type another lower bound and extent; the bytes stay.

    Parameters
    ----------
    old : Datatype or dtype-like
        The old type.
    lb : int
        New lower bound in bytes.
    extent : int
        New extent in bytes; any sign.

    Returns
    -------
    Datatype

    Raises
    ------
    DatatypeError
        If ``lb`` or ``extent`` is not an integer.

    Examples
    --------
    >>> column = resized(vector(3, 1, 4, "f8"), 0, 8)
    >>> column.blocks(2).offsets.tolist()
    [0, 32, 64, 8, 40, 72]
    """
    lb, extent = integer("lb", lb), integer("extent", extent)
    return algebra.resized_of(("resized", (lb, extent)), as_datatype(old), lb, extent)


def dup(old: TypeLike) -> Datatype:
    """Copy of a datatype.

    Parameters
    ----------
    old : Datatype or dtype-like
        The old type.

    Returns
    -------
    Datatype
        Equal to the old type.

    Examples
    --------
    >>> dup("f8") == primitive("f8")
    True
    """
    return algebra.dup_of(as_datatype(old))


def slab(
    shape: Sequence[int],
    strides: Sequence[int],
    starts: Sequence[int],
    subsizes: Sequence[int],
    dtype: TypeLike,
) -> Datatype:
    """Box of an array of any strides.

    Parameters
    ----------
    shape, strides : sequence of int, length ndim
        Shape and byte strides of the array, as NumPy states them; strides of any sign.
    starts, subsizes : sequence of int, length ndim
        Index of the box's first element, and its shape; a subsize of 0 means no bytes.
    dtype : Datatype or dtype-like
        The element type.

    Returns
    -------
    Datatype
        Displacements are relative to the array's element ``[0, ..., 0]``; elements stand in C
        order of their indices whatever the strides.

    Raises
    ------
    DatatypeError
        If the lists differ in length, or the box does not lie within the array.

    Examples
    --------
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
    made = as_datatype(dtype)
    for step, subsize in zip(reversed(steps), reversed(box), strict=True):
        made = hvector(subsize, 1, step, made)
    offset = sum(start * step for start, step in zip(corner, steps, strict=True))
    return hindexed_block(1, [offset], made) if offset else made


def _contiguous_strides(shape: tuple[int, ...], extent: int, order: str) -> tuple[int, ...]:
    """Byte strides of a contiguous array."""
    sizes = shape if order == "F" else shape[::-1]
    steps = [extent]
    for size in sizes[:-1]:
        steps.append(steps[-1] * size)
    return tuple(steps if order == "F" else steps[::-1])
