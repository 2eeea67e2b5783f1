"""Garbage collection of plans, fields and grids at any instruction of halox, different on each rank, harms no call."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from mpi4py import MPI

import halox
from tests.collecting import collecting
from tests.limits import cache_few_plans
from tests.mpi.conftest import agree
from tests.support import full

ROWS, COLUMNS = 3, 5
Copy = Callable[[halox.Grid, Any], Any]


def full_of(grid: halox.Grid, value: float) -> Any:
    """Return a field with the value plus the rank in the owned cells."""
    field = grid.zeros()
    field[1:-1, 1:-1] = value + grid.rank
    return field


def check(grid: halox.Grid, field: Any, value: float) -> None:
    """Assert that the halos along the first axis hold the neighbours' values."""
    before, after = (grid.rank - 1) % grid.size, (grid.rank + 1) % grid.size
    assert (field[0, 1:-1] == value + before).all()
    assert (field[-1, 1:-1] == value + after).all()


def work(comm: MPI.Intracomm, doomed: list[Any], number: int, device: str, copy: Copy) -> None:
    """Make and use objects of every kind, and leave them in ``doomed``."""
    shape, size = (ROWS * comm.size, COLUMNS), comm.size
    options: dict[str, Any] = {
        "halo": 1,
        "periodic": (True, False),
        "proc_shape": (size, 1),
        "device": device,
        "comm": comm,
    }
    total = ROWS * COLUMNS * (number * size + sum(range(size)))
    with halox.Grid(shape, **options) as grid:
        left = halox.Grid(shape, **options)
        doomed += [left, left.zeros(), left.plan(left.zeros())]
        del left
        doomed += [halox.Grid(shape, **options) for _ in range(3)]
        with halox.Grid(shape, **options) as closed:
            doomed += [closed.zeros(), closed.plan(closed.zeros())]
        u, v = full_of(grid, number), full_of(grid, -number)
        doomed += [grid.plan(u), grid.zeros(), grid.plan(v)]
        grid.exchange(u, v)
        check(grid, u, number)
        check(grid, v, -number)
        plan = grid.plan(u)
        plan.start()
        doomed.append(grid.plan(copy(grid, v)))
        plan.finish()
        doomed.append(plan)
        del plan
        for make in (lambda: copy(grid, u), lambda: full_of(grid, number)):
            for _ in range(3):
                w = make()
                for _ in range(2):
                    w[0] = w[-1] = 0
                    grid.exchange(w)
                    check(grid, w, number)
                    assert grid.sum(w) == total
                doomed.append(w)
        whole = grid.gather(u)
        assert whole is None or whole.sum() == total
        ones = grid.allreduce(u[0] * 0 + 1)
        assert (ones == size).all()


def comes_up(rng: random.Random, share: float, _: int) -> bool:
    return rng.random() < share


def go_on(
    comm: MPI.Intracomm,
    modules: str,
    device: str = "cpu",
    copy: Copy = lambda grid, field: field.copy(),
) -> None:
    """Work while objects of earlier rounds are collected, about twenty per round, at random instructions of a rank."""
    rng, doomed, error = random.Random(comm.rank), [], None
    gap = 10_000
    for number in range(1, 5):
        is_due = partial(comes_up, rng, 20 / gap)
        with collecting(doomed, is_due, *modules.split(" ")) as steps:
            try:
                work(comm, doomed, number, device, copy)
            except Exception as caught:
                error = caught
        gap = steps.count
        if not agree(error is None, comm):
            raise error or AssertionError("another rank has failed")
    doomed.clear()


@pytest.fixture(autouse=True)
def few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the caches small, so that they drop plans."""
    cache_few_plans(monkeypatch, 3)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.usually(1, 2)
@pytest.mark.parametrize(
    "modules",
    ["runtime/duplicates", "runtime", "exchange collectives", "paths", ""],
    ids=lambda modules: modules.replace("/", ".") or "all",
)
@pytest.mark.parametrize("node", ["one node", *full("a node each")])
def test_ranks_go_on(
    modules: str, node: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    if node != "one node":
        monkeypatch.setenv("HALOX_NODE", "rank")
    go_on(comm, modules)
