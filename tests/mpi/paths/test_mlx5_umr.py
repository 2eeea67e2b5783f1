"""Network adapters between nodes, with a simulated pyverbs; each rank has a node and an adapter."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send
from halox import datatypes as dt
from halox.errors import ExchangeTimeoutError, HaloxError, PathError
from tests.fakes import fake_verbs
from tests.mpi.conftest import agree
from tests.mpi.limits import short_waits

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.usually(2)]

PATH = "scatter_gather/mlx5_umr"
BLOCKS, BLOCK = 96, 512
SENT = dt.vector(BLOCKS, BLOCK, 2 * BLOCK, "u1")
RECEIVED = dt.vector(BLOCKS // 2, 2 * BLOCK, 3 * BLOCK, "u1")


@pytest.fixture
def ranks(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[MPI.Intracomm]:
    """Yield a new communicator, on which each rank is a node."""
    monkeypatch.setenv("HALOX_NODE", "rank")
    own = comm.Dup()
    yield own
    own.Free()


@pytest.fixture
def wire(ranks: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_verbs.Wire]:
    folder = ranks.bcast(tempfile.mkdtemp() if ranks.rank == 0 else None)
    wire = fake_verbs.install(monkeypatch, (ranks.rank + 1,), folder)
    yield wire
    ranks.barrier()
    wire.close()
    ranks.barrier()
    if ranks.rank == 0:
        shutil.rmtree(folder)


def taken(plan: Any, comm: MPI.Intracomm) -> set[str]:
    return {f"{row.path}/{row.protocol}" for row in plan.explain().rows if row.peer != comm.rank}


def values(rank: int, step: int) -> np.ndarray:
    return ((np.arange(2 * BLOCK * BLOCKS) * 7 + 13 * rank + step) % 251).astype("u1")


def by_mpi(came: np.ndarray, into: np.ndarray) -> np.ndarray:
    """Return the target after a transfer by MPI's own packing and unpacking."""
    sent, received = SENT.to_mpi().Commit(), RECEIVED.to_mpi().Commit()
    packed = np.empty(BLOCKS * BLOCK, "u1")
    sent.Pack(came[: SENT.extent], packed, 0, MPI.COMM_SELF)
    wanted = into.copy()
    received.Unpack(packed, 0, wanted[: RECEIVED.extent], MPI.COMM_SELF)
    sent.Free()
    received.Free()
    return wanted


def ring(comm: MPI.Intracomm, x: Any, y: Any) -> Exchange:
    """Make an exchange in which each rank sends to the next rank, with different types at the two ends."""
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    return Exchange([Send(x, SENT, high)], [Recv(y, RECEIVED, low)], comm=comm, path=PATH)


def check(comm: MPI.Intracomm, y: np.ndarray, step: int) -> None:
    untouched = np.full_like(y, 0xFF)
    wanted = by_mpi(values((comm.rank - 1) % comm.size, step), untouched)
    assert agree(bool((y == wanted).all() and (y != untouched).any()), comm)


def several(comm: MPI.Intracomm) -> list[tuple[Exchange, np.ndarray, np.ndarray]]:
    arrays = [
        (np.zeros(2 * BLOCK * BLOCKS, "u1"), np.full(3 * BLOCK * BLOCKS, 0xFF, "u1")) for _ in "ab"
    ]
    return [(ring(comm, x, y), x, y) for x, y in arrays]


def test_messages_of_different_types_as_mpi_packs_and_unpacks(
    wire: fake_verbs.Wire, ranks: MPI.Intracomm
) -> None:
    (exchange, x, y), (other, a, b) = several(ranks)
    with exchange, other:
        assert taken(exchange, ranks) == {PATH}
        assert "written by the network adapters" in str(exchange.explain())
        for step in range(3):
            x[:], a[:] = values(ranks.rank, step), values(ranks.rank, step + 50)
            exchange()
            check(ranks, y, step)
            exchange.start()
            other.start()
            # Ranks finish in different orders: a rank that waits in one exchange also progresses the second.
            first, last = (exchange, other) if ranks.rank % 2 else (other, exchange)
            first.finish()
            last.finish()
            check(ranks, y, step)
            check(ranks, b, step + 50)


def test_arrays_that_come_and_go(wire: fake_verbs.Wire, ranks: MPI.Intracomm) -> None:
    """New arrays take the addresses of freed ones, and the keys of plans that are closed are used again."""
    kept = several(ranks)
    for step in range(12):
        x, y = values(ranks.rank, step), np.full(3 * BLOCK * BLOCKS, 0xFF, "u1")
        with ring(ranks, x, y) as exchange:
            exchange()
        check(ranks, y, step)
    for exchange, x, y in kept:
        with exchange:
            x[:] = values(ranks.rank, 7)
            exchange()
        check(ranks, y, 7)


