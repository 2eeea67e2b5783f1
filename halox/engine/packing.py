"""Pack and unpack what a datatype describes, wherever the array lives."""

from __future__ import annotations

from typing import Any

import numpy as np

from halox.datatypes import Datatype, TypeLike, as_datatype
from halox.engine.packers.host import HostPacker
from halox.errors import FieldError


def pack(source: Any, datatype: TypeLike, count: int = 1, out: Any = None) -> Any:
    """Copy the bytes that a datatype describes into contiguous memory.

    Parameters
    ----------
    source : ndarray or device array
        NumPy array, or anything with ``__cuda_array_interface__`` such as a CuPy array.
        Displacements count from its first element.
    datatype : Datatype or dtype-like
        What to copy.
    count : int
        Number of consecutive items.
    out : array of uint8, shape (n,), contiguous, optional
        Receives the bytes, in the same kind of memory as ``source``; made if not given.

    Returns
    -------
    array of uint8, shape (count * datatype.size,)
        The packed bytes: a new array, or the first bytes of ``out``.

    Raises
    ------
    FieldError
        If ``source`` is neither kind of array, or the datatype reaches beyond its memory.
        If ``out`` is too small, not contiguous, read-only, or not of bytes.
    DatatypeError
        If ``count`` is not an integer, or negative.

    Notes
    -----
    Not collective. On host memory it blocks; on a device it is ordered with the current stream.

    Examples
    --------
    >>> from halox.datatypes import vector
    >>> pack(np.arange(6, dtype="i2"), vector(3, 1, 2, "i2")).view("i2")
    array([0, 2, 4], dtype=int16)
    """
    described = as_datatype(datatype)
    if _on_device(source):
        from halox.engine.packers.strided import pack_device

        return pack_device(source, described, count, out)
    packer = _host_packer("source", source, described, count)
    if out is None:
        out = np.empty(packer.nbytes, np.uint8)
    packer.pack(out)
    return out[: packer.nbytes]


def unpack(packed: Any, datatype: TypeLike, target: Any, count: int = 1) -> None:
    """Copy contiguous bytes to where a datatype says.

    Parameters
    ----------
    packed : array of uint8, shape (n,), contiguous, n >= count * datatype.size
        Bytes in the datatype's order, in the same kind of memory as ``target``.
    datatype : Datatype or dtype-like
        Where the bytes go.
    target : ndarray or device array
        NumPy array, or anything with ``__cuda_array_interface__`` such as a CuPy array; written in
        place. Displacements count from its first element.
    count : int
        Number of consecutive items.

    Raises
    ------
    FieldError
        If ``target`` is neither kind of array, or the datatype reaches beyond its memory, or it is
        read-only.
        If ``packed`` is too small, not contiguous, or not of bytes.
    DatatypeError
        If ``count`` is not an integer, or negative.

    Notes
    -----
    Not collective. On host memory it blocks; on a device it is ordered with the current stream.
    Where a datatype touches a byte twice, which MPI forbids here, either value may stay.

    Examples
    --------
    >>> from halox.datatypes import vector
    >>> line = np.zeros(6, "i2")
    >>> unpack(np.array([1, 2, 3], "i2").view("u1"), vector(3, 1, 2, "i2"), line)
    >>> line
    array([1, 0, 2, 0, 3, 0], dtype=int16)
    """
    described = as_datatype(datatype)
    if _on_device(target):
        from halox.engine.packers.strided import unpack_device

        unpack_device(packed, described, target, count)
        return
    _host_packer("target", target, described, count).unpack(packed)


def _host_packer(name: str, array: Any, datatype: Datatype, count: int) -> HostPacker:
    if not isinstance(array, np.ndarray):
        raise FieldError(
            f"{name} must be a NumPy array, or a device array with __cuda_array_interface__, "
            f"got {type(array).__name__}"
        )
    return HostPacker(array, datatype, count)


def _on_device(array: Any) -> bool:
    return hasattr(array, "__cuda_array_interface__")
