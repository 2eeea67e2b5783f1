"""Threads: a second thread in a call is refused at once, and the call of the first thread works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import StateError
from halox.runtime.call_guard import making
from tests.mpi.conftest import agree

World = MPI.Intracomm
SOON_S = 50.0
"""Limit for a refusal, shorter than the limit of a wait."""

pytestmark = pytest.mark.skipif(
    MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="MPI serves one thread at a time"
)


def make_grid(comm: World, **options: Any) -> halox.Grid:
    options = {"periodic": True, "proc_shape": (comm.size, 1), "device": "cpu"} | options
    return halox.Grid((4 * comm.size, 6), halo=1, comm=comm, **options)


@contextmanager
def inside(comm: World, call: Callable[[], Any], entered: Callable[[], bool]) -> Iterator[bool]:
    """Keep another thread of rank 0 inside a call; all other ranks make this call only at the end.

    Yields True on rank 0, where the block runs while the thread is inside the call.
    """
    signals = comm.Dup()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    if comm.rank == 0:
        thread = threading.Thread(target=run)
        thread.start()
        end = time.monotonic() + 500
        while not entered() and time.monotonic() < end:
            time.sleep(0.001)
        try:
            assert entered()
            yield True
        finally:
            signals.bcast(None)
            thread.join(500)
            assert not thread.is_alive()
    else:
        yield False
        signals.bcast(None)
        run()
    assert agree(not errors, comm), errors
    signals.Free()


def refused(call: Callable[[], Any]) -> None:
    since = time.monotonic()
    with pytest.raises(StateError, match="thread"):
        call()
    assert time.monotonic() - since < SOON_S


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("node", ["", "rank"])
def test_a_plan_in_two_threads(node: str, comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_NODE", node)
    with make_grid(comm) as g:
        u = g.full(-1.0)
        g.interior(u)[...] = g.rank
        plan = g.plan(u)
        with inside(comm, plan, lambda: g._world.guard.user != 0) as first:
            if first:
                for call in (plan, plan.start, plan.finish, plan.close):
                    refused(call)
        assert agree(bool((u[0] == (g.rank - 1) % g.size).all()), comm)
        g.interior(u)[...] += 10
        plan()
        plan.start()
        plan.finish()
        assert agree(bool((u[-1] == (g.rank + 1) % g.size + 10).all()), comm)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", ["an exchange", "a sum", "an allocation", "the making of a plan"])
@pytest.mark.part(2)
def test_a_grid_in_two_threads(what: str, comm: World) -> None:
    """Whatever the first thread does, all collective calls of the second thread are refused."""
    with make_grid(comm) as g, make_grid(comm) as h:
        u, v, w, t = g.ones(), g.ones(), np.ones(g.padded_shape), h.zeros()
        g.exchange(u)
        transpose = halox.Transpose(g, h)
        transpose.forward(u, t)
        plan = g.plan(v)
        calls = {
            "an exchange": lambda: g.exchange(u),
            "a sum": lambda: g.sum(u),
            "an allocation": g.zeros,
            "the making of a plan": lambda: g.exchange(w),
        }
        with inside(comm, calls[what], lambda: g._world.guard.user != 0) as first:
            if first:
                for call in (
                    *[c for name, c in calls.items() if name != what],
                    plan,
                    plan.start,
                    plan.measure,
                    lambda: g.gather(u),
                    lambda: g.allreduce(1.0),
                    lambda: g.plan(u),
                    lambda: g.accumulate(u),
                    lambda: transpose.forward(u, t),
                    lambda: transpose.backward(np.ones_like(t), u),
                    lambda: halox.Transpose(g, h),
                    lambda: h.exchange(t),  # another grid on the same communicator
                    lambda: h.sum(t),
                    g.close,
                    h.close,
                ):
                    refused(call)
        assert g.sum(u) == 24 * comm.size
        plan()
        transpose.close()


@pytest.mark.ranks(2, 3)
def test_an_allreduce_and_an_exchange_in_two_threads(comm: World) -> None:
    ones, got = np.ones(3), np.zeros(3)
    sends = [halox.Send(ones, "f8", (comm.rank + 1) % comm.size, count=3)]
    receives = [halox.Recv(got, "f8", (comm.rank - 1) % comm.size, count=3)]
    with (
        halox.Allreduce(comm, 3, "f8", device="cpu") as reduce,
        halox.Exchange(sends, receives, comm=comm) as exchange,
    ):
        world = reduce._world
        with inside(comm, lambda: reduce(ones), lambda: world.guard.user != 0) as first:
            if first:
                refused(lambda: reduce(ones))
                refused(reduce.close)
        world = exchange._context.world
        with inside(comm, exchange, lambda: world.guard.user != 0) as first:
            if first:
                refused(exchange)
                refused(exchange.close)
        assert agree(bool((reduce(ones) == comm.size).all() and (got == 1).all()), comm)


@pytest.mark.ranks(2, 3)
def test_a_thread_that_makes_a_grid_beside_another(comm: World) -> None:
    """Two threads must not duplicate communicators at once: the calls could deadlock or be mixed up."""
    group, made = comm.Dup(), []
    with inside(comm, lambda: made.append(make_grid(group)), lambda: making.user != 0) as first:
        if first:
            for make in (
                lambda: make_grid(group),
                lambda: make_grid(MPI.COMM_SELF),
                lambda: halox.Allreduce(group, 1, "f8", device="cpu"),
                lambda: halox.Exchange([], [], comm=group),
            ):
                refused(make)
    with made[0] as g:
        assert g.sum(g.ones()) == 24 * comm.size


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("node", ["", "rank"])
def test_two_grids_in_two_threads(node: str, comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads use grids of two communicators at once, first calls included."""
    monkeypatch.setenv("HALOX_NODE", node)
    grids = [make_grid(comm.Dup()) for _ in range(2)]
    wrong: list[Any] = []

    def work(number: int) -> None:
        g = grids[number]
        try:
            for turn in range(2):
                for u in (g.full(-1.0), np.full(g.padded_shape, -1.0)):
                    g.interior(u)[...] = 10 * number + g.rank + 100 * turn
                    for _ in range(3):
                        g.exchange(u)
                    if not (u[0] == 10 * number + (g.rank - 1) % g.size + 100 * turn).all():
                        wrong.append(u)
                    mean = g.sum(u) / 24 / g.size
                    if mean != 10 * number + (g.size - 1) / 2 + 100 * turn:
                        wrong.append(mean)
        except BaseException as error:
            wrong.append(error)

    # Odd ranks start the threads in another order.
    order = (0, 1) if comm.rank % 2 else (1, 0)
    threads = [threading.Thread(target=work, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agree(not wrong, comm), wrong
    for g in grids:
        g.close()
