"""Declared layouts, and cached plans, which serve only the calls that they were made for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import ClosedError, FieldError, MismatchError
from tests.limits import cache_few_plans
from tests.mpi.conftest import agree

pytestmark = pytest.mark.usually(2, 3)

World = MPI.Intracomm
POISON = -7.0


@pytest.fixture
def grid(comm: World) -> Iterator[halox.Grid]:
    """A grid of four rows per rank, periodic along the first axis; fields hold the global numbers of their rows."""
    options: dict[str, Any] = {"periodic": (True, False), "proc_shape": (comm.size, 1)}
    with halox.Grid((4 * comm.size, 6), halo=1, comm=comm, device="cpu", **options) as g:
        yield g


def rows(grid: halox.Grid, low: int, high: int) -> np.ndarray:
    """Return the value that each row of an array with these halos must hold."""
    first = grid.owned[0].start
    return np.arange(first - low, first + 4 + high) % grid.grid_shape[0]


def fill(grid: halox.Grid, u: Any, low: int, high: int) -> None:
    u[...] = POISON
    u[low : len(u) - high] = rows(grid, 0, 0)[:, None]


def is_exchanged(grid: halox.Grid, u: Any, low: int, high: int) -> bool:
    """Whether each row holds its value; the columns of the halo do not count."""
    return bool(np.array_equal(u[:, 1:-1], np.broadcast_to(rows(grid, low, high)[:, None], (6, 6))))


# Layouts


@pytest.mark.ranks(2, 3, 4)
def test_a_sum_refuses_an_array_of_another_ranks_shape(comm: World) -> None:
    """Shape (7, 10) is a plain field on a rank with 5 rows; ranks with 4 rows do not take it for a staggered field."""
    shape, procs = (4 * comm.size + 1, 8), (comm.size, 1)
    with halox.Grid(shape, halo=1, proc_shape=procs, comm=comm, device="cpu") as g:
        for reduce in (g.sum, g.max, g.norm, g.gather):
            with pytest.raises(FieldError):
                reduce(np.ones((7, 10)))
        assert g.sum(np.ones(g.padded_shape)) == 8 * shape[0]


def test_an_array_of_ones_own_is_staggered_only_if_declared(grid: halox.Grid, comm: World) -> None:
    u = np.zeros((7, 8))
    for call in (grid.exchange, grid.sum, grid.interior):
        with pytest.raises(FieldError):
            call(u)
    grid.declare(u, staggered=0)
    fill(grid, u, 1, 2)
    grid.exchange(u)
    assert agree(bool((u[:, 3] == rows(grid, 1, 2)).all()), comm)


LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "halos": [{"halo": ((2, 1), (1, 1))}, {"halo": ((1, 2), (1, 1))}],
    "a stencil's reach": [{"halo": 2}, {"halo": 2, "offsets": 1}, {"halo": 2, "offsets": (1, 2)}],
    "staggering": [{"staggered": 1}, {"halo": ((1, 1), (1, 2))}, {"halo": ((1, 1), (2, 1))}],
    "components": [{"components": (6, 8)}, {"components": (..., 6, 8)}],
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_an_array_of_several_layouts_is_declared(case: str, grid: halox.Grid) -> None:
    fields = [grid.zeros(**options) for options in LAYOUTS[case]]
    for u in fields:
        grid.interior(u)[...] = 1 + np.arange(grid.interior(u).size).reshape(grid.interior(u).shape)
    assert len({u.shape for u in fields}) == 1
    for number, u in enumerate(fields):
        array = 2 * u
        for call in (grid.sum, grid.exchange, grid.gather):
            with pytest.raises(FieldError) as caught:
                call(array)
            assert "grid.declare" in str(caught.value)
        assert grid.declare(array, **LAYOUTS[case][number]) is array
        assert grid.layout(array) is grid.layout(u)
        assert grid.sum(array) == 2 * grid.sum(u)


@pytest.mark.ranks(2, 3, 4)
def test_reductions_compare_layouts(grid: halox.Grid, comm: World) -> None:
    u = np.ones(grid.padded_shape)
    grid.declare(u, halo=((2, 0), 1) if comm.rank == 1 else 1)
    for reduce in (grid.sum, grid.min, grid.norm):
        with pytest.raises(MismatchError, match="halo"):
            reduce(u)
    v = grid.ones("f4" if comm.rank == 1 else "f8")
    with pytest.raises(MismatchError):
        grid.sum(v)
    with pytest.raises(MismatchError):
        grid.dot(grid.ones(), v)
    assert grid.sum(grid.ones()) == 24 * comm.size, "and the grid goes on"


# Plans


def test_a_declaration_drops_what_was_cached(grid: halox.Grid, comm: World) -> None:
    u, v = np.empty(grid.padded_shape), np.empty(grid.padded_shape)
    # Halo widths, and the number of plans then made: an earlier declaration finds its plan again.
    for (low, high), plans in (((1, 1), 1), ((2, 0), 2), ((0, 2), 3), ((1, 1), 3), ((2, 0), 3)):
        if plans > 1:
            grid.declare(u, halo=((low, high), 1))
        for _ in range(2):
            fill(grid, u, low, high)
            comm.Barrier()
            grid.exchange(u)
            assert agree(is_exchanged(grid, u, low, high), comm), (low, high)
        assert grid.domain.plans_made == plans
    grid.exchange(u, v)
    grid.declare(v, halo=((0, 2), 1))
    fill(grid, u, 2, 0)
    fill(grid, v, 0, 2)
    comm.Barrier()
    grid.exchange(u, v)
    assert agree(is_exchanged(grid, u, 2, 0) and is_exchanged(grid, v, 0, 2), comm)


def test_a_declaration_drops_what_transposes_have_cached(grid: halox.Grid, comm: World) -> None:
    with halox.Grid(grid.grid_shape, halo=0, proc_shape=grid.proc_shape, comm=comm) as other:
        u, v = np.empty(grid.padded_shape), other.zeros()
        with halox.Transpose(grid, other) as transpose:
            for low, high in ((1, 1), (2, 0), (1, 1)):
                grid.declare(u, halo=((low, high), 1))
                fill(grid, u, low, high)
                transpose.forward(u, v)
                assert agree(bool((v[:, 0] == rows(grid, 0, 0)).all()), comm), (low, high)


def test_a_view_of_a_whole_field_is_that_field(grid: halox.Grid, comm: World) -> None:
    halo = ((2, 0), 1)
    mine = np.empty(grid.padded_shape)
    grid.exchange(mine[:])  # with the grid's halo; declared later
    grid.declare(mine, halo=halo)
    # The second is a view that outlives the grid's array; the third is declared through a view.
    fields = [mine, grid.zeros(halo=halo)[...], np.empty(grid.padded_shape)]
    grid.declare(fields[2][:], halo=halo)
    for u in fields:
        for v in (u[:], u[...], u):
            fill(grid, u, 2, 0)
            comm.Barrier()
            grid.exchange(v)
            assert agree(is_exchanged(grid, u, 2, 0), comm)
            assert grid.interior(v).shape == grid.rank_shape
    assert grid.domain.plans_made == 3, "the first and the third are of one layout"
    # A view with another shape, stride or dtype is read by its shape.
    state = grid.declare(np.zeros((2, *grid.padded_shape)), components=2, halo=halo)
    assert grid.layout(state[0]).spec.halo == grid.halo
    assert grid.layout(mine.view("i8")).spec.halo == grid.halo
    assert grid.layout(mine[::-1]).spec.halo == grid.halo


@pytest.mark.parametrize(("operation", "number"), [("exchange", 1), ("accumulate", 2)])
def test_a_changed_array_is_noticed(
    operation: str, number: int, grid: halox.Grid, comm: World
) -> None:
    fields = [np.zeros(grid.padded_shape) for _ in range(number)]
    call, u = getattr(grid, operation), fields[-1]
    call(*fields)
    call(*fields)

    u.flags.writeable = False
    for _ in range(2):
        with pytest.raises(FieldError, match="read-only"):
            call(*fields)
    u.flags.writeable = True
    call(*fields)
    u.shape = (48,)
    for _ in range(2):
        with pytest.raises(FieldError):
            call(*fields)
    with pytest.raises(FieldError):
        grid.sum(u)
    u.shape = grid.padded_shape
    call(*fields)
    assert grid.domain.plans_made == 1, "the first one was found again"
    u.shape = (1, *grid.padded_shape)  # a component axis
    for _ in range(3):
        call(*fields)
    u.dtype = "i8"
    u[...] = 1 << 60  # other bits than a sum of floats
    if operation == "accumulate":
        call(*fields)
        assert agree(bool((grid.interior(u)[0, 0] == 2 << 60).all()), comm), "added as integers"


def test_an_array_that_was_changed_is_another_one_beside_others(
    grid: halox.Grid, comm: World
) -> None:
    u, v = np.zeros((*grid.padded_shape, 1)), np.zeros(grid.padded_shape)
    grid.exchange(u)
    grid.exchange(u, v)
    u.shape = grid.padded_shape
    grid.exchange(u)
    fill(grid, u, 1, 1)
    comm.Barrier()
    grid.exchange(u, v)
    assert agree(is_exchanged(grid, u, 1, 1), comm)
    assert grid.domain.plans_made == 4


@pytest.mark.usually(2)
@pytest.mark.parametrize("closed", ["a", "b"])
def test_a_transpose_ends_with_either_grid(closed: str, comm: World) -> None:
    procs = {"a": (comm.size, 1), "b": (1, comm.size)}
    grids = {
        name: halox.Grid((2 * comm.size,) * 2, proc_shape=p, comm=comm, device="cpu")
        for name, p in procs.items()
    }
    u, v = grids["a"].ones(), grids["b"].zeros()
    transpose = halox.Transpose(grids["a"], grids["b"])
    plan = transpose.plan(u, v, backward=True)
    transpose.forward(u, v)
    plan()
    grids[closed].close()
    for call in (lambda: transpose.forward(u, v), lambda: transpose.backward(v, u), plan):
        with pytest.raises(ClosedError):
            call()
    transpose.close()
    for each in grids.values():
        each.close()


# Evictions


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make room for few plans."""
    cache_few_plans(monkeypatch, 3)
    return 3


