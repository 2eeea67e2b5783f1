"""Arrays that expose their memory by DLPack, such as PyTorch's and JAX's, on the host and on a GPU.

This module reads DLPack capsules directly. ``numpy.from_dlpack`` and ``cupy.from_dlpack`` reject element types that
NumPy does not have, such as bfloat16, and the function of CuPy ignores the read-only flag. The capsule is released at
once, since the array itself keeps its memory alive.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from halox.datatypes.boxes import contiguous_strides
from halox.errors import FieldError

Array: TypeAlias = np.ndarray[Any, Any]
DType: TypeAlias = np.dtype[Any]

ON_HOST = (1, 3)
"""kDLCPU and kDLCUDAHost (page-locked memory)."""

ON_GPU = (2, 13)
"""kDLCUDA and kDLCUDAManaged."""

MANAGED = 13
"""kDLCUDAManaged; the device number of managed memory has no meaning."""

_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_NEWEST = (1, 0)  # version of the structs below; later minor versions only add constants
_READ_ONLY = 1


class _Tensor(ctypes.Structure):
    """DLTensor; an unversioned DLManagedTensor begins with the same fields."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class ArrayMemory(NamedTuple):
    """Memory of an array, as its DLPack capsule describes it: address of element [0, ..., 0], shape, strides in bytes.

    ``dtype`` is opaque bytes (``V2`` for bfloat16) if NumPy has no such type. ``writable`` is also False if the array's
    library is too old to report whether the array is writable.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    writable: bool


def device_of(array: Any, name: str = "array") -> tuple[int, int] | None:
    """Return kind and number of an array's device, None without DLPack; raise `FieldError` if the query fails."""
    if not hasattr(type(array), "__dlpack_device__"):
        return None
    try:
        kind, number = array.__dlpack_device__()
        return int(kind), int(number)
    except Exception as error:  # each library raises other types
        raise refused(name, error) from error


def memory_of(array: Any, name: str = "array", stream: int | None = None) -> ArrayMemory:
    """Return the memory of an array with ``__dlpack__``; ``name`` is its name in errors.

    ``stream`` is the address of a CUDA stream on the array's GPU; 0 is the legacy default stream. The library then
    orders later work of this stream after its pending work on the array. Without ``stream`` some libraries block the
    host instead. Raises `FieldError` if the library does not expose the memory, or if elements are not a whole number
    of bytes.
    """
    # DLPack's number of the legacy stream is 1.
    ordered = {} if stream is None else {"stream": stream or 1}
    try:
        try:
            capsule = array.__dlpack__(**ordered, max_version=_NEWEST, copy=False)
        except TypeError:  # a library older than DLPack 1.0
            capsule = array.__dlpack__(**ordered)
    except Exception as error:
        raise refused(name, error) from error
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if versioned.major > _NEWEST[0]:
            raise FieldError(
                f"{name}: shows its memory by DLPack {versioned.major}.{versioned.minor}, and halox "
                f"reads version {_NEWEST[0]}; make it a CuPy or NumPy array first"
            )
        return _read(versioned.tensor, name, writable=not versioned.flags & _READ_ONLY)
    if not _is_valid(capsule, b"dltensor"):
        raise FieldError(
            f"{name}: its __dlpack__ gives {type(capsule).__qualname__}, not a DLPack capsule that is still unused"
        )
    return _read(_Tensor.from_address(_pointer(capsule, b"dltensor")), name, writable=False)


def _read(tensor: _Tensor, name: str, *, writable: bool) -> ArrayMemory:
    """Copy the fields of a capsule's struct, which is freed with the capsule."""
    dtype = _dtype(tensor, name)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = contiguous_strides(shape, dtype.itemsize)
    if tensor.strides:
        strides = tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim])
    return ArrayMemory(tensor.data + tensor.byte_offset, shape, strides, dtype, writable)


def _dtype(tensor: _Tensor, name: str) -> DType:
    nbytes, rest = divmod(tensor.bits * tensor.lanes, 8)
    if rest:
        raise FieldError(
            f"{name}: has elements of {tensor.bits * tensor.lanes} bits; only whole bytes are moved"
        )
    if tensor.lanes == 1 and tensor.code in _KINDS:
        try:
            return np.dtype(f"{_KINDS[tensor.code]}{nbytes}")
        except TypeError:  # NumPy has no such length
            pass
    return np.dtype(f"V{nbytes}")


def refused(name: str, error: Exception) -> FieldError:
    """Return the error for an array that raises when asked for its memory."""
    return FieldError(f"{name}: {type(error).__name__} when asked for its memory: {error}")


_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
