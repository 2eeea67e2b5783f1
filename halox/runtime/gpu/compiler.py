"""Kernels from the package's ``.cu`` files, compiled by NVRTC at first use and cached on disk by CuPy."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from halox.errors import DeviceError
from halox.runtime.gpu.cuda import cupy

OPTIONS = ("-std=c++17",)

_IN_MEMORY = "CUPY_CACHE_IN_MEMORY"
_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


@cache
def source(name: str) -> str:
    """Return the text of a kernel file, named without ``.cu``, with its included files inserted.

    A compile cache that hashes only the kernel's text would return a stale binary after a change in an included file.
    """
    return _read(f"{name}.cu")


@cache
def _kernel_files() -> dict[str, Traversable]:
    """Kernel files of all packages, by file name; names are unique."""
    kernels = {}
    pending = [files("halox")]
    while pending:
        for entry in pending.pop().iterdir():
            if entry.is_dir():
                pending.append(entry)
            elif entry.name.endswith(".cu"):
                kernels[entry.name] = entry
    return kernels


def _read(file: str) -> str:
    text = _kernel_files()[file].read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda match: _read(match[1]), text)


def preamble(defines: tuple[tuple[str, str], ...]) -> str:
    """Return the ``#define`` lines that set a kernel's parameters."""
    return "".join(f"#define {name} {value}\n" for name, value in defines)


def _without_files(load: Callable[[], Any], error: OSError) -> Any:
    """Compile without CuPy's disk cache, after an error in reading or writing it."""
    warnings.warn(
        f"CuPy cannot keep compiled kernels on the disk ({error}), so that every process compiles them anew; set "
        "CUPY_CACHE_DIR to a folder that can be written to",
        stacklevel=4,
    )
    os.environ[_IN_MEMORY] = "1"  # for the whole process: the next kernel would fail too
    return load()


@cache
def kernel(
    name: str,
    function: str,
    device: int,
    defines: tuple[tuple[str, str], ...] = (),
    options: tuple[str, ...] = (),
) -> Any:
    """Load an ``extern "C"`` function of ``name``.cu on a device; ``defines`` are its ``#define``s.

    ``options`` are further options of NVRTC.

    Returns a CuPy function, which keeps its module loaded. Raises `DeviceError` if there is no GPU, or the kernel
    cannot be compiled or loaded. Blocks during compilation; must not be called during stream capture. Warns once if
    CuPy's cache of kernels cannot be used.
    """
    cp = cupy()

    def load() -> Any:
        with cp.cuda.Device(device):
            code = preamble(defines) + source(name)
            module = cp.RawModule(code=code, options=(*OPTIONS, *options))
            kernel = module.module.get_function(function)
            return kernel

    try:
        try:
            return load()
        except OSError as error:
            return _without_files(load, error)
    except (cp.cuda.compiler.CompileException, cp.cuda.driver.CUDADriverError) as error:
        raise DeviceError(
            f"kernel {function!r} of {name}.cu cannot be compiled or loaded on device {device}: "
            f"{error}"
        ) from error
