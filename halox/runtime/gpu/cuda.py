"""CuPy, imported on first use, and the GPUs that it finds, or the reason why no GPU is usable."""

from __future__ import annotations

import os
import sys
import warnings
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from halox.errors import DeviceError
from halox.runtime import dlpack

if TYPE_CHECKING:
    from halox.runtime.array_types import CupyArray

_cupy_types: set[type] = set()  # types of CuPy arrays that `is_cupy_array` has seen
INSTALL_BINDINGS = (
    "install NVIDIA's bindings with `pip install 'cuda-bindings==13.*'` (12.* for CUDA 12)"
)
_INSTALL = (
    "install it with `pip install cupy-cuda13x 'cuda-bindings==13.*'` (driver 580 or newer) or "
    "`pip install cupy-cuda12x 'cuda-bindings==12.*'`"
)


@cache
def why_no_gpu() -> str | None:
    """Return why this process cannot use a GPU, None if it can; creates no CUDA context.

    The text is one short sentence without a full stop: the missing part, and the remedy if there is one. The first
    result is cached. Warns if only NVIDIA's bindings are missing.
    """
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            return f"CuPy cannot be imported ({error}); {_INSTALL}"
        return f"CuPy is not installed; {_INSTALL}"
    except Exception as error:  # CuPy passes on any error of its shared libraries
        return f"CuPy cannot be imported ({str(error).strip().splitlines()[0]}); {_INSTALL}"
    runtime = cupy.cuda.runtime
    if runtime.is_hip:
        return f"this CuPy is built for ROCm, not for CUDA; {_INSTALL}"
    driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if driver == 0:
        return "no NVIDIA driver is loaded"
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return _why_not_counted(error, driver, needed)
    if not count:
        return _no_device()
    try:
        import cuda.bindings.driver  # noqa: F401 - tests the import
    except ImportError as error:
        reason = f"cuda.bindings cannot be imported ({error}); {INSTALL_BINDINGS}"
        # Fields with `device="auto"` are then on the host although there is a GPU, so warn.
        warnings.warn(f"halox does not use the GPU: {reason}", stacklevel=2)
        return reason
    return None


def _why_not_counted(error: object, driver: int, needed: int) -> str:
    if "InsufficientDriver" in str(error):
        return (
            f"the NVIDIA driver supports CUDA {version_text(driver)}, and this CuPy needs CUDA "
            f"{version_text(needed)}; update the driver or install the CuPy of an older CUDA "
            "(`pip install cupy-cuda12x 'cuda-bindings==12.*'`)"
        )
    if "NoDevice" in str(error):
        return _no_device()
    return f"the GPUs cannot be counted ({error})"


def _no_device() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    return f"the NVIDIA driver shows no GPU{hidden}"


def version_text(number: int) -> str:
    """Return the integer version number of CUDA as text."""
    return f"{number // 1000}.{number % 1000 // 10}"


def cupy() -> ModuleType:
    """Return the module CuPy; raise `DeviceError` if no GPU is usable. Creates no CUDA context."""
    reason = why_no_gpu()
    if reason is not None:
        raise DeviceError(f"no GPU can be used: {reason}")
    import cupy as module

    cupy_: ModuleType = module
    return cupy_


def gpu_count() -> int:
    """Return the number of GPUs that this process sees, 0 if :func:`why_no_gpu` returns a reason."""
    return 0 if why_no_gpu() is not None else int(cupy().cuda.runtime.getDeviceCount())


def is_cupy_array(x: object) -> TypeGuard[CupyArray]:
    """Return whether an object is a CuPy array; does not import CuPy."""
    # Test known types first, since every halox call runs this function.
    if type(x) in _cupy_types:
        return True
    ndarray = getattr(sys.modules.get("cupy"), "ndarray", None)
    if ndarray is None or not isinstance(x, ndarray):
        return False
    _cupy_types.add(type(x))
    return True


def is_device_array(x: object, name: str = "array") -> bool:
    """Return whether an object is an array in GPU memory, of CuPy or any other library.

    Raises `FieldError` if its DLPack device cannot be found, for example because it is on several devices.
    """
    if type(x) is np.ndarray:
        return False
    if type(x) in _cupy_types or is_cupy_array(x):
        return True
    device = dlpack.device_of(x, name)
    if device is not None and device[0] in dlpack.ON_GPU:
        return True
    return hasattr(x, "__cuda_array_interface__")


@cache
def multiprocessors(device: int) -> int:
    """Return the number of multiprocessors of a GPU."""
    runtime = cupy().cuda.runtime
    return int(runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, device))
