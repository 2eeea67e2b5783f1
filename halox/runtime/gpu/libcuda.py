"""The CUDA driver library itself, for the few functions that CuPy does not offer.

Loaded on first use: without a driver everything else works.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from halox.errors import DeviceError
from halox.runtime.gpu.cuda import cupy

LIBRARY = "libcuda.so.1"

INVALID_VALUE = 1
NOT_INITIALIZED = 3
INVALID_CONTEXT = 201
NOT_FOUND = 500

_ADDRESS = ctypes.c_uint64  # CUdeviceptr, an integer for C as well
_SIZE = ctypes.c_size_t
_POINTER = ctypes.c_void_p

_BATCH = (_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE)

# Argument types, and the CUDA version of the first driver that has the function where that is
# newer than any driver CuPy runs on.
_SIGNATURES: dict[str, tuple[tuple[Any, ...], str]] = {
    "cuDriverGetVersion": ((_POINTER,), ""),
    "cuGetErrorName": ((ctypes.c_int, _POINTER), ""),
    "cuLaunchKernelEx": ((_POINTER, _POINTER, _POINTER, _POINTER), "11.8"),
    "cuMemGetAddressRange_v2": ((_POINTER, _POINTER, _ADDRESS), ""),
    "cuMemcpy2DAsync_v2": ((_POINTER, _POINTER), ""),
    "cuMemcpy3DAsync_v2": ((_POINTER, _POINTER), ""),
    "cuMemcpyAsync": ((_ADDRESS, _ADDRESS, _SIZE, _POINTER), ""),
    # The first form has an argument for the index of the copy that failed; the second has not.
    "cuMemcpyBatchAsync": ((*_BATCH, _POINTER, _POINTER), "12.8"),
    "cuMemcpyBatchAsync_v2": ((*_BATCH, _POINTER), "13.0"),
    "cuPointerGetAttribute": ((_POINTER, ctypes.c_int, _ADDRESS), ""),
    "cuPointerGetAttributes": ((ctypes.c_uint, _POINTER, _POINTER, _ADDRESS), ""),
    "cuStreamIsCapturing": ((_POINTER, _POINTER), ""),
}

_REMEDIES = {
    INVALID_VALUE: "check that every address lies in memory that this GPU can reach, and that "
    "pitches are at least as wide as what is copied",
    2: "free device memory, for CuPy's share with cupy.get_default_memory_pool().free_all_blocks()",
    101: "check the number of the GPU against cupy.cuda.runtime.getDeviceCount()",
    INVALID_CONTEXT: "make the GPU current first, as cupy.cuda.Device(n).use() does",
    400: "check that the stream still exists and belongs to the GPU that is current",
    700: "an earlier kernel or copy touched memory that is not there, and nothing more can be done "
    "in this process; compute-sanitizer finds which",
    900: "end the stream's capture first",
}
_OTHERWISE = "if an earlier CUDA call of this process failed, this is its consequence"


@cache
def library() -> ctypes.CDLL:
    """Load the driver library.

    Raises
    ------
    DeviceError
        If there is none.

    Notes
    -----
    Not collective. Creates no CUDA context.
    """
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DeviceError(
            f"the NVIDIA driver's library cannot be loaded ({error}); install the driver, or where "
            "this runs in a container start it with access to the GPUs"
        ) from error


@cache
def function(name: str) -> Any:
    """Return a function of the driver library, with its argument types.

    Parameters
    ----------
    name : str
        The name the library exports, such as ``"cuMemcpy2DAsync_v2"``.

    Raises
    ------
    DeviceError
        If there is no driver, or it is too old to have the function; with the version needed.
    """
    arguments, since = _SIGNATURES[name]
    try:
        found = library()[name]
    except AttributeError as error:
        needed = f"needs CUDA {since}" if since else "is expected of every driver"
        raise DeviceError(
            f"the NVIDIA driver has no {name}: it supports CUDA {_version()}, and the function "
            f"{needed}; update the driver"
        ) from error
    found.argtypes = arguments
    found.restype = ctypes.c_int
    return found


def has(name: str) -> bool:
    """Whether the driver library has a function.

    Raises
    ------
    DeviceError
        If there is no driver.
    """
    return hasattr(library(), name)


def call(called: Any, *arguments: Any, device: int | None = None) -> None:
    """Call a function of the driver, with a context even in a thread that has none yet.

    Parameters
    ----------
    called : ctypes function
        From :func:`function`.
    *arguments
        Its arguments.
    device : int, optional
        GPU to make current in a thread that has not used CUDA; by default the one CUDA chooses.

    Raises
    ------
    DeviceError
        If the driver returns an error; names the function, the error and a remedy.
    """
    code = called(*arguments)
    if code in (NOT_INITIALIZED, INVALID_CONTEXT):
        make_context(device)
        code = called(*arguments)
    if code:
        raise failure(called.__name__, code)


def make_context(device: int | None = None) -> None:
    """Make the calling thread's context: only CUDA's runtime, which CuPy uses, does so unasked."""
    runtime = cupy().cuda.runtime
    if device is not None:
        runtime.setDevice(device)
    runtime.free(0)


def failure(name: str, code: int) -> DeviceError:
    """Return the error for what a function of the driver returned."""
    return DeviceError(f"{name}: {error_name(code)}; {_REMEDIES.get(code, _OTHERWISE)}")


def error_name(code: int) -> str:
    """Return the driver's name of an error."""
    text = ctypes.c_char_p()
    if function("cuGetErrorName")(code, ctypes.byref(text)) or text.value is None:
        return f"CUDA error {code}"
    return text.value.decode()


def _version() -> str:
    version = ctypes.c_int()
    function("cuDriverGetVersion")(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"
