"""CUDA driver API through NVIDIA's ``cuda.bindings``, for the few functions that CuPy does not offer.

The bindings are imported on first use; the rest of halox works without a driver. Launches and copies through the
bindings take less host time than through ctypes, except the batched copy (:mod:`halox.runtime.gpu.copies`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from halox.errors import DeviceError
from halox.runtime.gpu.cuda import INSTALL_BINDINGS, cupy, version_text

NOT_INITIALIZED, INVALID_CONTEXT = 3, 201

_REMEDY = "if an earlier CUDA call of this process failed, this is its consequence"


@cache
def bindings() -> ModuleType:
    """Return ``cuda.bindings.driver``; `DeviceError` if it or the driver is missing. Creates no context."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            f"cuda.bindings cannot be imported ({error}); {INSTALL_BINDINGS}"
        ) from error
    try:
        driver.cuDriverGetVersion()
    except RuntimeError as error:
        raise DeviceError(
            f"the NVIDIA driver's library cannot be loaded ({error}); install the driver, or where "
            "this runs in a container start it with access to the GPUs"
        ) from error
    module: ModuleType = driver
    return module


def call(function: Callable[..., Any], *arguments: Any, device: int | None = None) -> Any:
    """Call a function of the bindings, and return its results without the error code, as a list.

    A thread without a CUDA context gets a context on ``device``, or by default on the GPU that CUDA chooses. Raises
    `DeviceError` if the driver lacks the function or returns an error.
    """
    try:
        code, *results = function(*arguments)
        if code in (NOT_INITIALIZED, INVALID_CONTEXT):
            make_context(device)
            code, *results = function(*arguments)
        if code:
            raise failure(function, code)
    except DeviceError:
        raise
    except RuntimeError as error:
        version = version_text(bindings().cuDriverGetVersion()[1])
        raise DeviceError(
            f"the NVIDIA driver has no {function.__name__}: it supports CUDA {version}; update the driver"
        ) from error
    except (KeyError, ValueError) as error:  # an error code that the bindings do not know
        raise DeviceError(f"{function.__name__}: CUDA error {error}; {_REMEDY}") from error
    return results


def make_context(device: int | None = None) -> None:
    """Create the calling thread's context: the driver API, unlike the runtime API, does not create it implicitly."""
    runtime = cupy().cuda.runtime
    if device is not None:
        runtime.setDevice(device)
    runtime.free(0)


def failure(function: Callable[..., object], code: int) -> DeviceError:
    """Return the `DeviceError` for an error code of a driver function."""
    name = bindings().CUresult(code).name
    return DeviceError(f"{function.__name__}: {name}; {_REMEDY}")
