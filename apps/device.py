"""The GPU side of a run: its stream, and kernels compiled from the ``.cu`` file of a mini-app."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.resources import files
from typing import Any

import halox


def kernels(
    xp: Any, package: str, name: str, functions: tuple[str, ...], *options: str
) -> list[Any]:
    """Compile a file of kernels and return its functions.

    Parameters
    ----------
    xp : module
        CuPy, ``grid.xp``.
    package, name : str
        Package with the file, and its name without ``.cu``.
    functions : tuple of str
        Names in the file.
    *options : str
        Compiler options, added to the language standard.
    """
    source = files(package).joinpath(f"{name}.cu").read_text()
    module = xp.RawModule(code=source, options=("-std=c++17", *options))
    return [module.get_function(function) for function in functions]


def run_stream(grid: halox.Grid, stack: ExitStack, *, graph: bool) -> Any:
    """Create a stream and make it current until ``stack`` closes; None if there is no GPU.

    Raises
    ------
    halox.errors.DeviceError
        If ``graph`` asks for CUDA graphs, and the grid uses NumPy arrays.
    """
    if grid.device == "gpu":
        return stack.enter_context(grid.xp.cuda.Stream(non_blocking=True))
    if graph:
        raise halox.errors.DeviceError(
            "--graph needs GPUs, and this run uses NumPy arrays; leave it out, or see `halox info` "
            "for the reason why no GPU is used"
        )
    return None
