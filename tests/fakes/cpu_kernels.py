"""Compiles kernels with g++ and ``cpu_shim.h``, for tests without a GPU."""

from __future__ import annotations

import ctypes
import mmap
import platform
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory

import numpy as np

from halox.packing.strided_plan import BASES, StridedPlan
from halox.runtime.gpu.compiler import preamble, source
from halox.runtime.gpu.marks import Mark
from tests.fakes.kept import digest, folder, made_once

HERE = Path(__file__).parent
SHIM = "cpu_shim.h"
STANDARD = HERE / "cpu_standard.h"

GUARD = 0xA5

# Misaligned or null accesses, overflows and bad shifts print a message and end the process.
FLAGS = [
    *("-std=c++17", "-O0", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"),
    *("-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"),
    *("-fsanitize=undefined", "-fno-sanitize-recover=all"),
    # Else the libraries of a process would share the memory of inline functions, in the size of the first library.
    "-fno-gnu-unique",
]


def compiled_once(text: str, *flags: str) -> Path:
    """Compile a C++ text to a shared library, once for all processes that share the folder."""
    name = digest(text, *_surroundings(), *flags)

    def make(library: Path) -> None:
        code = folder() / f"{name}.cpp"
        code.write_text(text)
        wanted = '#include "cpu_' in text
        headers = ("-include", str(_standard_headers(*flags))) if wanted else ()
        _compile(*headers, f"-I{HERE}", *flags, str(code), "-o", str(library))

    return made_once(f"{name}.so", make)


def _standard_headers(*flags: str) -> Path:
    """Precompile the standard headers for these flags."""
    flags = tuple(flag for flag in flags if not flag.startswith(("-W", "-l", "-shared")))
    header = folder() / f"{digest(*_surroundings(), *flags)}.h"

    def make(compiled: Path) -> None:
        header.write_text(STANDARD.read_text())
        _compile(*flags, "-x", "c++-header", str(header), "-o", str(compiled))

    made_once(f"{header.name}.gch", make)
    return header


@cache
def _surroundings() -> tuple[str, ...]:
    """Return a library's dependencies besides its text: the local headers, the compiler version and the machine."""
    headers = [path.read_text() for path in sorted(HERE.glob("*.h"))]
    said = subprocess.run(["g++", "--version"], capture_output=True, text=True, timeout=500)
    return (*headers, said.stdout, platform.machine())


def _compile(*words: str) -> None:
    result = subprocess.run(["g++", *words], capture_output=True, text=True, timeout=500)
    if result.returncode:
        raise AssertionError(f"g++ {' '.join(words)}\n{result.stderr}")


def own_copy(library: Path) -> ctypes.CDLL:
    """Load a copy of a library, with separate global variables."""
    with TemporaryDirectory(dir=folder()) as place:
        return ctypes.CDLL(copy(library, place))


def shared_library(text: str, *flags: str) -> ctypes.CDLL:
    """Compile a kernel's text and load it; ``flags`` follow `FLAGS`."""
    return ctypes.CDLL(str(compiled_once(text, *FLAGS, *flags)))


@cache
def compiled(name: str, defines: tuple[tuple[str, str], ...] = (), extra: str = "") -> ctypes.CDLL:
    """Compile a kernel file to a library with a function ``run``, which launches the kernel."""
    launch = "launch_on_cpu(grid, block, backwards != 0"
    if dict(defines).get("TILED"):
        launch = "launch_with_barriers(grid, block, backwards != 0"
    marked = dict(defines).get("MARKED")
    more, given = (", const Mark* mark", ", *mark") if marked else ("", "")
    text = f"""{preamble(defines)}
#include "{SHIM}"
{source(name)}
extern "C" void run(unsigned grid, unsigned block, int backwards, const void* bases, const void* table,
                    unsigned regions, unsigned chunks, unsigned chunk_words{more})
{{
    {launch}, {name}, *(const Bases*)bases, *(const Table*)table, regions, chunks, chunk_words{given});
}}
{extra}
"""
    return shared_library(text)


def run(
    name: str,
    planned: StridedPlan,
    defines: tuple[tuple[str, str], ...] = (),
    *,
    shifts: Sequence[int] = (),
    backwards: bool = False,
    mark: Mark | None = None,
) -> None:
    """Launch a plan's kernel on the CPU, with the table that a GPU would get; ``shifts`` by number of an array."""
    if not planned.chunks:
        return
    table = planned.table
    # The kernel's rows are 16-byte aligned, as device memory is.
    memory = np.zeros(table.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16
    memory[start : start + table.nbytes] = table
    pointer = memory.ctypes.data + start
    if not planned.inline:
        pointers = np.array([pointer, pointer + planned.regions.nbytes], np.uint64)
        pointer = pointers.ctypes.data
    bases = (ctypes.c_uint64 * BASES)(0, *(shifts[array] for array in planned.arrays))
    marked = () if mark is None else (("MARKED", "1"),)
    library = compiled(name, (*planned.defines, *defines, *marked))
    more = () if mark is None else map(ctypes.byref, mark.arguments)
    call: Callable[..., None] = library.run
    call(
        ctypes.c_uint(planned.blocks),
        ctypes.c_uint(planned.threads),
        ctypes.c_int(backwards),
        bases,
        ctypes.c_void_p(pointer),
        ctypes.c_uint(len(planned.regions)),
        ctypes.c_uint(planned.chunks),
        ctypes.c_uint(planned.chunk_words),
        *more,
    )


def before_a_forbidden_page(nbytes: int) -> np.ndarray:
    """Return bytes that end at a page without access rights: an access beyond the end kills the process."""
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    array = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(array.ctypes.data + pages), mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return array[pages - nbytes : pages]


def coded(array: np.ndarray) -> np.ndarray:
    """Fill an array with varying bytes that never equal the guard."""
    flat = array.reshape(-1).view(np.uint8)
    flat[:] = (np.arange(flat.size) * 7 + np.arange(flat.size) // 251) % 251 % GUARD
    return array


def aligned(nbytes: int, offset: int = 0) -> np.ndarray:
    """Return zeroed bytes at an address ``offset`` beyond a multiple of 256, the alignment of device memory."""
    memory = np.zeros(nbytes + 512, np.uint8)
    start = -memory.ctypes.data % 256 + offset
    return memory[start : start + nbytes]


@cache
def workunits_library() -> ctypes.CDLL:
    """Compile workunits.cu to a library with a function ``run_KERNEL`` for each kernel."""
    runs = "".join(
        f"""
extern "C" void run_workunits_{name}(unsigned grid, unsigned block, int backwards, u64 array,
                                     u64 packed, const void* table)
{{
    launch_on_cpu(grid, block, backwards != 0, workunits_{name}, array, packed, *(const Table*)table);
}}
"""
        for name in ("pack", "unpack")
    )
    numbers = """
#define SIZES(type) sizeof(type), alignof(type)
#define AT(member) __builtin_offsetof(Segment, member)
extern "C" { unsigned long layout[] = {
    SIZES(Table), SIZES(Segment), SIZES(Unit), MAX_THREADS, WORDS_IN_FLIGHT,
    AT(array), AT(packed), AT(extent), AT(item_bytes), AT(granule), AT(list), AT(first_tile), AT(tile),
    AT(units), AT(items), AT(units_magic), AT(units_shift), AT(block_bytes), AT(block_magic),
    AT(block_shift), AT(word), AT(form), AT(lanes_log)}; }
"""
    text = f'#include "{SHIM}"\n{source("workunits")}\n{runs}\n{numbers}'
    return shared_library(text)


def run_workunits(
    name: str,
    table: bytes,
    blocks: int,
    threads: int,
    array: int,
    packed: int,
    *,
    backwards: bool = False,
) -> None:
    """Launch workunits_NAME on the CPU, from the bytes of its table parameter."""
    memory = aligned(len(table))
    memory[:] = np.frombuffer(table, np.uint8)
    call: Callable[..., None] = getattr(workunits_library(), f"run_workunits_{name}")
    call(
        ctypes.c_uint(blocks),
        ctypes.c_uint(threads),
        ctypes.c_int(backwards),
        ctypes.c_uint64(array),
        ctypes.c_uint64(packed),
        ctypes.c_void_p(memory.ctypes.data),
    )
