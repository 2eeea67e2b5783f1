"""New NumPy arrays in each step: the plan of their layout exchanges them, at the cost of new views."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import halox
from halox.errors import FieldError, MismatchError, StateError
from tests.limits import cache_few_plans
from tests.mpi.conftest import PART, agree
from tests.oracle import Case, allocated, exchange_all
from tests.strategies import cells, on_ranks
from tests.support import trials

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.usually(2, 3)]

World = MPI.Intracomm
SHAPE = (24, 10)


@pytest.fixture
def grid(comm: World) -> Iterator[halox.Grid]:
    options: dict[str, Any] = {"proc_shape": (comm.size, 1), "device": "cpu"}
    with halox.Grid(SHAPE, halo=1, periodic=(True, False), comm=comm.Dup(), **options) as g:
        yield g


def serial(steps: int) -> np.ndarray:
    """Return the whole grid after some steps with `stencil`, on one process."""
    u = np.arange(float(np.prod(SHAPE))).reshape(SHAPE)
    for _ in range(steps):
        padded = np.pad(u, ((1, 1), (0, 0)), mode="wrap")
        padded = np.pad(padded, ((0, 0), (1, 1)))
        u = u + 0.1 * stencil(padded)
    return u


def stencil(u: np.ndarray) -> np.ndarray:
    """Apply a stencil of five points and a corner, so that missing corners change the result."""
    inner = u[1:-1, 1:-1]
    around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    return around - 4 * inner + 0.5 * u[:-2, :-2]


def start(grid: halox.Grid, order: str = "C") -> np.ndarray:
    u = np.zeros(grid.padded_shape, order=order)  # type: ignore[call-overload]
    i, j = grid.indices()
    u[1:-1, 1:-1] = i * SHAPE[1] + j
    return u


def halo_of(grid: halox.Grid, u: np.ndarray) -> np.ndarray:
    """Return the rows that an exchanged copy of the field must have, halos of the first axis included."""
    owned = grid.owned[0]
    return np.take(u, range(owned.start - 1, owned.stop + 1), axis=0, mode="wrap")


def test_steps_of_new_arrays_equal_a_serial_run(grid: halox.Grid) -> None:
    u, plans = start(grid), []
    for _ in range(20):
        grid.exchange(u)
        plans.append(grid.domain.plans_made)
        new = np.zeros_like(u)
        new[1:-1, 1:-1] = u[1:-1, 1:-1] + 0.1 * stencil(u)
        u = new
    assert plans == [1] * 20, "the first one served all"
    assert np.array_equal(u[1:-1, 1:-1], serial(20)[grid.owned])


ORDERS = ["C", "F", "turned", "backwards", "part"]


@on_ranks(
    lambda ranks: st.tuples(cells(ranks), st.lists(st.sampled_from(ORDERS), min_size=3)),
    trials(120),
    part=PART,
)
def test_new_arrays_of_any_layout(given: tuple[Case, list[str]], comm: World) -> None:
    """Fields in some order in memory: plans of earlier arrays serve later ones, and keep none of them alive."""
    (case, orders), right, gone = given, [], []
    with case.grid(comm) as grid:
        like = case.make(grid)
        for _ in range(3):
            fields = [
                grid.declare(allocated(grid, u, order), **f.options())
                for f, u, order in zip(case.fields, like, orders, strict=False)
            ]
            right.append(exchange_all(case, grid, [(fields, grid.exchange)] * 2))
            gone += [weakref.ref(u) for u in fields]
            del fields
        right.append(all(one() is None for one in gone))  # without a collection
    assert all(right), right


def test_more_arrays_than_a_plan_views(grid: halox.Grid) -> None:
    """Known memory is found again, also for new array objects, beside more memory than a plan keeps views of."""
    n, m = grid.padded_shape
    block = np.zeros((40, n, m + 1), [("x", "f8")])
    whole, right = serial(0), []
    for call, number in enumerate([0, 1, 0, 1, *range(40), 0, 39]):
        u = block[number, :, 1:]
        u["x"] = -1
        u["x"][1:-1, 1:-1] = whole[grid.owned] + call
        grid.exchange(u)
        right.append(np.array_equal(u["x"][:, 1:-1], halo_of(grid, whole) + call))
    assert all(right) and grid.domain.plans_made == 1


def test_other_strides_are_other_layouts(grid: halox.Grid) -> None:
    n, m = grid.padded_shape
    makers: list[Callable[[], np.ndarray]] = [
        lambda: np.zeros((n, m)),
        lambda: np.zeros((m, n)).T,
        lambda: np.zeros((n, 2 * m))[:, ::2],
        lambda: np.zeros((n, m))[::-1],
        lambda: np.zeros((n + 2, m + 3))[1:-1, 2:-1],
        lambda: np.zeros((n, m), "f4,f8")["f1"],  # not even aligned
    ]
    whole = serial(1)
    for repeat in range(3):
        for number, make in enumerate(makers, 1):
            u = make()
            u[1:-1, 1:-1] = whole[grid.owned]
            grid.exchange(u)
            assert np.array_equal(u[:, 1:-1], halo_of(grid, whole)), (repeat, number)
            assert grid.domain.plans_made == (number if not repeat else len(makers))


def test_orders_that_one_rank_cannot_tell_apart(comm: World) -> None:
    """A single column is in C and in Fortran order at once; ranks with two columns can distinguish the orders."""
    columns = 2 * comm.size - (comm.size > 1)
    options: dict[str, Any] = {"proc_shape": (1, comm.size), "device": "cpu"}
    with halox.Grid((6, columns), halo=((1, 1), (0, 0)), periodic=True, comm=comm, **options) as g:
        owned, again = g.owned[1], []
        whole = np.arange(6.0 * columns).reshape(6, columns)
        expected = np.pad(whole, ((1, 1), (0, 0)), mode="wrap")[:, owned]
        ok = True
        for order in "CFCF":
            for u in (np.full(g.padded_shape, -1.0, order=order), *again):  # type: ignore[call-overload]
                u[1:-1] = whole[:, owned]
                u[[0, -1]] = -1
                # The values below show whether the exchange worked.
                with contextlib.suppress(MismatchError, StateError):
                    g.exchange(u)
                ok &= bool((u == expected).all())
            again = [*again, u]
        assert agree(ok, comm)


def test_new_arrays_and_known_arrays_pack_alike(grid: halox.Grid, comm: World) -> None:
    """Rank 0 passes one array again and again; other ranks pass new arrays."""
    again = start(grid, "F")
    for step in range(4):
        u = again if comm.rank == 0 else start(grid, "F")
        u[...] = -1
        grid.interior(u)[...] = grid.interior(start(grid)) + step
        grid.exchange(u)
        assert agree(bool(np.array_equal(u[:, 1:-1], halo_of(grid, serial(0)) + step)), comm)


@pytest.mark.ranks(2)
def test_fields_that_are_declared_are_not_taken_for_new_arrays(grid: halox.Grid) -> None:
    """A declared field and its views have a separate plan, also with the shape, strides and dtype of other arrays."""
    declared = grid.declare(start(grid), staggered=1, halo=((1, 1), (0, 1)))
    for _ in range(3):
        grid.exchange(start(grid))
        grid.exchange(declared)
        grid.exchange(declared[:])
        assert grid.domain.plans_made == 2


def test_accumulations_of_new_arrays(grid: halox.Grid) -> None:
    for _ in range(3):
        ones, more = np.ones(grid.padded_shape), np.ones(grid.padded_shape, "i8")
        grid.accumulate(ones, more)
        for w in (ones, more):
            # The first and the last row receive a neighbour's halo row. No rank owns the halo columns.
            expected = np.ones(grid.rank_shape)
            expected[[0, -1]] += 1
            assert np.array_equal(w[1:-1, 1:-1], expected)
            assert not w[[0, -1], 1:-1].any(), "and these are cleared"
        with pytest.raises(FieldError, match="share memory"):
            grid.accumulate(ones, ones.view("i8"))  # the layouts of the known plan
    assert grid.domain.plans_made == 1


def test_a_read_only_array_of_a_known_layout_is_refused(grid: halox.Grid) -> None:
    for _ in range(3):
        grid.exchange(start(grid))
    u = start(grid)
    u.flags.writeable = False
    with pytest.raises(FieldError, match="read-only"):
        grid.exchange(u)
    grid.exchange(start(grid))
    assert grid.domain.plans_made == 1


@pytest.mark.ranks(2, 3)
def test_ranks_that_differ_work_or_raise(grid: halox.Grid, comm: World) -> None:
    """Rank 0 passes a field of the grid, other ranks pass arrays of the user."""
    own = grid.zeros()
    mine = own if comm.rank == 0 else start(grid)
    for _ in range(3):
        mine[...] = start(grid)
        grid.exchange(mine)
        assert agree(bool(np.array_equal(mine[:, 1:-1], halo_of(grid, serial(0)))), comm)
    for _ in range(2):
        grid.exchange(start(grid))
        grid.exchange(mine)
    assert grid.domain.plans_made == 2
    # Rank 0 has no plan for its field yet; other ranks have the plan of the layout.
    other = grid.zeros()
    bad = other if comm.rank == 0 else start(grid)
    with pytest.raises(MismatchError):
        grid.exchange(bad)


@pytest.mark.ranks(2, 3)
def test_a_layout_that_one_rank_alone_knows_raises(grid: halox.Grid, comm: World) -> None:
    grid.exchange(start(grid))
    with pytest.raises(MismatchError):
        grid.exchange(start(grid, "F" if comm.rank == 0 else "C"))


@pytest.mark.ranks(2, 3)
def test_a_bad_argument_of_one_rank_is_told_there(grid: halox.Grid, comm: World) -> None:
    """The other ranks have a plan for the layout, and only detect that the calls differ."""
    grid.exchange(start(grid))
    bad = np.zeros((3, 3)) if comm.rank == 0 else start(grid)
    kind, text = (FieldError, "shape") if comm.rank == 0 else (MismatchError, "different calls")
    with pytest.raises(kind, match=text):
        grid.exchange(bad)


def test_eviction_is_alike_whatever_ranks_collect(
    grid: halox.Grid, comm: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks evict alike, although rank 0 keeps every array and other ranks drop each at once."""
    cache_few_plans(monkeypatch, 3)
    kept, numbers = [], []
    for step in range(12):
        dtype = ["f8", "f4", "i8", "i4", "i2"][7 * step % 5]
        u = start(grid).astype(dtype)
        grid.exchange(u)
        assert np.array_equal(u[:, 1:-1], halo_of(grid, serial(0)).astype(dtype))
        numbers.append(grid.domain.plans_made)
        kept += [u] * (comm.rank == 0)
        del u
    assert comm.allgather(numbers) == [numbers] * comm.size
    assert max(numbers) > 5


