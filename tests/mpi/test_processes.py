"""Objects that belong to one process: forked children, copies and pickles."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import ClosedError, HaloxError, StateError

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.usually(1, 3)]


def in_child(check: Callable[[], None]) -> int:
    """Run a check in a forked process, and return the exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            check()
            os._exit(0)
        except BaseException:  # must not continue with the parent's tests
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("nodes", ["", "rank"])
def test_calls_of_a_forked_child_do_not_disturb_the_parent(
    nodes: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    if nodes:
        monkeypatch.setenv("HALOX_NODE", nodes)
    size, rank = comm.size, comm.rank
    options: dict[str, Any] = {"proc_shape": (size, 1), "device": "cpu", "comm": comm}
    grid = halox.Grid((4 * size, 4), halo=1, periodic=True, **options)
    u, three = grid.zeros(), np.zeros(3)
    spectra = halox.FFT(grid)
    complex_field = spectra.physical.zeros("c16")
    alone = halox.Grid((8, 8), comm=MPI.COMM_SELF, device="cpu")
    of_one = alone.ones()
    plan, total = grid.plan(u), halox.Allreduce(comm, 3, "f8", device="cpu")

    calls: list[Callable[[], object]] = [
        lambda: grid.exchange(u),
        lambda: grid.exchange(u + 1),
        plan,
        plan.start,
        lambda: grid.sum(u),
        lambda: grid.allreduce(three),
        lambda: grid.zeros_like(u),
        lambda: spectra.forward(complex_field),
        lambda: total(three),
        lambda: grid.gather(u),
    ]

    def step(value: float) -> None:
        u[1:-1] = value + rank
        grid.exchange(u)
        assert (u[0] == value + (rank - 1) % size).all()
        plan()
        assert grid.sum(u) == 16 * sum(value + r for r in range(size))
        three[:] = rank
        assert grid.allreduce(three)[0] == total(three)[0] == sum(range(size))
        spectra.forward(complex_field)

    dropped: list[Any] = [grid.plan(u)]
    dropped.append(dropped)  # a cycle, which stays until garbage collection
    del dropped

    def child() -> None:
        for call in calls if size > 1 else []:
            with pytest.raises(ClosedError):
                call()
        if size > 1:
            for other in (comm, MPI.COMM_SELF):
                with pytest.raises(HaloxError, match="forked"):
                    halox.Grid((8, 8), comm=other, device="cpu")
            with pytest.raises(ClosedError):
                alone.sum(of_one)
        else:
            step(0.5)
        gc.collect()
        for one in (plan, spectra, total, grid):
            one.close()

    step(0)
    assert in_child(child) == 0
    for value in range(1, 4):
        step(value)
    assert alone.sum(of_one) == 64
    for one in (total, spectra, grid, alone):
        one.close()


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_copies_are_refused(duplicate: Callable[[object], object], comm: MPI.Intracomm) -> None:
    """Objects with requests and shared memory cannot be copied; fields can."""
    grid = halox.Grid((4 * comm.size, 4), halo=1, periodic=True, comm=comm, device="cpu")
    u = grid.full(2)
    other = halox.Grid((4 * comm.size, 4), halo=0, comm=comm, device="cpu")
    array = np.zeros(3)
    exchange = halox.Exchange(
        [halox.Send(array, "f8", comm.rank, count=1)],
        [halox.Recv(array[1:], "f8", comm.rank, count=1)],
        comm=comm,
    )
    found = (grid.plan(u), exchange, halox.Transpose(grid, other), halox.FFT(grid), other, grid)
    for one in (*found, halox.Allreduce(comm, 3, "f8", device="cpu")):
        with pytest.raises(StateError):
            duplicate(one)
    for one in (u, grid.layout(u), grid.explain(u)):
        assert type(duplicate(one)) is type(one)
    copied: Any = duplicate(u)
    copied[1:-1, 1:-1] = 3
    grid.exchange(copied)
    assert (copied == 3).all()
    grid.close()
