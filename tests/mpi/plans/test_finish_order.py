"""Several plans in progress at once, which each rank starts and finishes in a different order."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.plans.plan import Plan
from halox.runtime.waiting import STARTED_STEPS
from tests.mpi.conftest import agree

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.usually(3)]


class Field:
    """A field and its plan; cells encode rank, number of the field and step.

    A field from the grid is read in place; a field that the user allocates is packed.
    """

    def __init__(self, grid: halox.Grid, number: int, packed: bool = False) -> None:
        self.grid, self.number = grid, number
        self.u: Any = np.zeros(grid.padded_shape) if packed else grid.zeros()
        self.plan: Plan = grid.plan(self.u)
        ways = {row.protocol for row in self.plan.explain().rows}
        assert ways <= {"shared" if packed else "direct"}, ways

    def fill(self, step: int) -> None:
        self.u[...] = -1.0
        self.u[1:-1, 1:-1] = self._value(self.grid.rank, step)

    def is_right(self, step: int) -> bool:
        rank, size = self.grid.rank, self.grid.size
        low, high = (self._value((rank + side) % size, step) for side in (-1, 1))
        inner = self.u[:, 1:-1]
        return bool(
            (inner[0] == low).all()
            and (inner[-1] == high).all()
            and (inner[1:-1] == self._value(rank, step)).all()
        )

    def _value(self, rank: int, step: int) -> float:
        return 1e6 * rank + 1e3 * self.number + step


def grid_of(comm: MPI.Intracomm, **options: Any) -> halox.Grid:
    """Return a grid with halos of 400 contiguous cells between neighbours, long enough to read in place."""
    options = {"periodic": (True, False), "proc_shape": (comm.size, 1)} | options
    return halox.Grid((4 * comm.size, 400), comm=comm, device="cpu", **options)


@pytest.mark.parametrize("kinds", ["dd", "ddppdd"])
def test_any_order(kinds: str, comm: MPI.Intracomm) -> None:
    """Each rank starts and finishes its plans in random order; "d" is a field read in place, "p" a packed field."""
    dice = random.Random(comm.rank)
    with grid_of(comm) as grid:
        fields = [Field(grid, number, kind == "p") for number, kind in enumerate(kinds)]
        wrong = []
        for step in range(15):
            for field in fields:
                field.fill(step)
            for field in dice.sample(fields, len(fields)):
                field.plan.start()
            for field in dice.sample(fields, len(fields)):
                field.plan.finish()
            wrong += [(step, f.number) for f in fields if not f.is_right(step)]
        assert agree(not wrong, comm), wrong
        assert not STARTED_STEPS


@pytest.mark.parametrize("packed", [False, True])
def test_whole_exchanges_in_between(packed: bool, comm: MPI.Intracomm) -> None:
    """One rank runs a second plan before it finishes the first; other ranks run it afterwards."""
    with grid_of(comm) as grid:
        first, other = Field(grid, 0), Field(grid, 1, packed)
        wrong = []
        for step in range(6):
            first.fill(step)
            other.fill(step)
            first.plan.start()
            if comm.rank == step % comm.size:
                for _ in range(3):
                    other.plan()
                first.plan.finish()
            else:
                first.plan.finish()
                for _ in range(3):
                    other.plan()
            if not (first.is_right(step) and other.is_right(step)):
                wrong.append(step)
        assert agree(not wrong, comm), wrong


def test_messages_that_go_one_way(comm: MPI.Intracomm) -> None:
    """A rank that only sends runs ahead of its receiver, which still waits in another plan."""
    with (
        grid_of(comm) as grid,
        grid_of(comm, periodic=False, halo=((1, 0), 1)) as one_way,
    ):
        first = Field(grid, 0)
        u = np.zeros(one_way.padded_shape)
        plan = one_way.plan(u)
        first.fill(0)
        first.plan.start()
        if comm.rank == 0:
            for _ in range(5):
                plan()
            first.plan.finish()
        else:
            first.plan.finish()
            for _ in range(5):
                plan()
        assert agree(first.is_right(0), comm)
        plan.close()


def test_messages_between_nodes_in_between(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits for MPI messages of one grid also progresses the plans of another grid."""
    with grid_of(comm) as grid:
        monkeypatch.setenv("HALOX_NODE", "rank")
        with grid_of(comm) as far:
            first, u = Field(grid, 0), far.full(comm.rank + 1.0)
            plan = far.plan(u)
            first.fill(0)
            first.plan.start()
            if comm.rank == 0:
                plan()
                first.plan.finish()
            else:
                first.plan.finish()
                plan()
            assert agree(first.is_right(0) and bool((u[0, 1:-1] > 0).all()), comm)
            plan.close()


def test_a_rank_that_leaves_does_not_keep_the_others(comm: MPI.Intracomm) -> None:
    """A rank closes a started plan and reads nothing more; its neighbours can still read its cells."""
    with grid_of(comm) as grid:
        first, other = Field(grid, 0), Field(grid, 1)
        for field in (first, other):
            field.fill(3)
            field.plan.start()
        right = True
        if comm.rank == 0:
            first.plan.close()
            del first.plan
            other.plan.finish()
        else:
            other.plan.finish()
            first.plan.finish()
            right = first.is_right(3)
        assert agree(right and other.is_right(3), comm)
        assert not STARTED_STEPS
        comm.Barrier()