@pytest.mark.parametrize("options", [{"components": 3}, {"staggered": (0, 1), "halo": 2}])
def test_results_of_arithmetic_have_the_layout_of_their_fields(
    grid: halox.Grid, options: dict[str, Any], comm: World
) -> None:
    u = grid.zeros(**options)
    layout = grid.layout(u)
    u[layout.interior] = np.random.default_rng(comm.rank).random(u[layout.interior].shape)
    copies = [u * 2 + n for n in range(3)]
    grid.exchange(u)
    for n, v in enumerate(copies):
        assert grid.layout(v) is layout
        assert not np.array_equal(v, u * 2 + n), "poisoned"
        grid.exchange(v)
        assert np.array_equal(v, u * 2 + n)


def test_ambiguous_results_are_refused_with_the_remedy(comm: World) -> None:
    options: dict[str, Any] = {"proc_shape": (comm.size,), "comm": comm.Dup(), "device": "cpu"}
    with halox.Grid(8 * comm.size, halo=1, **options) as g:
        n = 10
        u = g.zeros(components=n)
        assert u.shape == (n, n)
        v = u + 1
        assert g.layout(v) is g.layout(u), "the one reading that a field of this grid has"
        for _ in range(3):
            g.exchange(u + 1)
        g.zeros(components=(..., n))
        for call in (g.layout, g.exchange):
            with pytest.raises(FieldError):
                call(u + 1)
        g.exchange(g.declare(v, components=n))


def test_like(grid: halox.Grid) -> None:
    u = grid.full(3, "f4", components=2, staggered=1)
    for make, value in ((grid.zeros_like, 0), (grid.ones_like, 1), (grid.empty_like, None)):
        v = make(u)
        assert v.dtype == u.dtype and v.shape == u.shape and grid.layout(v) is grid.layout(u)
        assert value is None or (v == value).all()
        assert make(u, "i8").dtype == np.int64
    v = grid.full_like(u, 7)
    assert (v == 7).all() and grid.layout(v) is grid.layout(u)
    grid.exchange(u, v)
    mine = np.zeros(grid.padded_shape)
    assert grid.zeros_like(mine).shape == mine.shape
    with pytest.raises(FieldError):
        grid.zeros_like(np.zeros((3, 3, 3)))
