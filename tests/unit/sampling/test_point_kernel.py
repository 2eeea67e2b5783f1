"""The kernel of points, compiled for the CPU: the same values as NumPy on the whole field."""

from __future__ import annotations

import ctypes
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from halox.decomposition import FieldLayout, FieldSpec, decompose
from halox.errors import FieldError
from halox.runtime.arrays import describe
from halox.runtime.gpu.compiler import preamble, source
from halox.sampling.device_points import PointTables, plan_points
from halox.sampling.records import Record
from halox.sampling.weights import Corners, adding, owners, reading
from tests.fakes.cpu_kernels import SHIM, shared_library
from tests.support import require

require("cxx")

SHAPE = (7, 6)
POINTS = 40


@cache
def library(defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    return shared_library(f"""{preamble(defines)}
#include "{SHIM}"
{source("points")}
extern "C" void run(unsigned blocks, int backwards, char* target, const char* source, const long long* starts,
                    const long long* targets, const long long* sources, const double* weights, unsigned rows)
{{
    launch_on_cpu(blocks, 8, backwards != 0, points, target, source, starts, targets, sources, weights, rows);
}}
""")


def run(tables: PointTables, target: Any, source: Any, backwards: bool) -> None:
    rows = len(tables.targets)
    assert [each.dtype.str[1:] for each in tables[:4]] == ["i8", "i8", "i8", "f8"]
    parts = [np.ascontiguousarray(each) for each in tables[:4]]
    library(tables.defines).run(
        ctypes.c_uint(-(-rows // 8)),
        ctypes.c_int(backwards),
        *(ctypes.c_void_p(array.ctypes.data) for array in (target, source, *parts)),
        ctypes.c_uint(rows),
    )


@pytest.mark.parametrize("dtype", ["f8", "f4", "c8", "c16", "i2", "u8", "?"])
@pytest.mark.parametrize(
    ("before", "after"), [((), ()), ((2,), ()), ((), (2, 3))], ids=["scalar", "first", "last"]
)
def test_values_and_sources(dtype: str, before: Any, after: Any) -> None:
    """On four ranks: their values at points add up to all values; sources are added to the cells of each."""
    rng = np.random.default_rng(7)
    is_fractional = np.dtype(dtype).kind in "fc"
    indices = (
        rng.integers(0, 96, (POINTS, 2)) / 16 if is_fractional else rng.integers(0, 6, (POINTS, 2))
    )
    indices[: POINTS // 2] = (
        indices[: POINTS // 2] // 1
    )  # cells among other points, some of them twice
    indices = np.minimum(indices, (6, 5)).astype("f8")
    corners = Corners.of(indices)
    grid = decompose(SHAPE, 4, halo=1)
    spec = FieldSpec(((1, 1), (1, 1)), before, after)
    low = -9 if dtype[0] in "fci" else 0
    whole = rng.integers(low, 10, (*before, 9, 8, *after)).astype(dtype)  # with a halo
    field = np.moveaxis(whole, range(len(before), len(before) + 2), range(2))
    lower, rest = np.floor(indices).astype(int), indices % 1
    expected, added = np.zeros((POINTS, *before, *after), "c16"), np.zeros(field.shape, "c16")
    sources = rng.integers(low, 10, expected.shape).astype(dtype)
    for side in product((0, 1), repeat=2):
        weight = np.where(side, rest, 1 - rest).prod(axis=1).reshape(-1, *[1] * (field.ndim - 2))
        at = tuple((np.minimum(lower + side, (6, 5)) + 1).T)
        expected += field[at] * weight
        np.add.at(added, at, sources * weight)
    values = np.full(expected.shape, 99, dtype)
    total = np.zeros(expected.shape, "c16")
    for rank in range(4):
        layout = FieldLayout(grid, rank, spec)
        cut = tuple(slice(one.start, one.stop + 2) for one in layout.owned)
        block = np.moveaxis(field[cut], range(2), range(len(before), len(before) + 2))
        block = np.asarray(block.copy(), order="F" if rank % 2 else "C")
        described = describe(block)
        tables = plan_points(layout, described, reading(layout, corners), POINTS, add=False)
        run(tables, values, block, rank == 1)
        total += values
        mine = owners(layout, lower) == rank
        assert not values[~mine].any()
        own = reading(layout, corners)._replace(rows=np.arange(mine.sum()))
        rows = plan_points(layout, described, own, len(own.rows), add=False)
        record = Record(
            described, layout, own, np, lambda block, row, rows=rows: run(rows, row, block, True)
        )
        for step in range(100):  # two chunks
            record.add(block, step)
        assert np.array_equal(record.values(100), [values[mine]] * 100)
        if dtype == "?":
            continue
        tables = plan_points(layout, described, adding(layout, corners), POINTS, add=True)
        grown = block.copy(order="K")
        run(tables, grown, sources, rank == 2)
        interior = np.moveaxis(
            (grown.astype("c16") - block)[layout.interior],
            range(len(before), len(before) + 2),
            range(2),
        )
        assert np.array_equal(
            interior, added[tuple(slice(c.start + 1, c.stop + 1) for c in layout.owned)]
        )
        grown[layout.interior] = block[layout.interior]
        assert np.array_equal(grown, block), "the halo is not changed"
    assert np.array_equal(total, expected)


def test_exact_values() -> None:
    """A cell's bits stay, beside points between cells; NaN in a cell of weight 0 has no effect."""
    layout = FieldLayout(decompose((4, 4), 1, halo=1), 0, FieldSpec(((1, 1), (1, 1))))
    u = np.full((6, 6), np.nan)
    u[2, 2:4], u[3, 3] = (-0.0, 0.1), np.inf
    corners = Corners.of(np.array([(1, 1), (1, 2), (2, 2), (1, 1.5)]))
    values = np.zeros(4)
    run(plan_points(layout, describe(u), reading(layout, corners), 4, add=False), values, u, False)
    assert values.tobytes() == np.array([-0.0, 0.1, np.inf, 0.05]).tobytes()


@pytest.mark.parametrize("dtype", ["f2", "V4", ">f4"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    layout = FieldLayout(decompose((4, 4), 1, halo=1), 0, FieldSpec(((1, 1), (1, 1))))
    weights = reading(layout, Corners.of(np.ones((1, 2))))
    with pytest.raises(FieldError):
        plan_points(layout, describe(np.zeros((6, 6), dtype)), weights, 1, add=False)
