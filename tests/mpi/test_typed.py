"""Typed messages between ranks, held against MPI's own transfer of the same types."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send
from halox import datatypes as dt
from tests.support import trials

TYPES = {
    "contiguous": dt.contiguous(24, "f8"),
    "vector": dt.vector(8, 3, 5, "f8"),
    "triangle": dt.indexed([3, 5, 7, 9], [0, 10, 20, 30], "f8"),
    "scattered": dt.indexed_block(2, [40, 3, 11, 7, 30, 0, 19, 50, 60, 70, 25, 13], "f8"),
    "columns": dt.contiguous(4, dt.resized(dt.vector(6, 1, 8, "f8"), 0, 8)),
    "box": dt.subarray((6, 5, 4), (2, 3, 4), (3, 1, 0), "f8"),
}


@pytest.fixture(params=["shared memory", "MPI"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "MPI":
        monkeypatch.setenv("HALOX_NODE", "rank")
    return str(request.param)


@pytest.mark.parametrize("receiver", TYPES)
@pytest.mark.parametrize("sender", TYPES)
def test_round_a_ring(sender: str, receiver: str, way: str, comm: MPI.Intracomm) -> None:
    """Different types of one signature on the two ends, against Sendrecv with the MPI types."""
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    source = np.arange(130.0) + 1000 * comm.rank
    target, wanted = np.full(130, -1.0), np.full(130, -1.0)
    a, b = TYPES[sender].to_mpi(), TYPES[receiver].to_mpi()
    comm.Sendrecv([source, 1, a], high, 0, [wanted, 1, b], low, 0)
    a.Free()
    b.Free()
    with Exchange(
        [Send(source, TYPES[sender], high)], [Recv(target, TYPES[receiver], low)], comm=comm
    ) as exchange:
        for _ in range(3):
            target[...] = -1
            comm.Barrier()
            exchange()
            assert np.array_equal(target, wanted)
            comm.Barrier()


def test_several_messages_one_peer_and_tags(way: str, comm: MPI.Intracomm) -> None:
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    x, y, z = (
        np.arange(6.0) + comm.rank,
        np.arange(4, dtype="i2") * 3,
        np.ones(2, "c16") * comm.rank,
    )
    a, b, c = np.zeros(6), np.zeros(4, "i2"), np.zeros(2, "c16")
    sends = [
        Send(x, dt.contiguous(6, "f8"), high, tag=7),
        Send(y, dt.contiguous(4, "i2"), high),
        Send(z, "c16", high, count=2),
    ]
    receives = [
        Recv(b, dt.contiguous(4, "i2"), low),
        Recv(c, "c16", low, count=2),
        Recv(a, dt.contiguous(6, "f8"), low, tag=7),
    ]
    with Exchange(sends, receives, comm=comm) as exchange:
        exchange()
        assert np.array_equal(a, np.arange(6.0) + low)
        assert np.array_equal(b, y) and np.array_equal(c, np.ones(2) * low)
        rows = [row for row in exchange.explain().rows if row.direction == "send"]
        assert len(rows) == 2, "parts of one tag travel as one message"


def test_one_way_messages_are_not_overtaken(way: str, comm: MPI.Intracomm) -> None:
    """A sender that gets nothing back must wait before it uses a buffer again."""
    if comm.size == 1:
        return
    n = 20000
    x, y = np.zeros(n), np.zeros(n)
    sends = [Send(x, dt.contiguous(n, "f8"), comm.rank + 1)] if comm.rank < comm.size - 1 else []
    receives = [Recv(y, dt.contiguous(n, "f8"), comm.rank - 1)] if comm.rank else []
    with Exchange(sends, receives, comm=comm) as exchange:
        for step in range(50):
            x[...] = step * 100 + comm.rank
            exchange()
            if receives:
                assert np.all(y == step * 100 + comm.rank - 1), step


def test_transpose_of_a_matrix(comm: MPI.Intracomm) -> None:
    """Rows to columns: the sender's rows are the receiver's columns."""
    n = 12
    matrix = np.arange(n * n, dtype="f8").reshape(n, n) + 1000 * comm.rank
    turned = np.zeros((n, n))
    column = dt.resized(dt.vector(n, 1, n, "f8"), 0, 8)
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    with Exchange(
        [Send(matrix, dt.contiguous(n * n, "f8"), high)],
        [Recv(turned, dt.contiguous(n, column), low)],
        comm=comm,
    ) as exchange:
        exchange()
    assert np.array_equal(turned, (np.arange(n * n).reshape(n, n) + 1000 * low).T)


def test_plans_release_their_memory(comm: MPI.Intracomm) -> None:
    with halox.Grid((8 * comm.size, 8), periodic=True, comm=comm, device="cpu") as grid:
        u = grid.zeros()
        for number in range(trials(300)):
            plan = grid.plan(u)
            if number % 2:
                plan.close()
        assert grid._context.arena.segments <= 4
