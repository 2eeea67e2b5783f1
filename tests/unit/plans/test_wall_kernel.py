"""The kernel that fills halos at walls, compiled for the CPU: the same values as `numpy.pad` of the whole field."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.decomposition import FieldLayout, FieldSpec, decompose, normalise_boundary
from halox.decomposition.connections import Connection, normalise_connect
from halox.decomposition.field_regions import exchange_regions, walls_of
from halox.domain.options import field_spec
from halox.plans import wall_launch
from halox.plans.wall_launch import MOST_ARRAYS, FillPlan, plan_fill
from halox.plans.wall_operations import FieldWalls, WallOperations, view_in
from halox.runtime.arrays import describe
from halox.runtime.gpu.compiler import preamble, source
from tests.fakes.cpu_kernels import SHIM, aligned, shared_library
from tests.oracle import Case, expected, pad_between_mirrors, whole_values
from tests.strategies import some_axes, walls
from tests.support import require, trials
from tests.unit.plans.by_regions import layouts

require("cxx")

SMS = 132
UNTOUCHED = -77


@cache
def library(defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    return shared_library(
        f"""{preamble(defines)}
#include "{SHIM}"
{source("walls")}
extern "C" void run(unsigned grid, unsigned block, int backwards, const void* fills, const void* table,
                    unsigned chunk_words)
{{
    launch_on_cpu(grid, block, backwards != 0, fill_walls, *(const Fills*)fills, *(const WallTable*)table, chunk_words);
}}
extern "C" {{ unsigned long sizes[] = {{sizeof(Rule), INLINE_RULES, NO_LEVEL, __builtin_offsetof(Rule, number),
    __builtin_offsetof(Rule, depth), sizeof(WallRegion), __builtin_offsetof(WallRegion, use),
    __builtin_offsetof(WallRegion, level), sizeof(Fills) + sizeof(WallTable) + sizeof(u32)}}; }}
