"""Datatype constructors, with MPI's names and argument orders.

The last argument is the old type: a datatype, or an argument of ``numpy.dtype``. In ``resized`` the old type
is the first argument, as in MPI. The constructors are not collective and touch no memory and no device.
``subarray`` is in :mod:`halox.datatypes.boxes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halox.datatypes.algebra import box_of, indexed_of, resized_of, struct_of
from halox.datatypes.arguments import (
    IntegerList,
    count_array,
    count_of,
    integer,
    integer_array,
    same_lengths,
    scaled,
)
from halox.datatypes.datatype import Datatype
from halox.datatypes.numpy_types import TypeLike, as_datatype
from halox.errors import DatatypeError
from halox.values import as_list, shown


def primitive(dtype: TypeLike) -> Datatype:
    """Datatype of one element of a dtype that has no fields.

    Parameters
    ----------
    dtype : dtype-like
        bool, integer, floating, complex, datetime, timedelta, string or raw bytes.

    Raises
    ------
    DatatypeError
        If the dtype has fields or a shape, or its elements have no fixed size.

    Examples
    --------
    >>> primitive("c16").extent
    16
    """
    datatype = as_datatype(dtype)
    if datatype.constructor != "primitive":
        raise DatatypeError(f"{shown(dtype)} is not primitive; use as_datatype({shown(dtype)})")
    return datatype


def contiguous(count: int, old: TypeLike) -> Datatype:
    """``count`` consecutive items of the old type.

    Parameters
    ----------
    count : int
        Number of items.
    old : Datatype or dtype-like
        The old type.

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
    return box_of(("contiguous", (count,)), inner, (count,), (inner.extent,), 0)


def vector(count: int, blocklength: int, stride: int, old: TypeLike) -> Datatype:
    """Equal blocks at equal distances, in items of the old type.

    Parameters
    ----------
    count : int
        Number of blocks.
    blocklength : int
        Items per block.
    stride : int
        Items from the start of one block to the start of the next; any sign.
    old : Datatype or dtype-like
        The old type.

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
    call = ("vector", (count, blocklength, stride))
    strides = (stride * inner.extent, inner.extent)
    return box_of(call, inner, (count, blocklength), strides, 0)


def hvector(count: int, blocklength: int, stride_bytes: int, old: TypeLike) -> Datatype:
    """Equal blocks at equal distances, in bytes.

    Parameters and errors are the same as for `vector`, except that the distance is in bytes.

    Parameters
    ----------
    stride_bytes : int
        Bytes from the start of one block to the start of the next; any sign.

    Examples
    --------
    >>> hvector(2, 1, -12, "f4").lb
    -12
    """
    count, blocklength = count_of("count", count), count_of("blocklength", blocklength)
    stride_bytes, inner = integer("stride_bytes", stride_bytes), as_datatype(old)
    call = ("hvector", (count, blocklength, stride_bytes))
    return box_of(call, inner, (count, blocklength), (stride_bytes, inner.extent), 0)


def indexed(blocklengths: IntegerList, displacements: IntegerList, old: TypeLike) -> Datatype:
    """Blocks of any lengths at any displacements, in items of the old type.

    Parameters
    ----------
    blocklengths : sequence of int or ndarray, shape (n,)
        Items in each block.
    displacements : sequence of int or ndarray, shape (n,)
        Start of each block, in extents of the old type; any sign and order.
    old : Datatype or dtype-like
        The old type.

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
    offsets = scaled("displacements", starts, inner.extent)
    return indexed_of(("indexed", (lengths, starts)), inner, lengths, offsets)


