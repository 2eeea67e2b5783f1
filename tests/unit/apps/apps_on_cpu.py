"""A stand-in for CuPy that runs the mini-apps' kernels on the CPU.

The ``.cu`` file is compiled as C++; the threads of a launch run one after another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tests.fakes.cpu_kernels import compiled_once

SHIM = """
struct Three {{ unsigned x, y, z; }};
static Three blockIdx, blockDim, threadIdx;
struct alignas(16) double2 {{ double x, y; }};
#define __global__
#define __restrict__
{source}
#define LAUNCH(name, parameters, arguments)                                       \\
    extern "C" void launch_##name(const unsigned* blocks, const unsigned* threads, parameters) \\
    {{                                                                            \\
        blockDim = {{threads[0], threads[1], 1}};                                 \\
        for (blockIdx.z = 0; blockIdx.z < blocks[2]; ++blockIdx.z)                \\
        for (blockIdx.y = 0; blockIdx.y < blocks[1]; ++blockIdx.y)                \\
        for (blockIdx.x = 0; blockIdx.x < blocks[0]; ++blockIdx.x)                \\
        for (threadIdx.y = 0; threadIdx.y < threads[1]; ++threadIdx.y)            \\
        for (threadIdx.x = 0; threadIdx.x < threads[0]; ++threadIdx.x)            \\
            name arguments;                                                       \\
    }}
#define COMMA ,
{launches}
"""

BARRIERS = """
#include "cpu_shim.h"
struct alignas(16) double2 {{ double x, y; }};
struct alignas(8) float2 {{ float x, y; }};
template <class T> static T __ldg(const T* at) {{ return *at; }}
template <class T> static T __ldcs(const T* at) {{ return *at; }}
template <class T> static T __ldcg(const T* at) {{ return *at; }}
static unsigned atomicAdd(unsigned* at, unsigned more) {{ unsigned before = *at; *at += more; return before; }}
static void __threadfence() {{}}
{source}
#define LAUNCH(name, parameters, arguments)                                       \\
    extern "C" void launch_##name(const unsigned* blocks, const unsigned* threads, parameters) \\
    {{                                                                            \\
        launch_with_barriers(blocks[0], threads[0], false, [=] {{ name arguments; }}); \\
    }}
#define COMMA ,
{launches}
"""
"""Replaces `SHIM` for kernels with ``__syncthreads``; launches have one axis of blocks and threads."""

MULTIGRID = """
LAUNCH(stencil, const double* a COMMA const double* b COMMA double* c COMMA Size p COMMA Size q COMMA int nz
       COMMA int ny COMMA int nx COMMA int n COMMA double w COMMA double x COMMA double y COMMA double z,
       (a, b, c, p, q, nz, ny, nx, n, w, x, y, z))
LAUNCH(restriction, const double* a COMMA double* b COMMA Size p COMMA Size q COMMA Size r COMMA Size s COMMA int nz
       COMMA int ny COMMA int nx, (a, b, p, q, r, s, nz, ny, nx))
LAUNCH(prolongation, const double* a COMMA double* b COMMA Size p COMMA Size q COMMA Size r COMMA Size s COMMA int nz
       COMMA int ny COMMA int nx COMMA int add, (a, b, p, q, r, s, nz, ny, nx, add))
"""

FOURIER = """
LAUNCH(initial, double2* u COMMA const Number* a COMMA const Number* b COMMA const Number* c COMMA int nz COMMA int ny
       COMMA int nx, (u, a, b, c, nz, ny, nx))
LAUNCH(evolve, double2* u COMMA const double* a COMMA const double* b COMMA const double* c COMMA Size* n
       COMMA int nz COMMA int ny COMMA int nx, (u, a, b, c, n, nz, ny, nx))
LAUNCH(sample, const double2* u COMMA const Size* a COMMA double2* s COMMA const Size* n COMMA int count,
       (u, a, s, n, count))
"""

STAGGERED = """
LAUNCH(dslash, const Complex* m COMMA const Complex* s COMMA Complex* o COMMA const double* n COMMA int row,
       (m, s, o, n, row))
LAUNCH(normal, const Complex* m COMMA const Complex* s COMMA const Complex* p COMMA Complex* o COMMA double f
       COMMA double* n COMMA double* t COMMA unsigned* a COMMA int row, (m, s, p, o, f, n, t, a, row))
LAUNCH(begin, const Complex* b COMMA const Complex* q COMMA Complex* r COMMA Complex* p COMMA double* n
       COMMA double* t COMMA unsigned* a, (b, q, r, p, n, t, a))
LAUNCH(reduce, const Complex* q COMMA Complex* r COMMA double* n COMMA double* t COMMA unsigned* a, (q, r, n, t, a))
LAUNCH(update, const Complex* r COMMA Complex* x COMMA Complex* p COMMA double* n COMMA double* h COMMA unsigned* a,
       (r, x, p, n, h, a))
"""

RELAX = """
LAUNCH(relax, const double* u COMMA const double* f COMMA double* next COMMA int ny COMMA int nz,
       (u, f, next, ny, nz))
"""

JACOBI = """
LAUNCH(stencil_step, const REAL* u COMMA REAL* v COMMA long long pitch COMMA int a COMMA int b COMMA int c COMMA int d
       COMMA REAL x COMMA REAL y COMMA REAL z, (u, v, pitch, a, b, c, d, x, y, z))
"""

C_TYPES = {
    "i4": ctypes.c_int,
    "i8": ctypes.c_longlong,
    "f4": ctypes.c_float,
    "f8": ctypes.c_double,
}
NVRTC_ONLY = {"-fmad=false": "-ffp-contract=off"}


class Module:
    """Stand-in for ``cupy.RawModule``."""

    def __init__(self, code: str, launches: str, shim: str, options: Sequence[str]) -> None:
        flags = ["-O2", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-Wall", "-Werror"]
        flags += [NVRTC_ONLY.get(option, option) for option in options]
        text = shim.format(source=code, launches=launches)
        self._library = ctypes.CDLL(str(compiled_once(text, *flags)))

    def get_function(self, name: str) -> Any:
        function = self._library[f"launch_{name}"]

        def launch(blocks: Sequence[int], threads: Sequence[int], arguments: Sequence[Any]) -> None:
            assert 1 <= len(threads) <= 2 and len(threads) <= len(blocks) <= 3
            assert min(*blocks, *threads) > 0 and prod(threads) <= 1024
            function(
                (ctypes.c_uint * 3)(*blocks, *[1] * (3 - len(blocks))),
                (ctypes.c_uint * 2)(*threads, *[1] * (2 - len(threads))),
                *(
                    ctypes.c_void_p(given.ctypes.data)
                    if isinstance(given, np.ndarray)
                    else C_TYPES[given.dtype.str[1:]](given)
                    for given in arguments
                ),
            )

        return launch


class FakeCupy:
    """The part of CuPy that an app's `DeviceKernels` needs, on NumPy arrays.

    Parameters
    ----------
    launches : str
        `RELAX`, `JACOBI`, `MULTIGRID`, `FOURIER` or `STAGGERED`: the parameters of each kernel.
    shim : str
        `SHIM`, or `BARRIERS`.
    """

    int32 = np.int32

    def __init__(self, launches: str, shim: str = SHIM) -> None:
        self._launches, self._shim = launches, shim

    def RawModule(self, code: str, options: Sequence[str]) -> Module:
        return Module(code, self._launches, self._shim, options)

    def RawKernel(self, code: str, name: str) -> Any:
        return self.RawModule(code, ()).get_function(name)
