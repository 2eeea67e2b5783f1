"""Exchanges during computation, plans called with other arrays, and several steps for each exchange.

Steps have the same bits as steps of the whole grid on one process. test_exchange.py compares the regions of random
fields.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import halox
from halox.errors import ClosedError, FieldError, MismatchError, StateError
from tests.mpi.conftest import PART, SMALL, agree
from tests.mpi.limits import short_waits
from tests.oracle import divide, factorisations
from tests.strategies import on_ranks
from tests.support import trials

World = MPI.Intracomm


def stencil(u: Any, at: Callable[..., Any], ndim: int, width: int) -> Any:
    """Compute a star stencil of a width; sums are in the same order for every cell."""
    total = u[at(*[0] * ndim)] * 0.5
    for axis, by in product(range(ndim), range(1, width + 1)):
        for sign in (-by, by):
            total = total + u[at(*[sign * (a == axis) for a in range(ndim)])] / 8
    return total


def serial(whole: Any, periodic: bool, width: int) -> Any:
    """Return the whole grid after a step; the value beyond walls is 0.5."""
    options: Any = {"mode": "wrap"} if periodic else {"constant_values": 0.5}
    padded = np.pad(whole, width, **options)

    def at(*by: int) -> tuple[slice, ...]:
        return tuple(slice(width + k, width + k + n) for k, n in zip(by, whole.shape, strict=True))

    return stencil(padded, at, whole.ndim, width)


@st.composite
def deep_grids(draw: st.DrawFn, ranks: int) -> tuple[Any, ...]:
    """Block sizes, periodicity, the width of a stencil, and the steps between exchanges."""
    ndim = draw(st.integers(1, 3))
    procs = draw(st.sampled_from(factorisations(ranks, ndim)))
    width, every = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]))
    # Halos may be wider than blocks, and than the grid.
    shape = [draw(st.integers(p, 14 + 3 * p)) for p in procs]
    return divide(shape, procs), draw(st.booleans()), width, every


@on_ranks(deep_grids, trials(120), part=PART)
def test_several_steps_for_each_exchange(case: Any, comm: World) -> None:
    blocks, periodic, width, every = case
    shape = tuple(map(sum, blocks))
    options: Any = {"periodic": periodic, "proc_shape": tuple(map(len, blocks)), "device": "cpu"}
    whole, right = np.random.default_rng(5).random(shape), []
    with halox.Grid(shape, halo=width * every, comm=comm, **options) as grid:
        fields = grid.full(0.5), grid.full(0.5)
        grid.interior(fields[0])[...] = whole[grid.owned]
        plan, others = grid.plan(fields[0], every=every, overlap=True), [u.copy() for u in fields]
        for pair in (fields, others):  # the second arrays are not the grid's
            (u, new), expected = pair, whole
            for _ in range(2):
                for cells in plan.steps(u) if every > 1 else [None]:
                    regions = [cells] if cells else plan.overlap(u, width=width)
                    for region in regions:
                        new[region] = stencil(u, region.shifted, len(shape), width)
                    u, new = new, u
                    expected = serial(expected, periodic, width)
            right.append(np.array_equal(grid.interior(u), expected[grid.owned]))
    assert all(right), right


@pytest.mark.ranks(*SMALL, 4)
@pytest.mark.parametrize(("periodic", "every"), [(True, 2), (False, 3)])
def test_staggered_fields(periodic: bool, every: int, comm: World) -> None:
    """Leapfrog: faces are advanced from both cells, then cells from both faces."""
    procs = (2, 2) if comm.size == 4 else (comm.size, 1)
    results = []
    for halo in (1, every):
        with halox.Grid(
            (24, 10), halo=halo, periodic=periodic, proc_shape=procs, comm=comm, device="cpu"
        ) as grid:
            p, v = grid.full(0.5), grid.full(0.5, staggered=0)
            for field in (p, v):
                whole = np.random.default_rng(5).random(grid.layout(field).global_shape)
                grid.interior(field)[...] = whole[grid.layout(field).owned]
            plan = grid.plan(p, v, every=halo)
            for _ in range(6 // halo):
                for faces, cells in zip(plan.steps(field=1), plan.steps(field=0), strict=True):
                    v[faces] += 0.1 * (p[faces] - p[faces.shifted(-1, 0)])
                    p[cells] += 0.1 * (v[cells.shifted(1, 0)] - v[cells])
            results.append((grid.interior(p).copy(), grid.interior(v).copy()))
    assert np.isfinite(results[0][0]).all()
    assert agree(all(map(np.array_equal, *results)), comm)


@pytest.mark.ranks(2)
def test_regions_in_the_report(comm: World) -> None:
    """Blocks of 6 x 5 cells: five regions, or one if all cells are near the halo."""
    with halox.Grid((6 * comm.size, 5), periodic=True, comm=comm, device="cpu") as grid:
        plan = grid.plan(grid.ones(), overlap=True)
        assert [len(list(plan.overlap(width=width))) for width in (0, 1, 2, 3)] == [1, 5, 5, 1]
        text = str(plan.explain())
        assert text.count("no cells so far from its halo") == 1
        assert all(f"overlap of field 0, width {width}: " in text for width in (0, 1, 2, 3))


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


@pytest.mark.ranks(2)
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
            plans.append(grid.domain.plans_made)
        assert plans[0] == plans[1] == plans[2] == (2 if make == "numpy" else 4)


def test_a_loop_keeps_its_arrays_if_others_are_exchanged_before_it(comm: World) -> None:
    """Both are new arrays of one layout, which share a plan."""
    with halox.Grid((5 * comm.size, 6), periodic=True, comm=comm, device="cpu") as grid:
        plan = grid.plan(grid.zeros(), overlap=True)
        first, second = (np.full(grid.padded_shape, -1.0) for _ in range(2))
        for array in (first, second):
            grid.interior(array)[...] = grid.rank
        loop = plan.overlap(first)
        plan(second)
        second[...] = -2
        for _ in loop:
            pass
        assert agree((first[0] == (grid.rank - 1) % grid.size).all(), comm)
        assert agree((second == -2).all(), comm)


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


BAD: dict[str, tuple[Callable[[halox.Grid, Any], object], str]] = {
    "no steps between exchanges": (lambda grid, u: grid.plan(u, every=0), "every"),
    "steps that do not divide the halo": (lambda grid, u: grid.plan(u, every=3), "every"),
    "several steps without corners": (
        lambda grid, u: grid.plan(u, every=2, corners=False),
        "every",
    ),
    "several steps along one axis": (lambda grid, u: grid.plan(u, every=2, axes="x"), "every"),
    "numbers of steps that differ between ranks": (
        lambda grid, u: grid.plan(u, every=1 + grid.rank),
        "every",
    ),
    "another word than auto": (lambda grid, u: grid.plan(u, overlap="on"), "overlap"),  # type: ignore[arg-type]
    "arrays for a plan of a transpose": (lambda grid, u: of_transpose(grid, u)(u, u), "grid.plan"),
    "a loop over a plan of a transpose": (
        lambda grid, u: of_transpose(grid, u).overlap(),
        "grid.plan",
    ),
    "a negative width of an overlap": (lambda grid, u: grid.plan(u).overlap(width=-1), "width"),
    "a width that is not an int": (lambda grid, u: grid.plan(u).overlap(width=1.5), "width"),
    "a field that the plan does not have": (lambda grid, u: grid.plan(u).steps(field=1), "field"),
    "a name of a field": (lambda grid, u: grid.plan(u).overlap(field="u"), "field"),
    "another number of arrays": (lambda grid, u: grid.plan(u)(u, grid.zeros()), "1 array"),
    "cells shifted along another number of axes": (
        lambda grid, u: next(grid.plan(u).steps()).shifted(1),
        "each of 2 grid axes",
    ),
    "cells shifted out of the array": (
        lambda grid, u: next(grid.plan(u).steps()).shifted(-5, 0),
        "leaves the array",
    ),
}


def of_transpose(grid: halox.Grid, u: Any) -> Any:
    return halox.Transpose(grid, grid).plan(u, grid.zeros())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, comm: World) -> None:
    call, word = BAD[name]
    with (
        halox.Grid((16, 16), halo=4, periodic=True, comm=comm, device="cpu") as grid,
        pytest.raises((FieldError, MismatchError), match=word),
    ):
        call(grid, grid.zeros())


@pytest.mark.ranks(2)
def test_several_steps_with_a_phase_are_refused(comm: World) -> None:
    with halox.Grid(8, periodic=True, halo=2, comm=comm, device="cpu") as grid:
        u = grid.zeros("c16", components=2, boundary={0: ("phase", -1)})
        with pytest.raises(FieldError, match="every"):
            grid.plan(u, every=2)
        grid.plan(u)()


def looped(plan: Any, body: Callable[[Any], None]) -> int:
    """Run a loop, and return the number of its regions."""
    regions = 0
    for cells in plan.overlap(width=1):
        body(cells)
        regions += 1
    return regions


@pytest.mark.ranks(2)
@pytest.mark.parametrize("pays", [False, True])
def test_the_faster_way_is_kept(pays: bool, comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is a counter; the body takes a second a region, or ten seconds if a region is the whole block."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
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


@pytest.mark.ranks(2)
def test_a_loop_that_is_left_is_not_timed(comm: World) -> None:
    with halox.Grid((8, 8 * comm.size), periodic=True, comm=comm, device="cpu") as grid:
        plan = grid.plan(grid.zeros())
        for _ in range(20):
            for _ in plan.overlap(width=1):
                break
        assert "on until both ways are timed" in str(plan.explain())


@pytest.mark.ranks(2)
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


@pytest.mark.ranks(2)
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