def test_plans_are_evicted_alike_whatever_ranks_keep(small: int, comm: World) -> None:
    kept = []
    with halox.Grid((4 * comm.size, 6), periodic=True, comm=comm.Dup(), device="cpu") as g:
        u = g.ones()
        g.exchange(u)
        for n in range(small + 3):
            w = g.full(n)
            g.exchange(w)
            if g.rank == 0:
                kept.append(w)
        for _ in range(3):
            g.exchange(u)
        assert agree(g.domain.plans_made == small + 5, comm), "the first one was evicted on all"


def test_transposes_evict_alike(small: int, comm: World) -> None:
    kept = []
    procs = [(comm.size, 1), (1, comm.size)]
    shape, group = (2 * comm.size,) * 2, comm.Dup()
    a, b = (halox.Grid(shape, proc_shape=p, comm=group, device="cpu") for p in procs)
    with a, b, halox.Transpose(a, b) as transpose:
        u, v = a.full(3), b.zeros()
        transpose.forward(u, v)
        for n in range(small + 3):
            w = u + n
            transpose.forward(w, v)
            if a.rank == comm.size - 1:
                kept.append(w)
        transpose.forward(u, v)
        assert agree(bool((b.interior(v) == 3).all()), comm)


def test_explicit_plans_evict_nothing(small: int, grid: halox.Grid) -> None:
    u = grid.zeros()
    grid.exchange(u)
    plans = [grid.plan(grid.zeros()) for _ in range(small + 2)]
    before = grid.domain.plans_made
    grid.exchange(u)
    assert grid.domain.plans_made == before and len(plans) == small + 2