def test_halos_of_grids(wire: fake_verbs.Wire, ranks: MPI.Intracomm) -> None:
    """Halos of fields of two dtypes, corners included, equal the halos that host/mpi fills."""
    options: dict[str, Any] = {"halo": 2, "periodic": True, "comm": ranks, "device": "cpu"}
    with (
        halox.Grid((24, 20), path=PATH, **options) as grid,
        halox.Grid((24, 20), path="host/mpi", **options) as plain,
    ):
        fields = [[g.full(-1, "f8"), g.full(-1, "i2")] for g in (grid, plain)]
        plan = grid.plan(*fields[0])
        assert taken(plan, ranks) == {PATH}
        for step in range(2):
            for g, (u, v) in zip((grid, plain), fields, strict=True):
                rows, columns = np.meshgrid(*(np.r_[o] for o in g.owned), indexing="ij")
                g.interior(u)[...] = rows * 100 + columns + step
                g.interior(v)[...] = rows - columns * 3 + step
            plan()
            plain.exchange(*fields[1])
            same = [bool((a == b).all()) for a, b in zip(*fields, strict=True)]
            assert agree(all(same), ranks) and (fields[0][0] >= 0).all()


def test_more_blocks_than_the_keys_of_a_message_hold(
    wire: fake_verbs.Wire, ranks: MPI.Intracomm
) -> None:
    """All ranks raise; a message with fewer blocks takes the path."""
    low, high = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
    x, y = np.arange(60_000, dtype="u1"), np.zeros(60_000, "u1")
    for n, fits in ((9000, False), (4000, True)):
        kind = dt.indexed_block(1, np.cumsum(np.arange(n) % 7 + 2), "u1")
        sends, receives = [Send(x, kind, high)], [Recv(y, kind, low)]
        if not fits:
            with pytest.raises(PathError, match="agree on no chunk size"):
                Exchange(sends, receives, comm=ranks, path=PATH)
            continue
        with Exchange(sends, receives, comm=ranks, path=PATH) as exchange:
            exchange()
        places = np.cumsum(np.arange(n) % 7 + 2)
        assert agree(bool((y[places] == x[places]).all()), ranks)


def test_large_messages_from_all_to_all(wire: fake_verbs.Wire, ranks: MPI.Intracomm) -> None:
    """More bytes are on the way in both directions than sockets between the stand-ins hold."""
    n, peers = 1 << 20, [rank for rank in range(ranks.size) if rank != ranks.rank]
    ends = [(rank, tag) for rank in peers for tag in range(4)]
    kind = dt.vector(16, n // 16, n // 16 + 8, "u1")
    x = np.arange(kind.extent) % 251
    out = [(x + rank + tag).astype("u1") for rank, tag in ends]
    into = [np.zeros(n, "u1") for _ in ends]
    sends = [Send(a, kind, rank, tag=tag) for a, (rank, tag) in zip(out, ends, strict=True)]
    receives = [
        Recv(a, dt.contiguous(n, "u1"), rank, tag=tag)
        for a, (rank, tag) in zip(into, ends, strict=True)
    ]
    inside = np.arange(kind.extent) % (n // 16 + 8) < n // 16
    came = [(x + ranks.rank + tag).astype("u1")[inside] for _, tag in ends]
    with Exchange(sends, receives, comm=ranks, path=PATH) as exchange:
        for _ in range(3):
            exchange()
            same = [bool((a == b).all()) for a, b in zip(into, came, strict=True)]
            assert agree(all(same), ranks)


def test_without_pyverbs_it_says_so(ranks: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """`explain` gives the reason; if the path is requested, all ranks raise, although only one lacks pyverbs."""
    if ranks.rank == 1:
        monkeypatch.setitem(sys.modules, "pyverbs", None)
    else:
        fake_verbs.install(monkeypatch, (ranks.rank + 1,))
    options: dict[str, Any] = {"proc_shape": (ranks.size, 1), "comm": ranks, "device": "cpu"}
    with halox.Grid((4 * ranks.size, 6), **options) as grid:
        report = grid.plan(grid.zeros("f8")).explain()
        near = [row for row in report.rows if 1 in (row.peer, ranks.rank)]
        assert near or ranks.size > 2
        for row in near:
            said = "rank 1 has no mlx5 adapter: pyverbs cannot be imported"
            assert row.path == "host" and said in row.why_not["scatter_gather"]
    with halox.Grid((4 * ranks.size, 6), path=PATH, **options) as grid:
        with pytest.raises(PathError) as caught:
            grid.plan(grid.zeros("f8"))
        assert len(set(ranks.allgather(str(caught.value).partition("; ")[0][-40:]))) == 1


def test_an_adapter_that_refuses_on_one_rank(wire: fake_verbs.Wire, ranks: MPI.Intracomm) -> None:
    if ranks.rank == 1:
        wire.most_keys = 3
    x, y = np.zeros(2 * BLOCK * BLOCKS, "u1"), np.zeros(3 * BLOCK * BLOCKS, "u1")
    with pytest.raises(HaloxError, match="of rank 1 refuses to make another key"):
        ring(ranks, x, y)


def test_a_rank_that_does_not_come_is_named(
    wire: fake_verbs.Wire, ranks: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = np.zeros(2 * BLOCK * BLOCKS, "u1"), np.zeros(3 * BLOCK * BLOCKS, "u1")
    exchange = ring(ranks, x, y)
    if ranks.rank == 1:
        ranks.barrier()
        return
    try:
        if ranks.rank == 0:
            with short_waits(), pytest.raises(ExchangeTimeoutError):
                exchange()
    finally:
        ranks.barrier()
