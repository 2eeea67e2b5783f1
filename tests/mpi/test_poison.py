"""``HALOX_DEBUG_HALO=1``: exchanges first fill the halo cells that they update with NaN or the least integer."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.exchange.poison import PoisonChannel, poison_of

pytestmark = pytest.mark.usually(1, 2, 4)

World = MPI.Intracomm
DTYPES = ("f4", "f8", ">f8", "c16", "i4", "u2")
LAYOUTS: list[dict[str, Any]] = [{"components": 2}, {"staggered": 1}, {"offsets": 1}]
UNTOUCHED = ("?", "S3", "M8[s]", [("a", "f8"), ("b", "i4")])


@pytest.fixture(params=["shared memory", "MPI"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_DEBUG_HALO", "1")
    if request.param == "MPI":
        monkeypatch.setenv("HALOX_NODE", "rank")


def new_grid(comm: World, **options: Any) -> halox.Grid:
    defaults = {"periodic": (True, False), "halo": ((1, 2), 1), "device": "cpu"}
    return halox.Grid(comm=comm, **{"grid_shape": (6 * comm.size, 8), **defaults, **options})


def is_stale(u: np.ndarray) -> np.ndarray:
    return np.isnan(u) if u.dtype.kind in "fc" else u == poison_of(u.dtype)


def updated(grid: halox.Grid, **layout: Any) -> np.ndarray:
    """Return the halo cells that an exchange updates."""
    u = grid.full(6, **layout)
    grid.interior(u)[...] = 5
    is_owned = u == 5
    grid.exchange(u)
    return (u == 5) & ~is_owned


@pytest.mark.parametrize(
    ("dtype", "layout"), [*((dtype, {}) for dtype in DTYPES), *(("f8", one) for one in LAYOUTS)]
)
@pytest.mark.parametrize("corners", [True, False])
def test_halos_between_start_and_finish(
    dtype: str, layout: dict[str, Any], corners: bool, comm: World
) -> None:
    """Exactly the cells that the exchange updates are stale after ``start``, except copies within the rank."""
    with new_grid(comm, corners=corners) as grid:
        where = updated(grid, **layout)
        assert where.any() and not where.all()
        u = grid.full(9, dtype, **layout)
        plan = grid.plan(u)
        assert (u == 9).all(), "a plan does not write"
        for value in (1, 3):
            grid.interior(u)[...] = value
            before = u.copy()
            plan.start()
            between = u.copy()
            plan.finish()
            assert (is_stale(between) | (between == value))[where].all()
            assert np.array_equal(between[~where], before[~where])
            assert np.array_equal(u, np.where(where, value, before))
            if comm.size > 1:
                assert is_stale(between).any()
            plan()
            assert np.array_equal(u, np.where(where, value, before))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("way", ["shared memory"], indirect=True)
def test_neighbours_that_read_in_place(comm: World) -> None:
    """No neighbour reads a poisoned cell, whichever rank is late."""
    with new_grid(comm, halo=1, proc_shape=(comm.size, 1), grid_shape=(8 * comm.size, 64)) as grid:
        u = grid.zeros()
        plan = grid.plan(u, path="host/direct")
        low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        for step in range(3 * comm.size):
            grid.interior(u)[...] = step + comm.rank / 4
            if step % comm.size == comm.rank:
                time.sleep(0.002)
            plan.start()
            assert np.isnan(u[[0, -1], 1:-1]).all()
            plan.finish()
            assert (u[0, 1:-1] == step + low / 4).all()
            assert (u[-1, 1:-1] == step + high / 4).all()


@pytest.mark.parametrize(
    "boundary",
    ["edge", ("constant", 2.0), lambda slab, *_: slab.fill(3)],
    ids=["edge", "constant", "function"],
)
@pytest.mark.parametrize("layout", [{}, {"staggered": 1}, {"components": 2}])
def test_halos_beyond_walls(boundary: Any, layout: dict[str, Any], comm: World) -> None:
    """They are stale between start and finish, and owned cells keep their values."""
    with new_grid(comm, boundary=(None, boundary)) as grid:
        u = grid.ones(**layout)
        plan = grid.plan(u)
        grid.interior(u)[...] = 1
        plan.start()
        owned = grid.interior(u)
        assert (owned == 1).all()
        if grid.at_wall(1, "low"):
            assert not np.isfinite(u[..., 0]).any()
        if grid.at_wall(1, "high"):
            assert not np.isfinite(u[..., -1]).any()
        plan.finish()
        assert np.isfinite(u).all()


@pytest.mark.parametrize("dtype", UNTOUCHED, ids=str)
def test_other_dtypes_stay(dtype: Any, comm: World) -> None:
    with new_grid(comm) as grid:
        u = grid.zeros(dtype)
        plan = grid.plan(u)
        plan.start()
        assert u.tobytes() == bytes(u.nbytes)
        plan.finish()


def test_fields_of_one_parity(comm: World) -> None:
    with new_grid(comm, checkerboard=True, halo=2) as grid:
        where = updated(grid, parity="odd")
        u = grid.full(9, parity="odd")
        grid.interior(u)[...] = 1
        grid.exchange(u)
        assert (u[where] == 1).all()
        assert not np.isnan(u).any()


def test_new_arrays(comm: World) -> None:
    """Plans that serve other arrays of a layout poison the arrays of the call."""
    with new_grid(comm) as grid:
        where = updated(grid)
        for number in range(4):
            u = np.full(grid.padded_shape, -1.0)
            grid.interior(u)[...] = number
            grid.exchange(u)
            assert (u[where] == number).all()
            assert not np.isnan(u).any()


def test_measure_leaves_values(comm: World) -> None:
    with new_grid(comm) as grid:
        u = grid.ones()
        grid.plan(u).measure(2)
        assert (u == 1).all()


def test_accumulate_adds_values(comm: World) -> None:
    with new_grid(comm, halo=1, periodic=True) as grid:
        u = grid.ones()
        grid.accumulate(u)
        assert grid.sum(u) == grid.allreduce(u.size)


@pytest.mark.parametrize("text", ["", "0"])
def test_without_the_variable(text: str, comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(grid: halox.Grid) -> int:
        plan = grid.plan(grid.ones())
        return sum(isinstance(channel, PoisonChannel) for channel in plan._channels)

    with new_grid(comm) as grid:
        assert count(grid) == 1
        monkeypatch.setenv("HALOX_DEBUG_HALO", text)
        assert count(grid) == 0
