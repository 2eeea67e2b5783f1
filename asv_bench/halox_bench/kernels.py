"""The benchmarks' own kernels, loaded from the ``.cu`` files beside this module."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from halox.runtime.gpu.compiler import OPTIONS, preamble
from halox.runtime.gpu.cuda import cupy as cupy
from halox.runtime.gpu.cuda import multiprocessors as multiprocessors
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.memory import pinned as pinned

Settings = tuple[tuple[str, str], ...]


@cache
def source(name: str, settings: Settings = ()) -> str:
    """Return the text of a kernel file, named without its ``.cu``, behind the ``#define`` lines of its settings."""
    text = files(__package__).joinpath(f"{name}.cu").read_text(encoding="utf-8")
    return preamble(settings) + text


def settings_of(**values: int) -> Settings:
    return tuple((key, str(value)) for key, value in sorted(values.items()))


@cache
def function(file: str, name: str, device: int, settings: Settings = ()) -> Any:
    with cupy().cuda.Device(device):
        module = cupy().RawModule(code=source(file, settings), options=OPTIONS)
        return module.module.get_function(name)


def prepared(
    file: str,
    name: str,
    grid: int,
    block: int,
    args: Sequence[Any],
    device: int,
    settings: Settings = (),
) -> PreparedLaunch:
    return PreparedLaunch(function(file, name, device, settings), grid, block, args, device=device)


DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses


def copy(source: int, target: int, nbytes: int, stream: int) -> None:
    cupy().cuda.runtime.memcpyAsync(target, source, nbytes, DEFAULT, stream)


def packed_buffer(nbytes: int, *, host: bool) -> tuple[Any, int, Any]:
    """Return memory for packed bytes that kernels reach, its address on the GPU, and its owner.

    On the host it is page-locked and mapped, a NumPy array.
    """
    if host:
        page = pinned(nbytes)
        return page.array, page.device_pointer, page
    memory = cupy().empty(nbytes, "u1")
    return memory, int(memory.data.ptr), memory
