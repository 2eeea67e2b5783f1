"""Garbage collection of plans, fields and grids in the middle of calls, different on each rank, harms no call."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from mpi4py import MPI

import halox
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


@contextmanager
def collecting(doomed: list[Any], rng: random.Random) -> Iterator[list[Any]]:
    """Drop the objects of ``doomed`` in garbage collections, which Python starts at thousands of instructions.

    Yields a list with an entry for each dropped object.
    """
    dropped: list[Any] = []
    left = 1

    def drop(phase: str, _: object) -> None:
        nonlocal left
        left -= phase == "stop"
        if left <= 0 and doomed:
            doomed.pop()
            dropped.append(None)
            left = rng.randint(1, 300)

    before = gc.get_threshold()
    gc.callbacks.append(drop)
    gc.set_threshold(1)
    try:
        yield dropped
    finally:
        gc.callbacks.remove(drop)
        gc.set_threshold(*before)


def go_on(
    comm: MPI.Intracomm, device: str = "cpu", copy: Copy = lambda grid, field: field.copy()
) -> None:
    """Work while objects of earlier rounds are collected in the calls of a rank."""
    rng, doomed, error = random.Random(comm.rank), [], None
    for number in range(1, 4):
        with collecting(doomed, rng) as dropped:
            try:
                work(comm, doomed, number, device, copy)
            except Exception as caught:
                error = caught
        if not agree(error is None, comm):
            raise error or AssertionError("another rank has failed")
        assert agree(len(dropped) > 5, comm)
    doomed.clear()


@pytest.fixture(autouse=True)
def few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the caches small, so that they drop plans."""
    cache_few_plans(monkeypatch, 3)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.usually(2)
@pytest.mark.parametrize("node", ["one node", *full("a node each")])
def test_ranks_go_on(node: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    if node != "one node":
        monkeypatch.setenv("HALOX_NODE", "rank")
    go_on(comm)
