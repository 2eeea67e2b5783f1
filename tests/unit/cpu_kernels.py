"""Kernels compiled by g++ behind ``cpu_shim.h``, for tests without a GPU."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from halox.engine.compiler import preamble, source
from halox.engine.packers.strided_plan import THREADS, Plan

SHIM = Path(__file__).with_name("cpu_shim.h")

# Misaligned or null accesses, overflows and bad shifts end the process loudly.
FLAGS = [
    *("-std=c++17", "-O0", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"),
    *("-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"),
    *("-fsanitize=undefined", "-fno-sanitize-recover=all"),
]


@cache
def compiled(name: str, defines: tuple[tuple[str, str], ...] = (), extra: str = "") -> ctypes.CDLL:
    """A kernel file as a shared library with a function ``run`` beside the kernel."""
    folder = Path(mkdtemp(prefix="halox-kernel-"))
    text = f"""{preamble(defines)}
#include "{SHIM}"
{source(name)}
extern "C" void run(unsigned grid, unsigned block, int backwards, const void* regions,
                    const unsigned* chunk_region, unsigned chunks, unsigned chunk_words)
{{
    launch_on_cpu(grid, block, backwards != 0, {name}, (const Region*)regions, chunk_region, chunks,
                  chunk_words);
}}
{extra}
"""
    (folder / "kernel.cpp").write_text(text)
    command = ["g++", *FLAGS, str(folder / "kernel.cpp"), "-o", str(folder / "kernel.so")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if result.returncode:
        raise AssertionError(f"{' '.join(command)}\n{result.stderr}")
    return ctypes.CDLL(str(folder / "kernel.so"))


def run(library: ctypes.CDLL, planned: Plan, *, backwards: bool = False) -> None:
    """Do on the CPU what a launch of a plan does on a GPU, from the same table."""
    if not planned.chunks:
        return
    # The kernel's rows are 16-byte aligned, as device memory is.
    memory = np.zeros(planned.table.nbytes + 16, np.uint8)
    table = memory[-memory.ctypes.data % 16 :][: planned.table.nbytes]
    table[:] = planned.table
    call: Callable[..., None] = library.run
    call(
        ctypes.c_uint(planned.blocks),
        ctypes.c_uint(THREADS),
        ctypes.c_int(backwards),
        ctypes.c_void_p(table.ctypes.data),
        ctypes.c_void_p(table.ctypes.data + planned.chunk_region_offset),
        ctypes.c_uint(planned.chunks),
        ctypes.c_uint(planned.chunk_words),
    )


def before_a_forbidden_page(nbytes: int) -> np.ndarray:
    """Bytes that end where a page begins whose every use ends the process."""
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    array = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(array.ctypes.data + pages), mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return array[pages - nbytes : pages]


def aligned(nbytes: int, offset: int = 0) -> np.ndarray:
    """Zeroed bytes whose address is ``offset`` more than a multiple of 256, like a GPU's."""
    memory = np.zeros(nbytes + 512, np.uint8)
    start = -memory.ctypes.data % 256 + offset
    return memory[start : start + nbytes]