""",
        "-ffp-contract=off",  # as on a GPU
    )


def run(plan: FillPlan, arrays: Sequence[Any], *, backwards: bool = False) -> None:
    planned = plan.planned
    table, rules = aligned(planned.table.nbytes), aligned(plan.rules.nbytes)
    table[:], rules[:] = planned.table, plan.rules.view("u1")
    fills = np.frombuffer(
        plan.parameter([u.ctypes.data for u in arrays], rules.ctypes.data), np.uint8
    ).copy()
    pointer = table.ctypes.data
    if not planned.inline:
        pointers = np.array([pointer, pointer + planned.regions.nbytes], np.uint64)
        pointer = pointers.ctypes.data
    threads = 7  # few threads, so that each fills several points
    library(plan.defines).run(
        ctypes.c_uint(planned.blocks),
        ctypes.c_uint(threads),
        ctypes.c_int(backwards),
        ctypes.c_void_p(fills.ctypes.data),
        ctypes.c_void_p(pointer),
        ctypes.c_uint(planned.chunk_words),
    )


def test_the_table_is_that_of_the_kernel() -> None:
    """The parameters of a launch have 4 KiB on every GPU."""
    rule = wall_launch.RULE
    assert rule.fields is not None
    for levels, rules in ((1, 3), (2, 3), (3, 3), (5, 4)):
        region = wall_launch.wall_region_dtype(levels, wall_launch.USES[rules])
        assert region.fields is not None
        inline = wall_launch._INLINE_BYTES // region.itemsize
        defines = {"TABLE_REGIONS": inline, "MAX_LEVELS": levels, "RULES": rules}
        defines |= {"ARRAYS": MOST_ARRAYS}
        sizes = library(tuple((name, str(value)) for name, value in defines.items()))
        *numbers, parameters = (ctypes.c_ulong * 9).in_dll(sizes, "sizes")
        assert numbers == [
            rule.itemsize,
            wall_launch.INLINE_RULES,
            wall_launch.NO_LEVEL,
            rule.fields["number"][1],
            rule.fields["depth"][1],
            region.itemsize,
            region.fields["use"][1],
            region.fields["level"][1],
        ]
        assert parameters <= 4096


def perhaps_along_some(cases: st.SearchStrategy[Case]) -> st.SearchStrategy[Case]:
    return cases | some_axes(cases)


# The same cases in every run, since each needs compiled kernels.
few_kernels = settings(derandomize=True, print_blob=True)
DTYPES = ["f8", "f4", "c16", "i4"]


@settings(few_kernels, max_examples=trials(120))
@given(
    perhaps_along_some(st.integers(1, 4).flatmap(partial(walls, dtypes=DTYPES, thin=False))),
    st.booleans(),
    st.sampled_from("CF"),
)
def test_random_fields(case: Case, backwards: bool, order: Any) -> None:
    """Two fields of each rank of a random grid; their neighbours' cells are there, the walls are not.

    All numbers have the bits that NumPy computes. The regions are the cells that the steps on the host write.
    """
    f = case.fields[0]
    for layout in layouts(case, f):
        coords, found = (
            layout.decomposition.coords_of(layout.rank),
            walls_of(layout, fixed=case.fixed),
        )
        fields, right = [], []
        for number in range(2):
            one = expected(case, f, coords, whole_values(case, f, number)).after
            right.append(np.asarray(one, order=order))
            fields.append(right[-1].copy(order="K"))
            for region in found.regions():
                fields[-1][region.box] = UNTOUCHED
        plans = plan_fill([(0, found), (1, found)], [describe(u) for u in fields], SMS)
        has_phase = any(fill.along.boundary.kind == "phase" for fill in found.fills())
        written = np.zeros((2, *layout.padded_shape), int)
        for region in found.regions():
            written[0][region.box] += 1
        for fill in found.fills():
            written[1][fill.box] = 1
        assert has_phase or np.array_equal(*written)
        if plans is None:
            assert has_phase or any(f.staggered)
            continue
        for plan in plans:
            run(plan, fields, backwards=backwards)
        assert all(map(np.array_equal, fields, right))


@settings(few_kernels, max_examples=trials(60))
@given(walls(1, ["f8"], thin=False), st.booleans())
def test_periodic_axes_in_the_same_launch(case: Case, backwards: bool) -> None:
    """One launch fills the whole halo of a rank that is its own neighbour, from its owned points."""
    f = case.fields[0]
    f.sides = {
        component: tuple(
            (None, None) if wraps else pair
            for pair, wraps in zip(sides, case.periodic, strict=True)
        )
        for component, sides in f.sides.items()
    }
    (layout,) = layouts(case, f)
    one = expected(case, f, (0,) * len(case.shape), whole_values(case, f, 0))
    u = one.before.copy()
    plans = plan_fill([(0, walls_of(layout))], [describe(u)], SMS, wraps=True)
    assert plans is not None
    for plan in plans:
        run(plan, [u], backwards=backwards)
    assert np.array_equal(u, one.after)


@settings(max_examples=trials(60), print_blob=True)
@given(perhaps_along_some(walls(1, thin=False)), st.sampled_from([(), (1,), (1, 3)]), st.booleans())
def test_the_launch_fills_the_cells_of_all_messages(
    case: Case, offsets: tuple[int, ...], corners: bool
) -> None:
    """Each cell in one region; the cells that no message fills are beyond walls."""
    f = case.fields[0]
    halo = ((3, 3),) * len(case.shape) if offsets else f.halo
    grid = decompose(case.shape, 1, halo=halo, periodic=case.periodic)
    sides = [None if wraps else "edge" for wraps in case.periodic]
    boundary = normalise_boundary(sides, case.periodic)
    spec = FieldSpec(halo, f.before, f.after, f.staggered, offsets=offsets, boundary=boundary)
    layout = FieldLayout(grid, 0, spec)
    filled, received = np.zeros((2, *layout.padded_shape), int)
    beyond = np.ones(layout.padded_shape, bool)
    beyond[(slice(None),) * len(f.before) + layout.within_walls] = False
    for box, _ in walls_of(layout, corners, case.fixed).regions(wraps=True):
        filled[box] += 1
    for region in exchange_regions(layout, corners, case.fixed):
        if region.recv is not None:
            received[region.recv.slices] += 1
    assert filled.max(initial=0) <= 1 and received.max(initial=0) <= 1
    assert np.array_equal(filled * ~beyond, received)
    assert not np.any(received * beyond)


def test_layers_of_the_halo_as_sources_are_declined() -> None:
    """A staggered field stores one point more than its halo, here a copy of another copy."""
    grid = decompose((2, 6), 1, halo=((2, 2), (1, 1)), periodic=(True, False))
    boundary = normalise_boundary("edge", (True, False))
    spec = FieldSpec(((2, 2), (1, 1)), staggered=(True, False), boundary=boundary)
    layout = FieldLayout(grid, 0, spec)
    u = np.zeros(layout.padded_shape)
    assert plan_fill([(0, walls_of(layout))], [describe(u)], SMS, wraps=True) is None
    assert plan_fill([(0, walls_of(layout))], [describe(u)], SMS) is not None


@pytest.mark.parametrize(
    "pair",
    [
        *(("reflect", "reflect"), ("symmetric", "symmetric"), ("antisymmetric", "antisymmetric")),
        *(("antisymmetric", "reflect"), ("symmetric", "antisymmetric")),
    ],
)
@pytest.mark.parametrize("shape", [(1, 5), (2, 3), (3, 1)])
def test_mirrors_deeper_than_the_block(pair: tuple[str, str], shape: tuple[int, int]) -> None:
    """Several reflections, as `numpy.pad` has them, by the kernel and on the host."""
    spec = FieldSpec(((7, 6),) * 2, boundary=normalise_boundary((pair, pair), (False, False)))
    layout = FieldLayout(decompose(shape, 1), 0, spec)
    inner = np.random.default_rng(1).random(shape)
    u = np.zeros(layout.padded_shape)
    u[layout.interior] = inner
    v, right = u.copy(), inner
    for axis in (0, 1):
        right = pad_between_mirrors(right, axis, (7, 6), pair)
    plans = plan_fill([(0, walls_of(layout))], [describe(u)], SMS)
    assert plans is not None
    for plan in plans:
        run(plan, [u])
    field_walls = FieldWalls(0, layout.origin, walls_of(layout))
    view = partial(view_in, v.ravel().view("u1").data, 0, device=None)
    for operation in WallOperations(field_walls, describe(v), print, adds=False).all():
        operation.step(view)()
    assert np.array_equal(u, right) and np.array_equal(v, right)


def test_each_component_is_checked() -> None:
    """In a thin block the mirror image of a component reads the point that its lower wall sets."""
    grid = decompose((2, 6), 1, halo=((2, 2), (0, 0)))
    edges, sets = ("edge", None), ((("constant", 3.0), "reflect"), None)
    for sides in ((edges, edges), (sets, edges), (edges, sets)):
        boundary = normalise_boundary(dict(enumerate(sides)), (False, False))
        spec = FieldSpec(((2, 2), (0, 0)), (2,), (), (True, False), boundary=boundary)
        layout = FieldLayout(grid, 0, spec)
        u = np.zeros(layout.padded_shape)
        plans = plan_fill([(0, walls_of(layout))], [describe(u)], SMS)
        assert (plans is None) == (sets in sides)


def test_a_field_with_all_kinds_of_boundaries_needs_one_launch() -> None:
    grid = decompose((8, 9, 10), 1, halo=2)
    sides = (
        ("edge", "reflect"),
        ("antisymmetric", ("constant", 2)),
        (("gradient", 1), "extrapolate"),
    )
    spec = FieldSpec(((2, 2),) * 3, boundary=normalise_boundary(sides, (False,) * 3))
    layout = FieldLayout(grid, 0, spec)
    plans = plan_fill([(0, walls_of(layout))], [describe(np.zeros(layout.padded_shape))], SMS)
    assert plans is not None and len(plans) == 1


@pytest.mark.parametrize("dtype", ["f4", "c16"])
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
    u = np.random.default_rng(1).integers(-9, 10, layout.padded_shape)
    u = u.astype(dtype)
    changes = np.ones(u.shape, dtype)
    changes[
        : 2 if sign == -1 else 1, 8:, :, 2:6
    ] = -1  # beyond the line, and its second half with its images
    second = (np.arange(-2, 10) - 0) % 8 > 4
    changes[: 2 if sign == -1 else 1, 7, second, 2:6] = -1
    expected = u * changes
    expected[..., 1::-1], expected[..., 6:] = -expected[..., 2:4], -expected[..., 5:3:-1]
    plans = plan_fill([(0, walls_of(layout))], [describe(u)], SMS)
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
        return plan_fill([(0, walls_of(layout))], [describe(u)], SMS), u

    for dtype in ("u1", "u2", "i8"):
        found, u = plans(("edge", ("gradient", 3)), dtype)
        u[1:-1, 1:-1] = 1
        run(found[0], [u])
        assert np.all(u == np.array([-2, 1, 1, 1, 1, 1, 1, 4]).astype(dtype)), dtype
    for dtype in ("u1", "u8", "b1", "i2", "c8"):
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
