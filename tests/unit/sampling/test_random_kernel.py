"""The kernel of random fields, compiled for the CPU: the same numbers as on the host."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import pytest

import halox
from halox.runtime.gpu.compiler import preamble, source
from halox.sampling.random_numbers import fill_on_host, index_sums, kernel_defines
from tests.fakes.cpu_kernels import SHIM, shared_library
from tests.support import require

require("cxx")

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"components": 2, "staggered": 0, "halo": 2},
    {"components": (..., 2, 3), "staggered": (1, 2)},
    {"parity": "odd"},
]

LARGE = {  # as recorded in November 2026, by another form of the generator
    "uniform": [
        "0x1.b88e5c473fa98p-1",
        "0x1.bb7674dac6d62p-1",
        "0x1.128ce81b63344p-3",
        "0x1.f5de60a477e8ap-1",
    ],
    "normal": [
        "-0x1.3ad04c5fcd3aap+0",
        "-0x1.5db888af6fd03p+0",
        "0x1.02f306540ecebp-1",
        "0x1.5f025e4a44eb4p+1",
    ],
}


@cache
def library(defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    return shared_library(f"""{preamble(defines)}
#include "{SHIM}"
{source("random_field")}
extern "C" void run(unsigned blocks, int backwards, TYPE* target, const u64* rows, const u64* columns, unsigned length,
                    u64 seed)
{{
    launch_on_cpu(blocks, 8, backwards != 0, random_field, target, rows, columns, length, seed);
}}
""")


def run(array: np.ndarray, rows: np.ndarray, columns: np.ndarray, seed: int, dist: str) -> None:
    library(kernel_defines(array.dtype, dist)).run(
        ctypes.c_uint(len(rows)),
        ctypes.c_int(seed % 2),
        *(ctypes.c_void_p(each.ctypes.data) for each in (array, rows, columns)),
        ctypes.c_uint(len(columns)),
        ctypes.c_uint64(seed),
    )


@pytest.mark.parametrize("dist", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
def test_numbers(dtype: str, dist: str) -> None:
    tolerance = 0 if dist == "uniform" else 1e-6 if dtype in ("f4", "c8") else 1e-13
    with halox.Grid((8, 6, 10), device="cpu", periodic=True, checkerboard=True) as grid:
        for seed, layout in enumerate(LAYOUTS, 2**63 - 2):
            right = grid.random(seed, dist, dtype, **layout)  # type: ignore[call-overload]
            guarded = np.full(right.size + 2, 7, dtype)
            found = guarded[1:-1].reshape(right.shape)
            run(found, *index_sums(grid.layout(right), np), seed, dist)
            assert np.allclose(found, right, rtol=tolerance, atol=tolerance), layout
            assert (guarded[[0, -1]] == 7).all()


def test_large_indices() -> None:
    """The counters of points beyond 2**32 have a second word."""
    rows, columns = np.array([2**32 + 5], "u8"), np.arange(4, dtype="u8")
    for dist, numbers in LARGE.items():
        right = [float.fromhex(number) for number in numbers]
        for fill in (run, fill_on_host):
            found = np.zeros(4)
            fill(found, rows, columns, seed=2**40 + 5, dist=dist)
            assert np.allclose(found, right, rtol=0 if dist == "uniform" else 1e-14, atol=0)