def hindexed(blocklengths: IntegerList, byte_displacements: IntegerList, old: TypeLike) -> Datatype:
    """Blocks of any lengths at any displacements in bytes.

    Parameters and errors are the same as for `indexed`, except that the displacements are in bytes.

    Parameters
    ----------
    byte_displacements : sequence of int or ndarray, shape (n,)
        First byte of each block; any sign and order.

    Examples
    --------
    >>> hindexed([1, 1], [0, 20], "f4").true_extent
    24
    """
    lengths = count_array("blocklengths", blocklengths)
    starts = integer_array("byte_displacements", byte_displacements)
    same_lengths(blocklengths=lengths, byte_displacements=starts)
    return indexed_of(("hindexed", (lengths, starts)), as_datatype(old), lengths, starts)


def indexed_block(blocklength: int, displacements: IntegerList, old: TypeLike) -> Datatype:
    """Blocks of one length at any displacements, in items of the old type.

    Parameters
    ----------
    blocklength : int
        Items in every block.
    displacements : sequence of int or ndarray, shape (n,)
        Start of each block, in extents of the old type; any sign and order.
    old : Datatype or dtype-like
        The old type.

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
    lengths, inner = np.full(starts.size, blocklength, np.int64), as_datatype(old)
    offsets = scaled("displacements", starts, inner.extent)
    return indexed_of(("indexed_block", (blocklength, starts)), inner, lengths, offsets)


def hindexed_block(blocklength: int, byte_displacements: IntegerList, old: TypeLike) -> Datatype:
    """Blocks of one length at any displacements in bytes.

    Parameters and errors are the same as for `indexed_block`, except that the displacements are in
    bytes.

    Parameters
    ----------
    byte_displacements : sequence of int or ndarray, shape (n,)
        First byte of each block; any sign and order.

    Examples
    --------
    >>> hindexed_block(1, [-8, 8], "f8").lb
    -8
    """
    blocklength = count_of("blocklength", blocklength)
    starts = integer_array("byte_displacements", byte_displacements)
    lengths, inner = np.full(starts.size, blocklength, np.int64), as_datatype(old)
    return indexed_of(("hindexed_block", (blocklength, starts)), inner, lengths, starts)


def struct(
    blocklengths: IntegerList, byte_displacements: IntegerList, types: Sequence[TypeLike]
) -> Datatype:
    """Blocks of different types at any displacements in bytes.

    Parameters
    ----------
    blocklengths : sequence of int or ndarray, shape (n,)
        Items in each block.
    byte_displacements : sequence of int or ndarray, shape (n,)
        First byte of each block; any sign and order.
    types : sequence of Datatype or dtype-like, length n
        The old type of each block.

    Raises
    ------
    DatatypeError
        If the lists differ in length, are not lists of integers, or a block length is negative.

    Notes
    -----
    As in MPI, the extent is rounded up to a multiple of the largest alignment of the primitives.
    If a part has explicit bounds, the parts with explicit bounds determine the bounds instead, and
    the extent is not rounded. A structured NumPy dtype has explicit bounds.

    Examples
    --------
    >>> struct([1, 1], [0, 8], ["f8", "i1"]).extent
    16
    """
    lengths = count_array("blocklengths", blocklengths)
    starts = integer_array("byte_displacements", byte_displacements)
    entries = None if isinstance(types, Datatype) else as_list(types)
    if entries is None:
        raise DatatypeError(f"types must be a sequence, one type a block, got {shown(types)}")
    same_lengths(blocklengths=lengths, byte_displacements=starts, types=entries)
    olds = tuple(as_datatype(old) for old in entries)
    return struct_of(("struct", (lengths, starts)), lengths, starts, olds)


def resized(old: TypeLike, lb: int, extent: int) -> Datatype:
    """Datatype with another lower bound and extent; the bytes touched do not change.

    Parameters
    ----------
    old : Datatype or dtype-like
        The old type.
    lb : int
        New lower bound in bytes.
    extent : int
        New extent in bytes; any sign.

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
    return resized_of(("resized", (lb, extent)), as_datatype(old), lb, extent)


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
    inner = as_datatype(old)
    return Datatype("dup", (), (inner,), inner.size, inner.bounds, inner.layout, inner.signature)
