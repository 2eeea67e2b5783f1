"""``HALOX_DEBUG_HALO=1``: exchanges first fill the halo cells that they update with NaN or the least integer.

test_exchange.py has random fields.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox

pytestmark = pytest.mark.usually(1, 2)

World = MPI.Intracomm


@pytest.fixture(autouse=True)
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_DEBUG_HALO", "1")


def new_grid(comm: World, **options: Any) -> halox.Grid:
    options = {"periodic": (True, False), "proc_shape": (comm.size, 1)} | options
    return halox.Grid((8 * comm.size, 64), comm=comm, device="cpu", **options)


@pytest.mark.ranks(2, 4)
def test_neighbours_that_read_in_place(comm: World) -> None:
    """No neighbour reads a poisoned cell, whichever rank is late."""
    with new_grid(comm) as grid:
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


@pytest.mark.parametrize("node", ["", "rank"], ids=["shared memory", "MPI"])
def test_halos_beyond_walls(node: str, comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stale between start and finish, whatever fills them, and owned cells keep their values."""
    if node:
        monkeypatch.setenv("HALOX_NODE", node)
    for boundary in ("edge", ("constant", 1.0), lambda slab, *_: slab.fill(1)):
        with new_grid(comm, boundary=(None, boundary)) as grid:
            for u in (grid.ones(), grid.ones(staggered=1)):
                plan = grid.plan(u)
                plan.start()
                assert np.isnan(u[1:-1, [0, -1]]).all() and (grid.interior(u) == 1).all()
                plan.finish()
                assert (u == 1).all()


def test_calls_that_need_the_values(comm: World) -> None:
    """A measured plan and an accumulation keep the halos' values."""
    with new_grid(comm, periodic=True) as grid:
        u = grid.ones()
        grid.plan(u).measure(2)
        assert (u == 1).all()
        grid.accumulate(u)
        assert grid.sum(u) == grid.allreduce(u.size)


@pytest.mark.parametrize("text", ["", "0"])
def test_without_the_variable(text: str, comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_grid(comm, boundary=(None, "edge")) as grid:
        for value, is_stale in (("1", True), (text, False)):
            monkeypatch.setenv("HALOX_DEBUG_HALO", value)
            u = grid.ones()
            plan = grid.plan(u)
            plan.start()
            assert np.isnan(u[1:-1, [0, -1]]).any() == is_stale
            plan.finish()
