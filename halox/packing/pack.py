"""``halox.pack``, ``halox.unpack`` and ``halox.packing_method``, for arrays on the host and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from halox.datatypes import Datatype, TypeLike, as_datatype
from halox.datatypes.arguments import count_of
from halox.errors import DatatypeError, FieldError
from halox.packing.choosing import METHODS, Choice, choose
from halox.packing.host import HostPacker, overlapping
from halox.packing.pack_device import pack_device, unpack_device
from halox.runtime.arrays import as_ndarray, check_no_gaps
from halox.runtime.gpu.cuda import is_device_array
from halox.runtime.gpu.launch import check_max_blocks
from halox.values import shown

__all__ = ["Choice", "pack", "packing_method", "unpack"]


def pack(
    source: object,
    datatype: TypeLike,
    count: int = 1,
    out: Any = None,
    *,
    method: str = "auto",
    max_blocks: int | None = None,
) -> Any:
    """Copy the bytes that a datatype describes into contiguous memory.

    Parameters
    ----------
    source : ndarray or device array
        NumPy array, CuPy array, or array of a library that supports DLPack or
        ``__cuda_array_interface__``, for example PyTorch, Numba and JAX. Displacements are in bytes
        from the array's first element, so a view with memory between its elements (``A[:, 1]``) is
        refused: give ``A``.
    datatype : Datatype or dtype-like
        Bytes to copy.
    count : int
        Number of consecutive items.
    out : array of uint8, shape (n,), contiguous, optional
        Receives the bytes. By default a new array, in host memory or on the GPU like ``source``. For
        a source on a GPU, ``out`` may be in the memory of this GPU, in the memory of a GPU with peer
        access, or a NumPy array in page-locked host memory, which the GPU writes directly.
    method : {"auto", "strided", "workunits", "traversal", "copy_engine", "host"}
        Packer. ``"auto"`` chooses by layout, size and destination (see :func:`packing_method`).
        ``"host"`` is for NumPy arrays; all other packers are for GPUs.
    max_blocks : int, optional
        Largest number of thread blocks of a GPU kernel, to leave multiprocessors to other kernels.
        No limit by default.

    Returns
    -------
    array of uint8, shape (count * datatype.size,)
        The packed bytes: a new array, or the first bytes of ``out``.

    Raises
    ------
    FieldError
        If ``source`` is not an array, or the datatype reaches beyond the array's memory.
        If ``source`` is a view with memory between its elements.
        If ``out`` is too small, not contiguous, read-only, not of dtype uint8, or in memory that the
        GPU cannot write.
    DatatypeError
        If ``count`` is not an integer, or negative.
        If the method does not exist or cannot pack the datatype.
    DeviceError
        If there is no GPU, or ``max_blocks`` is less than 1.

    Notes
    -----
    Not collective. In host memory the call blocks. On a GPU the call enqueues work on the current
    stream. The first call with a datatype prepares a packer. Later calls only launch it and may be
    captured into a graph.

    Examples
    --------
    >>> from halox.datatypes import vector
    >>> pack(np.arange(6, dtype="i2"), vector(3, 1, 2, "i2")).view("i2")
    array([0, 2, 4], dtype=int16)

    The elements of a view, by the strides of the whole array:

    >>> from halox.datatypes import slab
    >>> a = np.arange(6, dtype="i2").reshape(3, 2)
    >>> pack(a, slab(a.shape, a.strides, (0, 1), (3, 1), "i2")).view("i2")
    array([1, 3, 5], dtype=int16)
    """
    described = datatype if type(datatype) is Datatype else as_datatype(datatype)
    if not isinstance(source, np.ndarray) and is_device_array(source):
        return pack_device(source, described, count, out, method, max_blocks)
    packer = _host_packer("source", source, described, count, method, max_blocks)
    given = np.empty(packer.nbytes, np.uint8) if out is None else out
    packer.pack(given)
    return given if out is None else given[: packer.nbytes]


def unpack(
    packed: Any,
    datatype: TypeLike,
    target: object,
    count: int = 1,
    *,
    method: str = "auto",
    max_blocks: int | None = None,
) -> None:
    """Copy contiguous bytes to the places that a datatype describes.

    Parameters
    ----------
    packed : array of uint8, shape (n,), contiguous, n >= count * datatype.size
        Bytes in the datatype's order, in the same kinds of memory as ``out`` of :func:`pack`.
    datatype : Datatype or dtype-like
        Places of the bytes. It may not touch a byte twice.
    target : ndarray or device array
        Like ``source`` of :func:`pack`; written in place.
    count : int
        Number of consecutive items.
    method, max_blocks
        As for :func:`pack`.

    Raises
    ------
    FieldError
        If ``target`` is not an array or is read-only, or the datatype reaches beyond its memory.
        If ``target`` is a view with memory between its elements.
        If ``packed`` is too small, not contiguous, not of dtype uint8, or in memory that the GPU
        cannot read.
    DatatypeError
        If ``count`` is not an integer, or negative.
        If the items touch a byte twice.
        If the method does not exist or cannot pack the datatype.
    DeviceError
        If there is no GPU, or ``max_blocks`` is less than 1.

    Notes
    -----
    As for :func:`pack`.

    Examples
    --------
    >>> from halox.datatypes import vector
    >>> line = np.zeros(6, "i2")
    >>> unpack(np.array([1, 2, 3], "i2").view("u1"), vector(3, 1, 2, "i2"), line)
    >>> line
    array([1, 0, 2, 0, 3, 0], dtype=int16)
    """
    described = datatype if type(datatype) is Datatype else as_datatype(datatype)
    if not isinstance(target, np.ndarray) and is_device_array(target):
        unpack_device(packed, described, target, count, method, max_blocks)
        return
    packer = _host_packer("target", target, described, count, method, max_blocks)
    if packer.overlaps():
        raise overlapping(described, count)
    packer.unpack(packed)


def packing_method(
    source: object, datatype: TypeLike, count: int = 1, out: object = None
) -> Choice:
    """Return the method that :func:`pack` chooses for its arguments, and the reason.

    Parameters
    ----------
    source, datatype, count, out
        As for :func:`pack`.

    Returns
    -------
    Choice
        Named tuple of ``method`` and ``reason``; ``print`` shows both.

    Raises
    ------
    FieldError
        If ``source`` is not an array.
    DatatypeError
        If ``count`` is not an integer, or negative.

    Notes
    -----
    Not collective; touches no device.

    Examples
    --------
    >>> print(packing_method(np.zeros(6), "f8", 6))
    host: the array is in host memory
    """
    described = as_datatype(datatype)
    if not isinstance(source, np.ndarray) and is_device_array(source):
        return choose(described, count_of("count", count), to_host=isinstance(out, np.ndarray))
    if not isinstance(as_ndarray(source, "source"), np.ndarray):
        raise _no_array("source", source)
    described.items(count)  # checks the count
    return Choice("host", "the array is in host memory")


def _host_packer(
    name: str, array: object, datatype: Datatype, count: int, method: str, max_blocks: int | None
) -> HostPacker:
    if type(array) is not np.ndarray:
        array = as_ndarray(array, name)
    if not isinstance(array, np.ndarray):
        raise _no_array(name, array)
    if not isinstance(method, str) or method not in ("auto", "host"):
        known = isinstance(method, str) and method in METHODS
        raise DatatypeError(
            f"method: got {shown(method)}, "
            + ("which is for arrays on a GPU; " if known else "which does not exist; ")
            + f"a NumPy array as {name} is packed by 'host' ('auto' finds it)"
        )
    if max_blocks is not None:
        check_max_blocks(max_blocks)
    if not array.flags.forc:
        check_no_gaps(name, array.shape, array.strides, array.itemsize)
    return HostPacker(array, datatype, count)


def _no_array(name: str, array: object) -> FieldError:
    return FieldError(
        f"{name} must be a NumPy array, or a device array or another library's with __dlpack__ or "
        f"__cuda_array_interface__, got {type(array).__name__}"
    )
