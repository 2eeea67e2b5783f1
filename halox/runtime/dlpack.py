"""Arrays that show their memory by DLPack: PyTorch's, JAX's and many others', on the host and on a GPU.

Read here rather than by ``numpy.from_dlpack`` or ``cupy.from_dlpack``: those refuse element types
that NumPy does not have, such as bfloat16, and CuPy's forgets that an array may not be written to.
The capsule is released at once, as the array itself keeps its memory alive.
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
"""kDLCPU and kDLCUDAHost, which is page-locked."""

ON_GPU = (2, 13)
"""kDLCUDA and kDLCUDAManaged."""

MANAGED = 13
"""kDLCUDAManaged, whose device number says nothing."""

_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_NEWEST = (1, 0)  # the version whose structs stand below; later minor ones only add to its lists
_READ_ONLY = 1


class _Tensor(ctypes.Structure):
    """DLTensor, which is also what an unversioned DLManagedTensor begins with."""

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


class Shown(NamedTuple):
    """Description of an array by a capsule: the address of element [0, ..., 0], and strides in bytes.

    ``dtype`` is opaque bytes (``V2`` for bfloat16) where NumPy has no such type; ``writable`` is False also where the
    array's library is too old to say.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    writable: bool


def device_of(array: Any, name: str = "array") -> tuple[int, int] | None:
    """Return kind and number of an array's device, None without DLPack; raise `FieldError` if it has no one device."""
    if not hasattr(type(array), "__dlpack_device__"):
        return None
    try:
        kind, number = array.__dlpack_device__()
        return int(kind), int(number)
    except Exception as error:  # each library has its own
        raise refused(name, error) from error


def shown(array: Any, name: str = "array", stream: int | None = None) -> Shown:
    """Describe an array with ``__dlpack__``; ``name`` is its name in errors.

    ``stream`` is the address of a CUDA stream of the array's GPU, 0 for the legacy one, whose later work follows what
    the array's library has under way on the array; without it some libraries wait on the host. Raises `FieldError` if
    the library does not show the memory, or the elements are not of whole bytes.
    """
    # DLPack's number of the legacy stream is 1.
    ordered = {} if stream is None else {"stream": stream or 1}
    try:
        try:
            capsule = array.__dlpack__(**ordered, max_version=_NEWEST, copy=False)
        except TypeError:  # a library of before DLPack 1.0
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


def _read(tensor: _Tensor, name: str, *, writable: bool) -> Shown:
    """Copy what is in a capsule's struct, which goes with the capsule."""
    dtype = _dtype(tensor, name)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = contiguous_strides(shape, dtype.itemsize)
    if tensor.strides:
        strides = tuple(step * dtype.itemsize for step in tensor.strides[: tensor.ndim])
    return Shown(tensor.data + tensor.byte_offset, shape, strides, dtype, writable)


def _dtype(tensor: _Tensor, name: str) -> DType:
    nbytes, rest = divmod(tensor.bits * tensor.lanes, 8)
    if rest:
        raise FieldError(
            f"{name}: has elements of {tensor.bits * tensor.lanes} bits; only whole bytes are moved"
        )
    if tensor.lanes == 1 and tensor.code in _KINDS:
        try:
            return np.dtype(f"{_KINDS[tensor.code]}{nbytes}")
        except TypeError:  # a length that NumPy does not have
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
