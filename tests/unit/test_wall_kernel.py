"""The kernel that fills halos at walls, compiled for the CPU: the same values as `numpy.pad` of the whole field."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from halox.decomposition import FieldLayout, FieldSpec, decompose, normalise_boundary
from halox.decomposition.connections import Connection, normalise_connect
from halox.domain.options import field_spec
from halox.exchange import wall_launch
from halox.exchange.wall_launch import FillPlan, plan_fill
from halox.runtime.arrays import describe
from halox.runtime.gpu.compiler import preamble, source
from tests.boundaries import UNTOUCHED, block, random_case
from tests.support import require, trials
from tests.unit.cpu_kernels import SHIM, shared_library

require("cxx")


@cache
def library(defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    return shared_library(f"""{preamble(defines)}
#include "{SHIM}"
{source("walls")}
extern "C" void run(unsigned grid, unsigned block, int backwards, const void* arrays, const void* table,
                    unsigned regions)
{{
    launch_on_cpu(grid, block, backwards != 0, fill_walls, *(const Arrays*)arrays, (const Region*)table, regions);
}}
extern "C" {{ unsigned long sizes[] = {{sizeof(Rule), sizeof(Region), MOST_ARRAYS, MOST_AXES, MOST_RULES,
    __builtin_offsetof(Region, extents), __builtin_offsetof(Region, rule), __builtin_offsetof(Rule, number)}}; }}
""")


def run(plan: FillPlan, arrays: Sequence[Any], *, backwards: bool = False) -> None:
    pointers = np.zeros(wall_launch.MOST_ARRAYS, np.uint64)
    pointers[: len(plan.numbers)] = [arrays[number].ctypes.data for number in plan.numbers]
    library(plan.defines).run(
        ctypes.c_uint(plan.blocks),
        ctypes.c_uint(7),  # few threads, so that each fills several points
        ctypes.c_int(backwards),
        ctypes.c_void_p(pointers.ctypes.data),
        ctypes.c_void_p(plan.regions.ctypes.data),
        ctypes.c_uint(len(plan.regions)),
    )


def test_the_table_is_that_of_the_kernel() -> None:
    numbers = (ctypes.c_ulong * 8).in_dll(library(()), "sizes")
    rule, region = wall_launch.RULE, wall_launch.REGION
    assert rule.fields is not None and region.fields is not None
    assert list(numbers) == [
        rule.itemsize,
        region.itemsize,
        wall_launch.MOST_ARRAYS,
        wall_launch.MOST_AXES,
        wall_launch.MOST_RULES,
        region.fields["extents"][1],
        region.fields["rule"][1],
        rule.fields["number"][1],
    ]


@pytest.mark.parametrize("number", range(trials(120)))
def test_random_fields(number: int) -> None:
    """Two fields of each rank of a random grid; their neighbours' cells are there, the walls are not."""
    rng = np.random.default_rng([20261124, number])
    ranks = int(rng.integers(1, 5))
    case = random_case(rng, ranks)
    grid = decompose(
        case.shape, ranks, halo=case.halo, periodic=case.periodic, proc_shape=case.proc_shape
    )
    spec = FieldSpec(
        case.halo,
        case.before,
        case.after,
        case.staggered,
        boundary=normalise_boundary(case.sides, case.periodic),
    )
    kernels = 0
    for rank in range(ranks):
        layout = FieldLayout(grid, rank, spec)
        walls = layout.walls()
        fields, expected = [], []
        for _ in range(2):
            whole = rng.integers(-9, 10, layout.global_shape).astype(case.dtype)
            order = rng.choice(["C", "F"])
            expected.append(np.asarray(block(layout, case, case.padded(whole)), order=order))
            fields.append(expected[-1].copy(order="K"))
            for region in walls.regions():
                fields[-1][region.box] = UNTOUCHED
        plans = plan_fill([(0, walls), (1, walls)], [describe(u) for u in fields])
        has_phase = any(fill.along.boundary.kind == "phase" for fill in walls.fills())
        if plans is None:
            thin = any(case.staggered)
            assert has_phase or thin, case
            continue
        kernels += 1
        for plan in plans:
            run(plan, fields, backwards=bool(rng.integers(2)))
        for u, right in zip(fields, expected, strict=True):
            assert np.array_equal(u, right), case


