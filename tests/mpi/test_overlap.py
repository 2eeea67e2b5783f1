"""Exchanges during computation, plans called with other arrays, and several steps for each exchange.

Every result has the same bits as with an exchange before each step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import ClosedError, FieldError, MismatchError, StateError
from halox.exchange import loops
from halox.exchange.plan import Plan
from halox.exchange.regions import Cells, owned_cells
from tests.mpi.bad_input import Table, check_error
from tests.mpi.conftest import SMALL, agree
from tests.mpi.limits import short_waits

World = MPI.Intracomm

CELLS = [(17,), (11, 12), (9, 8, 10)]


def start(grid: halox.Grid, **options: Any) -> Any:
    """Return a field with different values in all cells, and 0.5 beyond walls; other halo cells are NaN."""
    u = grid.full(np.nan, **options)
    layout = grid.layout(u)
    whole = np.random.default_rng(5).random(layout.global_shape)
    grid.interior(u)[...] = whole[
        (*[slice(None)] * len(layout.spec.components_before), *layout.owned)
    ]
    return u


def beyond_walls(grid: halox.Grid, u: Any) -> Any:
    """Set the halo beyond walls, which no exchange changes, to 0.5."""
    before = len(grid.layout(u).spec.components_before)
    for axis, (widths, owned) in enumerate(zip(grid.halo, grid.owned, strict=True)):
        at = u.swapaxes(0, axis + before)
        if not grid.periodic[axis]:
            low = widths[0] - owned.start
            high = widths[1] - (grid.grid_shape[axis] - owned.stop)
            at[: max(low, 0)] = 0.5
            at[len(at) - max(high, 0) :] = 0.5
    return u


def step(new: Any, old: Any, cells: Any, width: int) -> None:
    """Compute a star stencil of a width; sums are in the same order for every cell."""
    ndim = len(cells.shape)
    total = old[cells] * 0.5
    for axis in range(ndim):
        for by in range(1, width + 1):
            for sign in (-by, by):
                total = total + old[cells.shifted(*[sign * (a == axis) for a in range(ndim)])] / 8
    new[cells] = total


def plain(grid: halox.Grid, steps: int, width: int, **options: Any) -> Any:
    """Return the field after some steps with an exchange before each."""
    u, new = (beyond_walls(grid, start(grid, **options)) for _ in range(2))
    for _ in range(steps):
        grid.exchange(u)
        step(new, u, owned_cells(grid.layout(u)), width)
        u, new = new, u
    return grid.interior(u).copy()


@pytest.mark.ranks(*SMALL, 4)
@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("cells", CELLS, ids=str)
def test_overlapped_steps(cells: tuple[int, ...], width: int, periodic: bool, comm: World) -> None:
    with halox.Grid(cells, halo=width, periodic=periodic, comm=comm, device="cpu") as grid:
        expected = plain(grid, 5, width)
        assert np.isfinite(expected).all()
        fields = [beyond_walls(grid, start(grid)) for _ in range(2)]
        for u, new in (fields, [field.copy() for field in fields]):
            plan = grid.plan(u, overlap=True)
            for _ in range(5):
                covered = np.zeros(u.shape, int)
                for region in plan.overlap(u, width=width):
                    step(new, u, region, width)
                    covered[region] += 1
                once = (grid.interior(covered) == 1).all()
                assert agree(once and covered.sum() == grid.interior(u).size, comm)
                u, new = new, u
            assert agree(np.array_equal(grid.interior(u), expected), comm)


@pytest.mark.ranks(*SMALL, 4)
@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize(("width", "every"), [(1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("cells", [(25,), (17, 19), (13, 12, 14), (6,), (7, 6)], ids=str)
def test_several_steps_for_each_exchange(
    cells: tuple[int, ...], width: int, every: int, periodic: bool, comm: World
) -> None:
    with halox.Grid(cells, halo=width * every, periodic=periodic, comm=comm, device="cpu") as grid:
        expected = plain(grid, 2 * every, width)
        u, new = (beyond_walls(grid, start(grid)) for _ in range(2))
        plan = grid.plan(u, every=every)
        for _ in range(2):
            regions = plan.steps(u)
            for region in regions:
                step(new, u, region, width)
                u, new = new, u
        assert agree(np.array_equal(grid.interior(u), expected), comm)
        note = f"every={every}: {every} steps save {every - 1} exchange(s)"
        assert note in str(plan.explain())


@pytest.mark.ranks(*SMALL, 4)
@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("periodic", [True, False])
def test_staggered_fields(periodic: bool, every: int, comm: World) -> None:
    """Leapfrog: faces are advanced from both cells, then cells from both faces."""
    procs = (2, 2) if comm.size == 4 else (comm.size, 1)
    results = []
    for halo in (1, every):
        with halox.Grid(
            (24, 10), halo=halo, periodic=periodic, proc_shape=procs, comm=comm, device="cpu"
        ) as grid:
            p, v = beyond_walls(grid, start(grid)), start(grid, staggered=0)
            grid.interior(v)[...] *= 0.1
            plan = grid.plan(p, v, every=halo)
            for _ in range(6 // halo):
                for faces, cells in zip(plan.steps(field=1), plan.steps(field=0), strict=True):
                    v[faces] += 0.1 * (p[faces] - p[faces.shifted(-1, 0)])
                    p[cells] += 0.1 * (v[cells.shifted(1, 0)] - v[cells])
            results.append((grid.interior(p).copy(), grid.interior(v).copy()))
    assert np.isfinite(results[0][0]).all()
    assert agree(all(map(np.array_equal, *results)), comm)


@pytest.mark.ranks(*SMALL)
@pytest.mark.parametrize("width", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"components": 2}, {"staggered": 0}, {"components_after": 3}]
)
def test_the_interior_comes_before_the_halo(
    options: dict[str, Any], width: int, comm: World
) -> None:
    """Regions of any width cover each owned cell once, also in blocks that are too thin for an interior."""
    with halox.Grid((6 * comm.size, 5), periodic=True, comm=comm, device="cpu") as grid:
        u = grid.ones(**options)
        plan = grid.plan(u, overlap=True)
        covered = np.zeros(u.shape, int)
        regions = list(plan.overlap(width=width))
        for region in regions:
            covered[region] += 1
        assert agree(
            (grid.interior(covered) == 1).all() and covered.sum() == grid.interior(u).size, comm
        )
        assert agree(len(regions) == {0: 1, 1: 5, 2: 5, 3: 1}[width], comm)
        text = str(plan.explain())
        assert ("no cells so far from its halo" in text) == (width == 3)
        assert f"overlap of field 0, width {width}: " in text


@pytest.mark.ranks(*SMALL)
@pytest.mark.parametrize("own", [True, False], ids=["fields", "arrays"])
def test_a_loop_that_is_left_ends_its_exchange(own: bool, comm: World) -> None:
    with halox.Grid((8 * comm.size, 8), periodic=True, comm=comm, device="cpu") as grid:
        u, v = grid.full(grid.rank + 1.0), grid.full(grid.rank + 1.0)
        if not own:
            u, v = u.copy(), v.copy()
        plan = grid.plan(u, overlap=True)
        above = (grid.rank + 1) % grid.size + 1.0
        for field in (u, v, u, v):
            field[-1] = 0
            for _ in plan.overlap(field, width=1):
                break
            assert agree((field[-1] == above).all(), comm)
            field[-1] = 0
            with pytest.raises(ZeroDivisionError):
                for _ in plan.overlap(field, width=1):
                    1 / 0  # noqa: B018
            assert agree((field[-1] == above).all(), comm)
        plan()


@pytest.mark.ranks(1, 2)
def test_loops_inside_loops(comm: World) -> None:
    with halox.Grid((8 * comm.size, 8), periodic=True, comm=comm, device="cpu") as grid:
        u, v = grid.ones(), grid.full(2.0)
        first, second = grid.plan(u, overlap=True), grid.plan(v, overlap=True)
        seen = [
            (outer, inner) for outer in first.overlap(width=1) for inner in second.overlap(width=1)
        ]
        assert len(seen) == 25
        assert agree((u == 1).all() and (v == 2).all(), comm)
        with pytest.raises(StateError):
            for _ in first.overlap(width=1):
                next(first.overlap(width=1))
        for _ in first.overlap(v, width=1):
            first(u)  # another plan


@pytest.mark.ranks(*SMALL)
@pytest.mark.parametrize("make", ["zeros", "numpy"])
def test_a_plan_exchanges_other_arrays(make: str, comm: World) -> None:
    with halox.Grid((5 * comm.size, 6), halo=2, periodic=True, comm=comm, device="cpu") as grid:
        pairs = [
            [np.zeros(grid.padded_shape), np.zeros((3, *grid.padded_shape), "i4")]
            if make == "numpy"
            else [grid.zeros(), grid.zeros("i4", components=3)]
            for _ in range(4)
        ]
        plan = grid.plan(*pairs[0])
        plans = []
        for turn in range(3):
            for pair in pairs:
                for field in pair:
                    field[...] = -1
                    grid.interior(field)[...] = 10 * turn + grid.rank
                plan(*pair)
                low, high = ((grid.rank + by) % grid.size + 10 * turn for by in (-1, 1))
                for field in pair:
                    assert agree((field[..., :2, :] == low).all(), comm)
                    assert agree((field[..., -2:, :] == high).all(), comm)
            plans.append(grid.plans_made)
        assert plans[0] == plans[1] == plans[2] == (2 if make == "numpy" else 4)


@pytest.mark.ranks(*SMALL)
def test_other_arrays_that_do_not_fit(comm: World) -> None:
    with halox.Grid((6 * comm.size, 6), periodic=True, comm=comm, device="cpu") as grid:
        plan = grid.plan(grid.zeros())
        wrong: list[tuple[Any, str]] = [
            (grid.zeros("f4"), "dtype=float32"),
            (grid.zeros(components=2), r"components=\(2,\)"),
            (grid.zeros(halo=2), r"halo=\(\(2, 2\), \(2, 2\)\)"),
            (grid.zeros(staggered=1), r"staggered=\(False, True\)"),
            (np.zeros(grid.padded_shape, order="F"), "strides"),
            (np.zeros((3, 3, 3)), "does not fit the grid"),
        ]
        for array, text in wrong:
            for call in (plan, plan.overlap, plan.steps):
                with pytest.raises(FieldError, match=text):
                    call(array)
        grid.exchange(wrong[0][0])  # an exchange knows it, and the plan still refuses it
        with pytest.raises(FieldError, match="dtype=float32"):
            plan(wrong[0][0])
        plan(grid.zeros())
        plan.close()
        for call in (plan, plan.overlap, plan.steps):
            for arrays in ((), (grid.zeros(),)):
                with pytest.raises(ClosedError):
                    call(*arrays)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("known", [False, True])
def test_an_array_that_does_not_fit_on_one_rank_alone(known: bool, comm: World) -> None:
    """All ranks raise the error of the rank, or the others a mismatch if they know their array."""
    with short_waits(20.0):
        grid = halox.Grid((16, 6), periodic=True, comm=comm.Dup(), device="cpu")
        plan, v = grid.plan(grid.zeros()), grid.zeros()
        if known:
            plan(v)
        kind = MismatchError if known and comm.rank == 0 else FieldError
        with pytest.raises(kind):
            plan(v if comm.rank == 0 else np.zeros(grid.padded_shape, "f4"))
            plan(v)  # the exchange of a late neighbour may have ended without it


Act = Callable[[halox.Grid, Any], object]


def on_grid(act: Act) -> Callable[[World], None]:
    """Return a call with a grid and one of its fields."""

    def call(comm: World) -> None:
        with halox.Grid((16, 16), halo=4, periodic=True, comm=comm, device="cpu") as grid:
            act(grid, grid.zeros())

    return call


def with_plan(act: Act) -> Callable[[World], None]:
    """Return a call with a grid and a plan of one of its fields."""
    return on_grid(lambda grid, u: act(grid, grid.plan(u)))


def cells(plan: Plan) -> Cells:
    return next(plan.steps())


def of_transpose(grid: halox.Grid, u: Any) -> Plan:
    return halox.Transpose(grid, grid).plan(u, grid.zeros())


TABLE: Table = {
    "no steps between exchanges": (
        on_grid(lambda grid, u: grid.plan(u, every=0)),
        FieldError,
        "every",
    ),
    "a number of steps that does not divide the halo": (
        on_grid(lambda grid, u: grid.plan(u, every=3)),
        FieldError,
        "every",
    ),
    "several steps without corners": (
        on_grid(lambda grid, u: grid.plan(u, every=2, corners=False)),
        FieldError,
        "every",
    ),
    "numbers of steps that differ between ranks >1": (
        on_grid(lambda grid, u: grid.plan(u, every=1 + grid.rank)),
        MismatchError,
        "every",
    ),
    "another word than auto for `overlap=`": (
        on_grid(lambda grid, u: grid.plan(u, overlap="on")),  # type: ignore[arg-type]
        FieldError,
        "overlap",
    ),
    "a negative width of an overlap": (
        with_plan(lambda _, plan: plan.overlap(width=-1)),
        FieldError,
        "width",
    ),
    "a width that is not an int": (
        with_plan(lambda _, plan: plan.overlap(width=1.5)),
        FieldError,
        "width",
    ),
    "a number of a field that the plan does not have": (
        with_plan(lambda _, plan: plan.steps(field=1)),
        FieldError,
        "field",
    ),
    "a name in place of the number of a field": (
        with_plan(lambda _, plan: plan.overlap(field="u")),
        FieldError,
        "field",
    ),
    "a call of a plan with another number of arrays": (
        with_plan(lambda grid, plan: plan(grid.zeros(), grid.zeros())),
        FieldError,
        "1 array",
    ),
    "a call of a plan with an array of another dtype": (
        with_plan(lambda grid, plan: plan(grid.zeros("f4"))),
        FieldError,
        "dtype",
    ),
    "a call of a transpose's plan with arrays": (
        on_grid(lambda grid, u: of_transpose(grid, u)(u, u)),
        FieldError,
        "only plans of grid.plan",
    ),
    "a loop over a transpose's plan": (
        on_grid(lambda grid, u: of_transpose(grid, u).overlap()),
        FieldError,
        "only plans of grid.plan",
    ),
    "cells shifted along another number of axes": (
        with_plan(lambda _, plan: cells(plan).shifted(1)),
        FieldError,
        "each of 2 grid axes",
    ),
    "cells shifted out of the array": (
        with_plan(lambda _, plan: cells(plan).shifted(-5, 0)),
        FieldError,
        "leaves the array",
    ),
}


@pytest.mark.ranks(1, 2)
def test_several_steps_with_a_phase_are_refused(comm: World) -> None:
    with halox.Grid(8, periodic=True, halo=2, comm=comm, device="cpu") as grid:
        u = grid.zeros("c16", components=2, boundary={0: ("phase", -1)})
        with pytest.raises(FieldError, match="every"):
            grid.plan(u, every=2)
        grid.plan(u)()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", TABLE)
def test_bad_input(name: str, comm: World) -> None:
    check_error(TABLE, name, comm)


def looped(plan: Plan, body: Callable[[Any], None]) -> int:
    """Run a loop, and return the number of its regions."""
    regions = 0
    for cells in plan.overlap(width=1):
        body(cells)
        regions += 1
    return regions


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("pays", [False, True])
def test_the_faster_way_is_kept(pays: bool, comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is a counter; the body takes a second a region, or ten seconds if a region is the whole block."""
    now = [0.0]
    monkeypatch.setattr(loops.time, "perf_counter", lambda: now[0])  # type: ignore[attr-defined]
    with halox.Grid((8, 8 * comm.size), periodic=True, comm=comm, device="cpu") as grid:
        plan = grid.plan(grid.zeros())

        def body(cells: Any) -> None:
            whole = tuple(cells.shape) == grid.rank_shape
            now[0] += 10.0 if pays and whole else 1.0

        first = [looped(plan, body) for _ in range(4)]
        assert first == [5, 1, 5, 1]
        assert "on until both ways are timed" in str(plan.explain())
        later = [looped(plan, body) for _ in range(20)]
        assert later[:6] == [5, 1] * 3
        assert set(later[6:]) == ({5} if pays else {1})
        text = "on, 5,000,000.0 us with and 10,000,000.0 us" if pays else "off, 5,000,000.0 us with"
        assert text in str(plan.explain())
        assert text in str(plan.explain().as_dict()["notes"])


