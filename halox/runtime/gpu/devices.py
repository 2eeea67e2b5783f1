"""Device of a rank's arrays, the host or one GPU; allocation and filling of arrays there."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from halox.errors import DeviceError, FieldError, MissingPackageError
from halox.runtime.casting import cast
from halox.runtime.dlpack import Array, DType
from halox.runtime.gpu import cuda
from halox.values import check_unmasked, shortened, shown

if TYPE_CHECKING:
    from halox.runtime.array_types import CupyArray, XArray


def choose_device(wanted: str, turn: int | None) -> int | None:
    """Choose this rank's device and make it current; return the number of the GPU, None for the host.

    ``wanted`` is "auto", "cpu" or "gpu"; "auto" means a GPU if CuPy and a GPU are available. ``turn`` is the index of
    the rank on its machine, whose GPUs are assigned round-robin. It is None if the world has one rank, which uses the
    current GPU. Raises `DeviceError` for "gpu" without a usable GPU, and for any other value.
    """
    if not isinstance(wanted, str) or wanted not in ("auto", "cpu", "gpu"):
        raise DeviceError(f'device must be "auto", "cpu" or "gpu", got {shown(wanted)}')
    if wanted == "cpu":
        return None
    reason = cuda.why_no_gpu()
    if reason is not None:
        if wanted == "gpu":
            raise DeviceError(f'device="gpu" was asked for, but {reason}; or say device="cpu"')
        return None
    if turn is None:
        return int(cuda.cupy().cuda.Device().id)
    device = turn % cuda.gpu_count()
    cuda.cupy().cuda.Device(device).use()
    return device


def array_module(device: int | None) -> ModuleType:
    """Return ``numpy`` for the host, ``cupy`` for a GPU."""
    if device is None:
        return np
    return cuda.cupy()


def linalg_module(device: int | None) -> Any:
    """Return ``scipy.sparse.linalg`` for the host, CuPy's counterpart for a GPU."""
    try:
        if device is None:
            from scipy.sparse import linalg
        else:
            from cupyx.scipy.sparse import linalg
    except ImportError as error:
        text = f"linear operators need SciPy ({error}); install it with `pip install scipy`"
        raise MissingPackageError(text) from None
    return linalg


@overload
def allocate(shape: tuple[int, ...], dtype: DType, device: None) -> Array: ...
@overload
def allocate(shape: tuple[int, ...], dtype: DType, device: int | None) -> XArray: ...
def allocate(shape: tuple[int, ...], dtype: DType, device: int | None) -> XArray:
    """Return an uninitialized array on the host or a GPU."""
    if device is None:
        return np.empty(shape, dtype)
    with cuda.cupy().cuda.Device(device):
        array: CupyArray = cuda.cupy().empty(shape, dtype)
        return array


def has_kernels(dtype: DType) -> bool:
    """Whether CuPy has kernels for a dtype: bool, or numbers in native byte order."""
    return dtype.char in "?bhilqBHILQefdFD" and dtype.isnative


def check_dtype(dtype: DType, device: int) -> None:
    """Raise `FieldError` for a dtype that this version of CuPy does not support."""
    try:
        allocate((0,), dtype, device)
    except (TypeError, ValueError) as error:
        raise FieldError(
            f"dtype {dtype} is not supported by CuPy on a GPU ({error}); use bool or numbers in the machine's byte "
            'order, view other elements as integers of their size, or make the grid with device="cpu"'
        ) from error


def as_device_array(array: object) -> CupyArray:
    """View any library's array on a GPU as a CuPy array; copy anything else to the current GPU."""
    if cuda.is_cupy_array(array):
        return array
    if cuda.is_device_array(array) and hasattr(type(array), "__dlpack__"):
        # By DLPack the array's library orders its pending work before ours.
        device_array: CupyArray = cuda.cupy().from_dlpack(array)
    else:
        device_array = cuda.cupy().asarray(array)
    return device_array


def to_host(array: object, name: str = "array") -> Array:
    """Return an array's values as a NumPy array; arrays on a GPU are copied; `FieldError` for masked arrays."""
    check_unmasked(array, name)
    if cuda.is_device_array(array):
        array = as_device_array(array)
    return np.asarray(array.get() if cuda.is_cupy_array(array) else array)


def fill_value(value: object, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Convert a value as `numpy.full` does, to an array of a dtype that broadcasts to ``shape``.

    The value is a scalar, an array on the host or a GPU, or, for a structured dtype, a tuple of field values. Raises
    `FieldError` if the dtype cannot hold the value, or if the value does not broadcast.

    Examples
    --------
    >>> fill_value(3, np.dtype("S2"), (4, 5))
    array(b'3', dtype='|S2')
    """
    given = to_host(value) if cuda.is_device_array(value, "value") else value
    try:
        array = cast(given, dtype)
    except MemoryError:
        raise
    except Exception as error:  # NumPy raises several types
        why = shortened(str(error))
        raise FieldError(
            f"value: {shown(value)} cannot be held by dtype {dtype} ({why}); give another value or dtype"
        ) from None
    try:
        np.broadcast_to(array, shape)
    except ValueError:
        remedy = "or an array of the field's own shape"
        axes = len(shape) - array.ndim
        if array.shape == shape[: array.ndim]:
            remedy += (
                f", or of one number a component numpy.reshape(value, {array.shape + (1,) * axes})"
            )
        raise FieldError(
            f"value: its shape {array.shape} does not broadcast to the field's {shape}; give one number, {remedy}"
        ) from None
    return array


def fill(array: XArray, value: Array | None) -> None:
    """Set all elements of a contiguous array to a value of its dtype; None zeroes all bytes, including padding."""
    if isinstance(array, np.ndarray):
        if value is None:
            array.reshape(-1).view(np.uint8).fill(0)
        else:
            array[...] = value
    elif has_kernels(array.dtype) and (value is None or value.ndim == 0):
        array[...] = 0 if value is None else value[()]
    elif value is None:  # CuPy has no kernels for such elements
        array.data.memset_async(0, array.nbytes)
    else:
        array.set(np.ascontiguousarray(np.broadcast_to(value, array.shape)))
