"""The benchmarks' own kernels, loaded from the ``.cu`` files beside this module."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from halox.runtime.gpu.compiler import OPTIONS, preamble
from halox.runtime.gpu.cuda import cupy
from halox_bench.common import reference


@cache
def source(name: str) -> str:
    """Return the text of a kernel file, named without its ``.cu``."""
    return files(__package__).joinpath(f"{name}.cu").read_text(encoding="utf-8")


def defines(name: str, **values: int) -> tuple[tuple[str, str], ...]:
    """Return the ``#define`` names and values of a kernel file."""
    if name == "bench":
        values |= {"SHIFT": reference.SHIFT}
        return (
            ("MULTIPLIER", f"{reference.MULTIPLIER}ull"),
            *((key, str(value)) for key, value in values.items()),
        )
    return tuple((key, str(value)) for key, value in sorted(values.items()))


@cache
def kernel(
    name: str, function: str, device: int, settings: tuple[tuple[str, str], ...] = ()
) -> Any:
    """Load a function of a kernel file on a device.

    Notes
    -----
    Not collective. Blocks while it compiles.
    """
    cp = cupy()
    with cp.cuda.Device(device):
        module = cp.RawModule(code=preamble(settings) + source(name), options=OPTIONS)
        return module.module.get_function(function)
