"""Ranks on several nodes: shared memory within a node, MPI between nodes. tests/test_nodes.py starts the ranks.

``HALOX_TEST_NODES`` gives the expected node of each rank ("0,0,1,1"); without it, a fixture names the nodes.
"""

from __future__ import annotations

import contextlib
import os
from itertools import product
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send, datatypes
from halox.errors import ExchangeTimeoutError
from tests.mpi.conftest import agree, come_together
from tests.mpi.limits import SHORT_S, short_waits
from tests.support import full

pytestmark = [pytest.mark.ranks(2, 3, 4, 8), pytest.mark.usually(4)]

NODES = os.environ.get("HALOX_TEST_NODES", "")


# On four ranks: nodes of alternate ranks, and nodes of two ranks and of one ("rank" is a node of this rank alone).
NAMES = {
    "turns": ("a", "b", "a", "b"),
    "mixed": ("a", "b", "a", "rank"),
    "halves": ("a", "a", "b", "b"),
    "each": ("rank",) * 4,
}
LAYOUTS: list[Any] = ["halves"] if NODES else ["mixed", *full("turns", "halves", "each")]


@pytest.fixture(autouse=True, params=LAYOUTS)
def nodes(
    request: pytest.FixtureRequest, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, ...]:
    """Return a name of the node of each rank, as started or as named here."""
    if NODES:
        return tuple(NODES.split(","))
    names = (NAMES[request.param] * comm.size)[: comm.size]
    monkeypatch.setenv("HALOX_NODE", names[comm.rank])
    return tuple(name if name != "rank" else str(rank) for rank, name in enumerate(names))


def step_of(u: np.ndarray) -> np.ndarray:
    """Make a step in integers, so that the order of the additions does not matter."""
    total = sum(np.roll(u, s, axis) for axis in range(3) for s in (-1, 1))
    return (3 * u + total) % 10007


def test_periodic_steps_equal_the_serial_ones(comm: MPI.Intracomm, nodes: tuple[str, ...]) -> None:
    shape = (18, 20, 22)
    i, j, k = np.indices(shape)
    serial = (i * 31 + j * 17 + k * 7 + i * j * k) % 10007
    with halox.Grid(shape, periodic=True, comm=comm, device="cpu") as grid:
        u, other = grid.zeros("i8"), grid.zeros("i8")
        grid.interior(u)[...] = serial[grid.owned]
        for _ in range(3):
            grid.exchange(u)
            total = sum(
                u[tuple(slice(1 + d, n - 1 + d) for d, n in zip(offset, u.shape, strict=True))]
                for offset in product((-1, 0, 1), repeat=3)
                if sum(map(abs, offset)) == 1
            )
            grid.interior(other)[...] = (3 * grid.interior(u) + total) % 10007
            u, other = other, u
            serial = step_of(serial)
        assert agree(np.array_equal(grid.interior(u), serial[grid.owned]), comm)
        for row in grid.explain(u).rows:
            near = nodes[row.peer] == nodes[comm.rank]
            wanted = (
                {"copy"} if row.peer == comm.rank else {"shared", "direct"} if near else {"mpi"}
            )
            assert row.protocol in wanted, row


def test_accumulate_equals_the_serial_one(comm: MPI.Intracomm) -> None:
    shape = (12, 13, 14)
    with halox.Grid(shape, periodic=True, comm=comm, device="cpu") as grid:
        u = grid.zeros("i8")
        u[...] = np.random.default_rng(comm.rank).integers(1, 100, u.shape)
        at = np.meshgrid(
            *(
                np.arange(own.start - 1, own.stop + 1) % n
                for own, n in zip(grid.owned, shape, strict=True)
            ),
            indexing="ij",
        )
        mine = np.zeros(shape, "i8")
        np.add.at(mine, tuple(at), u)
        serial = np.empty_like(mine)
        comm.Allreduce(mine, serial)
        grid.accumulate(u)
        assert agree(np.array_equal(grid.interior(u), serial[grid.owned]), comm)


@pytest.mark.parametrize("nbytes", [48, 3 << 20])
def test_typed_messages_between_all(nbytes: int, comm: MPI.Intracomm) -> None:
    """Every rank sends every second element of an array to every rank, compared with Alltoall."""
    n, size = nbytes // 8, comm.size
    n = n // size if n > size else n
    source = np.arange(2.0 * n * size) + 1e7 * comm.rank
    target, wanted = np.full((size, n), -1.0), np.empty((size, n))
    sends = [Send(source[2 * n * r :], datatypes.vector(n, 1, 2, "f8"), r) for r in range(size)]
    receives = [Recv(target[r], datatypes.contiguous(n, "f8"), r) for r in range(size)]
    with Exchange(sends, receives, comm=comm) as exchange:
        for step in range(2):
            source += step
            comm.Alltoall(np.ascontiguousarray(source[::2]), wanted)
            target[...] = -1
            comm.Barrier()
            exchange()
            assert agree(np.array_equal(target, wanted), comm), step
            comm.Barrier()


@pytest.mark.ranks(2, 3, 4)
def test_a_rank_that_stays_away_is_named(comm: MPI.Intracomm) -> None:
    """The last rank makes no exchange; the error of its neighbour names it."""
    size, last = comm.size, comm.size - 1
    # Neighbours in the order of their ranks, on any nodes.
    grid = halox.Grid(
        (4 * size, 6), proc_shape=(size, 1), comm=comm.Dup(), device="cpu", placement=False
    )
    u = grid.zeros()
    grid.exchange(u)
    if comm.rank == last - 1:
        with short_waits(), pytest.raises(ExchangeTimeoutError, match=rf"waited .*\b{last}\b"):
            grid.exchange(u)
    elif comm.rank != last:
        # The neighbour may have timed out, too.
        with short_waits(3 * SHORT_S), contextlib.suppress(ExchangeTimeoutError):
            grid.exchange(u)
    come_together(comm)


def test_transposes_between_nodes(comm: MPI.Intracomm) -> None:
    shape = (8, 10, 12)
    rows = halox.Grid(shape, halo=0, proc_shape=(comm.size, 1, 1), comm=comm, device="cpu")
    columns = halox.Grid(shape, halo=0, proc_shape=(1, 1, comm.size), comm=comm, device="cpu")
    whole = np.arange(8 * 10 * 12.0).reshape(shape)
    u, v = rows.zeros(), columns.zeros()
    u[...] = whole[rows.owned]
    turn = halox.Transpose(rows, columns)
    turn.forward(u, v)
    assert agree(np.array_equal(v, whole[columns.owned]), comm)
    u[...] = 0
    turn.backward(v, u)
    assert agree(np.array_equal(u, whole[rows.owned]), comm)
    for item in (turn, columns, rows):
        item.close()
