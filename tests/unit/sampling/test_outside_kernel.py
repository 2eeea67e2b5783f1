"""The kernel that finds particles outside of a block, compiled for the CPU: the same rows as on the host."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import pytest

from halox.runtime.gpu.compiler import preamble, source
from halox.sampling.migration import outside
from tests.fakes.cpu_kernels import SHIM, shared_library
from tests.support import require

require("cxx")


@cache
def library(axes: int) -> ctypes.CDLL:
    return shared_library(f"""{preamble((("AXES", str(axes)), ("THREADS", "8"), ("ROWS", "3")))}
#include "{SHIM}"
template <class T> static T atomicAdd(T* at, T value)
{{
    const T before = *at;
    *at += value;
    return before;
}}
{source("outside")}
extern "C" void run(unsigned blocks, int backwards, const double* positions, long long n, const Block* block,
                    long long* rows, unsigned long long* count)
{{
    launch_with_barriers(blocks, 8, backwards != 0, outside, positions, n, *block, rows, count);
}}
""")


@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("n", [0, 1, 24, 1000])
def test_rows(axes: int, n: int) -> None:
    rng = np.random.default_rng(axes)
    positions = rng.integers(-8, 80, (n, axes)) / 4
    positions[::50, -1] = np.resize([np.nan, np.inf, -np.inf, 2.5, 1e300], len(positions[::50]))
    owned = [slice(3 + axis, 15) for axis in range(axes)]
    rows, count = np.full(n + 2, -1, "i8"), np.zeros(1, "u8")
    bounds = np.array([cut.start for cut in owned] + [cut.stop for cut in owned], "f8")
    library(axes).run(
        ctypes.c_uint(-(-n // 24)),
        ctypes.c_int(axes % 2),
        *(ctypes.c_void_p(positions.ctypes.data), ctypes.c_longlong(n)),
        *(ctypes.c_void_p(array.ctypes.data) for array in (bounds, rows, count)),
    )
    found = rows[: count[0]]
    y = positions + 0.5
    inside = ((y >= bounds[:axes]) & (y < bounds[axes:])).all(axis=1)
    assert sorted(found.tolist()) == np.flatnonzero(~inside).tolist()
    assert outside(positions, owned).tolist() == sorted(found.tolist())
    assert (rows[count[0] :] == -1).all()
