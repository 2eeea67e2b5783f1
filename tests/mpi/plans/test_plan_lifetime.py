"""Plans closed or dropped during an exchange, on some ranks: no message arrives in memory that is reused."""

from __future__ import annotations

import gc
import os
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Recv, Send
from halox.errors import ExchangeTimeoutError, MismatchError, StateError
from halox.paths.base import Channel
from halox.plans.plan import Plan
from halox.runtime.leftovers import Leftovers
from halox.runtime.world import World
from tests.mpi.conftest import agree, come_together, mapped_bytes
from tests.mpi.limits import short_waits

pytestmark = pytest.mark.ranks(2)

COMPONENTS = [1, 30, 2_000]
"""Components of fields with rows of ten cells: messages of 80 bytes to 160 kB."""


@pytest.fixture(params=["rank", ""], ids=["each a node", "one node"])
def node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HALOX_NODE", request.param)
    found: str = request.param
    return found


class Guarded:
    """Arrays allocated after a plan was dropped: no message may arrive in them."""

    def __init__(self, components: int) -> None:
        self.arrays = [np.full(10 * components + k % 7, 7.5) for k in range(40)]

    def untouched(self) -> bool:
        return all((array == 7.5).all() for array in self.arrays)


def box(comm: MPI.Intracomm) -> halox.Grid:
    """Make a grid that sends a row of ten cells to each neighbour."""
    shape = (4 * comm.size, 10)
    return halox.Grid(
        shape, proc_shape=(comm.size, 1), halo=(1, 0), periodic=(True, False), comm=comm
    )


def own_array(grid: halox.Grid, components: int) -> Any:
    """Return a user's array, so that messages are packed also on one node; its values encode the rank."""
    return np.full((components, *grid.padded_shape), grid.rank + 1.0)


def leave(plan: Any, how: str) -> None:
    """Close a plan, or do nothing, if the caller is to drop the last reference."""
    if how == "close":
        plan.close()


def progress(comm: MPI.Intracomm) -> None:
    """Make MPI deliver the pending messages."""
    for _ in range(5):
        comm.Barrier()


def make(grid: halox.Grid, u: Any, kind: str = "exchange") -> Plan:
    if kind == "accumulate":
        return Plan(grid._plans.make("add", (u,), True, keep=True))
    return grid.plan(u)


def check(grid: halox.Grid, u: Any, kind: str = "exchange") -> bool:
    """Whether the halo and the outer rows of an `own_array` are right after an exchange or an accumulation."""
    mine, other = grid.rank + 1.0, 2.0 - grid.rank
    halo, owned = (other, mine) if kind == "exchange" else (0.0, mine + other)
    return bool((u[:, [0, -1]] == halo).all() and (u[:, [1, -2]] == owned).all())


def check_next(grid: halox.Grid, kind: str = "exchange") -> None:
    """Assert that a new plan of a new field works."""
    v = own_array(grid, 3)
    make(grid, v, kind)()
    assert agree(check(grid, v, kind), grid.comm)


def check_other(
    grid: halox.Grid, plan: Plan | None, u: Any, components: int, kind: str = "exchange"
) -> None:
    """Assert that rank 1 can finish after rank 0 has left its plan, and that no message arrives in reused memory."""
    guarded, right = Guarded(components) if plan is None else None, True
    grid.comm.Barrier()
    if plan is not None:
        plan()
        right = check(grid, u, kind)
    progress(grid.comm)
    assert agree(right and (guarded is None or guarded.untouched()), grid.comm), components


@pytest.mark.parametrize("kind", ["exchange", "accumulate"])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_left_on_one_rank(how: str, kind: str, node: str, comm: MPI.Intracomm) -> None:
    """Rank 0 leaves a started plan; rank 1 starts later, and can finish."""
    with box(comm) as grid:
        for components in COMPONENTS:
            u = own_array(grid, components)
            plan: Plan | None = make(grid, u, kind)
            if plan and comm.rank == 0:
                plan.start()
                leave(plan, how)
                plan = None
            check_other(grid, plan, u, components, kind)
        check_next(grid, kind)