def test_most_random_fields_are_filled_by_the_kernel() -> None:
    """Regions of a plain field with all kinds of boundaries: edges and corners included, each cell in one region."""
    grid = decompose((8, 9, 10), 1, halo=2)
    sides = (
        ("edge", "reflect"),
        ("antisymmetric", ("constant", 2)),
        (("gradient", 1), "extrapolate"),
    )
    spec = FieldSpec(((2, 2),) * 3, boundary=normalise_boundary(sides, (False,) * 3))
    layout = FieldLayout(grid, 0, spec)
    count = np.zeros(layout.padded_shape, int)
    regions = layout.walls().regions()
    for region in regions:
        count[region.box] += 1
    assert len(regions) == 26
    outside = np.ones_like(count)
    outside[layout.interior] = 0
    assert np.array_equal(count, outside)
    u = np.zeros(layout.padded_shape, "f4")
    plans = plan_fill([(0, layout.walls())], [describe(u)])
    assert plans is not None and len(plans) == 1


@pytest.mark.parametrize("dtype", ["f8", "f4", "c16", "i4"])
@pytest.mark.parametrize("sign", [-1, {0: -1}])
def test_signs_of_connections(sign: Any, dtype: str) -> None:
    """Signs change in a launch before the fills, which read the changed values; each point once."""
    grid = replace(
        decompose((6, 8, 4), 1, periodic=(False, True, False)),
        joined=normalise_connect(
            {(0, "high"): Connection(flip=1, pivot="T")}, (6, 8, 4), (False, True, False)
        ),
    )
    options = {"components": 2, "sign": sign, "boundary": (None, None, "antisymmetric")}
    layout = FieldLayout(grid, 0, field_spec(options, FieldSpec(((2, 2),) * 3), grid))
    walls, u = layout.walls(), np.random.default_rng(1).integers(-9, 10, layout.padded_shape)
    u = u.astype(dtype)
    changes = np.ones(u.shape, dtype)
    changes[
        : 2 if sign == -1 else 1, 8:, :, 2:6
    ] = -1  # beyond the line, and its second half with its images
    second = (np.arange(-2, 10) - 0) % 8 > 4
    changes[: 2 if sign == -1 else 1, 7, second, 2:6] = -1
    expected = u * changes
    expected[..., 1::-1], expected[..., 6:] = -expected[..., 2:4], -expected[..., 5:3:-1]
    plans = plan_fill([(0, walls)], [describe(u)])
    assert plans is not None and len(plans) == 2
    for plan in plans:
        run(plan, [u], backwards=True)
    inside = (slice(None), slice(2, None))  # the low side of the first axis has no boundary
    assert np.array_equal(u[inside], expected[inside])


def test_other_element_types() -> None:
    """Unsigned integers and booleans are copied and set; their mirror images with a sign, and structs, are declined."""
    grid = decompose((5, 6), 1)

    def plans(boundary: Any, dtype: Any) -> tuple[Any, Any]:
        spec = FieldSpec(((1, 1),) * 2, boundary=normalise_boundary(boundary, (False, False)))
        layout = FieldLayout(grid, 0, spec)
        u = np.zeros(layout.padded_shape, dtype)
        return plan_fill([(0, layout.walls())], [describe(u)]), u

    for dtype in ("u1", "u2", "u4", "u8", "b1", "i1", "i2", "i8", "c8"):
        found, u = plans(("symmetric", ("constant", 1)), dtype)
        u[1:-1, 1:-1] = (np.arange(30) % 2).reshape(5, 6).astype(dtype)
        inner = u[1:-1, 1:-1].copy()
        run(found[0], [u])
        right = np.pad(
            np.pad(inner, ((1, 1), (0, 0)), mode="edge"), ((0, 0), (1, 1)), constant_values=1
        )
        assert np.array_equal(u, right), dtype
    assert plans("edge", "i4,f8")[0] is None
    assert plans("edge", ">f8")[0] is None
    assert plans("edge", "f2")[0] is None