@pytest.mark.ranks(1)
@pytest.mark.usually(1)
def test_a_cached_exchange_makes_three_calls(comm: World) -> None:
    """The method, the cache look-up and the plan: each Python call costs a tenth of the exchange."""
    with halox.Grid((8, 8), comm=comm, device="cpu") as g:
        fields = [g.zeros() for _ in range(2)]
        for call in (g.exchange, g.accumulate):
            for arguments in (fields[:1], fields):
                call(*arguments)
                calls: list[str] = []
                sys.setprofile(
                    lambda f, e, _, c=calls: c.append(f.f_code.co_name) if e == "call" else None
                )
                try:
                    call(*arguments)
                finally:
                    sys.setprofile(None)
                assert len(calls) <= 3, calls


def test_a_plan_accumulates_as_the_grid_does(comm: MPI.Intracomm) -> None:
    """Its own arrays, and others; with the options of the plan."""
    with halox.Grid((7, 9), boundary="reflect", comm=comm, device="cpu") as grid:
        start = np.random.default_rng(comm.rank).integers(0, 9, grid.padded_shape).astype("f8")
        u, other, wanted = grid.zeros(), start.copy(), start.copy()
        u[...] = start
        plan = grid.plan(u, corners=False)
        plan.accumulate()
        plan.accumulate(other)
        grid.accumulate(wanted, corners=False)
        right = [np.array_equal(u, wanted), np.array_equal(other, wanted)]
        plan()
        grid.exchange(wanted, corners=False)
        right.append(np.array_equal(u, wanted))
    assert all(comm.allgather(all(right))), right