def test_left_on_both_ranks(node: str, comm: MPI.Intracomm) -> None:
    """The ranks leave their started plans at different times."""
    with box(comm) as grid:
        for components in COMPONENTS:
            plan = grid.plan(own_array(grid, components))
            if comm.rank == 1:
                come_together(comm)
            plan.start()
            plan.close()
            guarded = Guarded(components)
            if comm.rank == 0:
                come_together(comm)
            progress(comm)
            assert agree(guarded.untouched(), comm), components
        check_next(grid)


def test_left_where_the_other_never_starts(node: str, comm: MPI.Intracomm) -> None:
    """A grid can close in spite of a receive without a message and a message without a receive."""
    with box(comm) as grid:
        for components in COMPONENTS:
            plan = grid.plan(own_array(grid, components))
            if comm.rank == 0:
                plan.start()
            plan.close()
            with pytest.raises(MismatchError):
                grid.plan(own_array(grid, components))
        check_next(grid)


@pytest.mark.part(2)
def test_left_after_a_timeout(node: str, comm: MPI.Intracomm) -> None:
    """Rank 1 starts its exchange after the timeout of rank 0."""
    components = 300
    grid = box(comm)
    u = own_array(grid, components)
    plan: Plan | None = grid.plan(u)
    if plan and comm.rank == 0:
        plan.start()
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            plan.finish()
        plan = None
    come_together(comm)
    check_other(grid, plan, u, components)
    with pytest.raises((StateError, ExchangeTimeoutError)):
        grid.plan(own_array(grid, 1))
    grid.close()
    with box(comm) as new:
        check_next(new)


def test_a_typed_exchange_that_is_left(node: str, comm: MPI.Intracomm) -> None:
    peer = 1 - comm.rank
    for components in COMPONENTS:
        n = 10 * components
        source, target = np.full(n, comm.rank + 1.0), np.zeros(n)
        kind = halox.datatypes.contiguous(n, "f8")
        exchange = halox.Exchange([Send(source, kind, peer)], [Recv(target, kind, peer)], comm=comm)
        guarded = None
        if comm.rank == 0:
            exchange.start()
            del exchange
            guarded = Guarded(components)
        comm.Barrier()
        if comm.rank == 1:
            exchange()
            assert (target == 1.0).all()
        progress(comm)
        assert agree(guarded is None or guarded.untouched(), comm), components


@pytest.mark.parametrize("kind", ["direct", "packed", "packed and finished"])
def test_shared_memory_is_not_handed_out_while_the_other_reads(
    kind: str, comm: MPI.Intracomm
) -> None:
    """Rank 0 leaves its plan and its field; new fields and plans must not use memory that rank 1 still reads.

    A direct plan finishes only after its neighbours have read.
    """
    with box(comm) as grid:

        def make_field(x: float) -> Any:
            # Only whole rows are long enough to be read in place.
            if kind == "direct":
                return grid.full(x, components=(..., 40))
            return np.full((*grid.padded_shape, 40), x)

        u, spare = make_field(comm.rank + 1.0), make_field(0.0)
        plan, spare_plan = grid.plan(u), grid.plan(spare)
        ways = {row.protocol for row in plan.explain().rows}
        assert agree(ways == {"direct" if kind == "direct" else "shared"}, comm), ways
        # Each rank has released memory to reuse, and rank 0 also memory that rank 1 has yet to read.
        spare_plan()
        spare_plan.close()
        del spare_plan, spare
        if comm.rank == 1:
            plan.start()
        comm.Barrier()
        if comm.rank == 0:
            plan.start()
            if "finished" in kind:
                plan.finish()
            del plan, u
        others = [make_field(-5.0) for _ in range(3)]
        plans = [grid.plan(other) for other in others]
        for _ in range(2):
            for other in plans:
                other()
        comm.Barrier()
        if comm.rank == 1:
            plan.finish()
            assert (u[[0, -1]] == 1.0).all()
        comm.Barrier()
        assert agree(all((other == -5.0).all() for other in others), comm)


