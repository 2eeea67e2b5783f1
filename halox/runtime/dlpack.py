"""DLPack, by which libraries such as PyTorch and JAX expose their arrays: devices, and whether an array is writable.

NumPy and CuPy read the arrays, with ``from_dlpack``. CuPy ignores the read-only flag, so `is_writable` reads it.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np

from halox.errors import FieldError

Array: TypeAlias = np.ndarray[Any, Any]
DType: TypeAlias = np.dtype[Any]

ON_HOST = (1, 3)
"""kDLCPU and kDLCUDAHost (page-locked memory)."""

ON_GPU = (2, 13)
"""kDLCUDA and kDLCUDAManaged."""

MANAGED = 13
"""kDLCUDAManaged; the device number of managed memory has no meaning."""

_VERSIONED = b"dltensor_versioned"
_READ_ONLY = 1
_FLAGS = 24
"""Position of the flags in DLManagedTensorVersioned, behind the version, the context and the deleter."""


def device_of(array: Any, name: str = "array") -> tuple[int, int] | None:
    """Return kind and number of an array's device, None without DLPack; raise `FieldError` if the query fails."""
    if not hasattr(type(array), "__dlpack_device__"):
        return None
    try:
        kind, number = array.__dlpack_device__()
        return int(kind), int(number)
    except Exception as error:  # each library raises other types
        raise refused(name, error) from error


def export(array: Any, name: str, **options: int) -> object:
    """Return the capsule of an array with ``__dlpack__``; raise `FieldError` if its library refuses.

    With ``stream=``, the library orders later work of this stream of the array's GPU after its work on the array.
    """
    try:
        try:
            return array.__dlpack__(**options, max_version=(1, 0))
        except TypeError:  # a library older than DLPack 1.0
            return array.__dlpack__(**options)
    except Exception as error:
        raise refused(name, error) from error


def is_writable(array: object, name: str) -> bool:
    """Whether an array with ``__dlpack__`` may be written; False if its library is too old to say so."""
    capsule = export(array, name)
    if not _is_valid(capsule, _VERSIONED):
        return False
    flags = ctypes.c_uint64.from_address(_pointer(capsule, _VERSIONED) + _FLAGS)
    return not flags.value & _READ_ONLY


def refused(name: str, error: Exception) -> FieldError:
    """Return the error for an array that raises when asked for its memory."""
    return FieldError(f"{name}: {type(error).__name__} when asked for its memory: {error}")


_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