@pytest.mark.ranks(1, 2)
def test_a_loop_that_is_left_is_not_timed(comm: World) -> None:
    with halox.Grid((8, 8 * comm.size), periodic=True, comm=comm, device="cpu") as grid:
        plan = grid.plan(grid.zeros())
        for _ in range(20):
            for _ in plan.overlap(width=1):
                break
        assert "on until both ways are timed" in str(plan.explain())


@pytest.mark.ranks(1, 2)
def test_neighbours_decide_alone(comm: World) -> None:
    """Ranks with and without overlap exchange the same messages."""
    with halox.Grid((8 * comm.size, 8), periodic=True, comm=comm, device="cpu") as grid:
        for u in (grid.zeros(), np.zeros(grid.padded_shape)):
            plan = grid.plan(u, overlap=comm.rank == 0)
            for turn in range(1, 20):
                grid.interior(u)[...] = turn * (comm.rank + 1)
                assert agree(looped(plan, lambda _: None) == (5 if comm.rank == 0 else 1), comm)
                above = (comm.rank + 1) % comm.size + 1
                assert agree((u[-1] == turn * above).all(), comm)


@pytest.mark.ranks(1, 2)
def test_overlap_hides_the_wait_for_a_late_neighbour(comm: World) -> None:
    """The interior is computed before a late neighbour has sent anything."""
    with halox.Grid((8 * comm.size, 8), periodic=True, comm=comm, device="cpu") as grid:
        plan = grid.plan(grid.zeros(), overlap=True)
        plan()
        comm.Barrier()
        begin = time.perf_counter()
        if comm.rank:
            time.sleep(0.3)
        after = [time.perf_counter() - begin for _ in plan.overlap(width=1)]
        if comm.rank == 0:
            assert after[0] < 0.25
            assert comm.size == 1 or after[1] > 0.25
        else:
            assert after[0] > 0.25
        comm.Barrier()


@pytest.mark.ranks(1, 2)
def test_swapped_names_are_noticed_in_debug_mode(
    comm: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[Callable[[Plan], object]] = [
        lambda plan: plan(),
        lambda plan: (plan.start(), plan.finish()),
        lambda plan: [*plan.overlap()],
        lambda plan: [*plan.steps()],
    ]
    for (debug, wrong), call in product((("0", True), ("1", False), ("1", True)), ways):
        monkeypatch.setenv("HALOX_DEBUG", debug)
        with halox.Grid((8 * comm.size, 8), periodic=True, comm=comm, device="cpu") as grid:
            u, new = grid.ones(), grid.zeros()
            plan = grid.plan(u)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for turn in range(6):
                    call(plan)
                    new[...] = turn + 2
                    if wrong:
                        u, new = new, u
                    else:
                        u[...] = new
            texts = [str(one.message) for one in caught]
            assert len(texts) == (debug == "1" and wrong), texts
            assert not texts or "names of arrays were swapped" in texts[0]