def test_many_times(node: str, comm: MPI.Intracomm) -> None:
    """Memory does not grow if both ranks leave many plans, at once or one after the other."""
    with box(comm) as grid:
        u = own_array(grid, 300)

        def leave_some(count: int) -> int:
            for number in range(count):
                plan = grid.plan(u)
                plan.start()
                if number % 3 == 0:
                    comm.Barrier()
                if number % 2:
                    plan.close()
                del plan
            progress(comm)
            return mapped_bytes()

        before = leave_some(4)
        assert agree(leave_some(24) == before, comm)
        left = grid.domain.context.leftovers
        left.reclaim(grid._world.gather(lambda: (None, left.closed_plans()), "a test")[1])
        assert agree(not left._active and not left._closed_plans, comm)
        check_next(grid)


class Told(Channel):
    """Channel that counts how often it is freed."""

    def __init__(self) -> None:
        self.freed = 0

    def start(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def free(self) -> None:
        self.freed += 1


def test_freed_when_all_have_closed(comm: MPI.Intracomm) -> None:
    """Plans are freed once all ranks have closed them, in any order; a plan that never ends is not freed."""
    world = World(comm)
    left = Leftovers(world.ranks)
    plans = {number: Told() for number in range(6)}
    if comm.rank == 1:
        plans[4].has_ended = False
    array = np.zeros(3)
    held = sys.getrefcount(array)

    def close(*numbers: int) -> None:
        for number in numbers:
            left.add(number, [plans[number]], [array])

    def freed() -> list[int]:
        return [number for number, plan in plans.items() if plan.freed]

    close(*([0, 2] if comm.rank == 0 else [2, 3]))
    assert freed() == []
    left.reclaim(world.gather(lambda: (None, left.closed_plans()), "a test")[1])
    assert agree(freed() == [2], comm)
    close(*([3, 4] if comm.rank == 0 else [0, 4]))
    left.reclaim(world.gather(lambda: (None, left.closed_plans()), "a test")[1])
    assert agree(freed() == [0, 2, 3], comm), freed()
    close(1, 5)
    left.close()
    assert agree(freed() == [n for n in range(6) if plans[n].has_ended], comm), freed()
    assert all(plan.freed <= 1 for plan in plans.values())
    # A peer may still write to the plan that has not ended; all other plans have released the array.
    assert sys.getrefcount(array) == held + (comm.rank == 1)
    world.close()


def test_a_communicator_whose_grid_was_dropped(comm: MPI.Intracomm) -> None:
    """Neither descriptors nor duplicates of the communicator stay once it is freed."""

    def drop() -> int:
        parent = comm.Dup()
        grid = halox.Grid((8, 8), periodic=True, device="cpu", comm=parent)
        u = grid.ones()
        grid.exchange(u)
        assert grid.sum(u) == 64
        del grid, u
        gc.collect()
        comm.Barrier()
        parent.Free()
        return len(os.listdir("/proc/self/fd"))

    # Descriptors of earlier tests may be closed meanwhile, once; a leak would add some each time.
    counts = [drop() for _ in range(5)]
    assert agree(any(first == second for first, second in pairwise(counts)), comm), counts


def test_a_loop_outlives_its_grid(comm: MPI.Intracomm) -> None:
    steps: list[int] = []
    until = np.zeros((), bool)

    def step() -> None:
        steps.append(1)
        until[...] = len(steps) == 3

    loop = halox.Grid((8, 8), device="cpu", comm=comm).loop(step, until=until)
    gc.collect()
    assert agree(loop() == 3, comm)
