"""Typed messages between ranks, compared with MPI's own transfer of the same types."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send
from halox import datatypes as dt
from halox.errors import MismatchError
from tests.mpi.conftest import mapped_bytes
from tests.support import trials

pytestmark = pytest.mark.usually(1, 2)

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
@pytest.mark.part(3)
def test_round_a_ring(sender: str, receiver: str, way: str, comm: MPI.Intracomm) -> None:
    """Different types of one signature at the two ends give the result of Sendrecv with the MPI types."""
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


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("change", ["none", "one more", "other pairs"])
def test_numbers_of_messages(change: str, comm: MPI.Intracomm) -> None:
    """The error names a pair of ranks, also if each rank sends and receives as many messages in all."""
    n, rng = comm.size, np.random.default_rng(comm.size)
    sent = rng.integers(0, 3, (n, n))  # messages of each rank to each rank
    if change == "other pairs":
        sent[:2, :2] = np.eye(min(n, 2))
    received = sent.copy()
    if change == "one more":
        received[rng.integers(n), n - 1] += 1
    elif change == "other pairs":
        received[:2, :2] = received[:2, :2][::-1]
    own = comm.rank
    counts = {Send: sent[own], Recv: received[:, own]}
    sends, receives = (
        [kind(np.zeros(1), "f8", peer, tag=tag) for peer in range(n) for tag in range(count[peer])]
        for kind, count in counts.items()
    )
    wrong = np.argwhere((sent != received).T)
    if not len(wrong):
        Exchange(sends, receives, comm=comm).close()
        return
    receiver, sender = wrong[0]
    with pytest.raises(MismatchError) as caught:
        Exchange(sends, receives, comm=comm)
    assert f"rank {sender} sends {sent[sender, receiver]} message" in str(caught.value)


def test_a_failed_exchange_leaves_no_memory(comm: MPI.Intracomm) -> None:
    peer, n = (comm.rank + 1) % comm.size, 1 << 16
    low, sent, other = (comm.rank - 1) % comm.size, dt.contiguous(n, "f8"), dt.contiguous(n, "i8")
    u, before = np.zeros(n), mapped_bytes()
    for _ in range(3):
        with pytest.raises(MismatchError):
            Exchange([Send(u, sent, peer)], [Recv(u.copy(), other, low)], comm=comm)
    assert mapped_bytes() <= before


@pytest.mark.ranks(1)
def test_many_columns_of_a_matrix(comm: MPI.Intracomm) -> None:
    """The receives interleave and share no byte, so they are accepted."""
    matrix = np.zeros((50, 100))
    columns = [dt.subarray(matrix.shape, (50, 1), (0, n), "f8") for n in range(100)]
    sends = [Send(np.full(50, 1.0 + n), "f8", 0, 50, tag=n) for n in range(100)]
    receives = [Recv(matrix, column, 0, tag=tag) for tag, column in enumerate(columns)]
    with Exchange(sends, receives, comm=comm) as exchange:
        exchange()
    assert np.array_equal(matrix, np.broadcast_to(1.0 + np.arange(100), (50, 100)))


def test_short_blocks_of_odd_sizes(way: str, comm: MPI.Intracomm) -> None:
    """Triples of floats, strided differently at the two ends, in one message with other parts.

    There are so many that Open MPI packs them.
    """
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    n, triple = 200, dt.contiguous(3, "f4")
    sent, received = dt.vector(n, 1, 2, triple), dt.vector(n // 2, 2, 3, triple)
    x, tail = np.zeros(6 * n, "f4"), np.zeros(40)
    y, end = np.zeros(6 * n, "f4"), np.zeros(20)
    sends = [Send(x, sent, high), Send(tail, dt.vector(20, 1, 2, "f8"), high)]
    receives = [Recv(y, received, low), Recv(end, dt.contiguous(20, "f8"), low)]
    with Exchange(sends, receives, comm=comm) as exchange:
        for step in range(3):
            x[...] = np.arange(6 * n) + 1000 * comm.rank + 7 * step
            tail[...] = np.arange(40) - comm.rank - step
            comm.Barrier()
            exchange()
            wanted = (np.arange(6 * n) + 1000 * low + 7 * step).reshape(n, 6)[:, :3]
            rows = y[: 9 * (n // 2)].reshape(n // 2, 9)
            assert np.array_equal(rows[:, :6].reshape(n, 3), wanted)
            assert not y[6:9].any() and np.array_equal(end, np.arange(0, 40, 2) - low - step)
            comm.Barrier()


def test_new_fields_with_wide_halos_of_floats(way: str, comm: MPI.Intracomm) -> None:
    """Halo rows of three floats: the plan of the first array also exchanges new arrays."""
    shape = (200, 8 * comm.size)
    i, j = np.indices(shape, "f4")
    with halox.Grid(
        shape, halo=3, periodic=True, proc_shape=(1, comm.size), comm=comm, device="cpu"
    ) as grid:
        for step in range(3):
            u = np.full(grid.padded_shape, -1, "f4")
            whole = i * 100 + j + step
            grid.interior(u)[...] = whole[grid.owned]
            grid.exchange(u)
            wrapped = np.pad(whole, 3, mode="wrap")
            first = grid.owned[1].start
            assert np.array_equal(u, wrapped[:, first : first + u.shape[1]])


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


@pytest.mark.ranks(1, 2, 3, 4)
def test_plans_release_their_memory(comm: MPI.Intracomm) -> None:
    with halox.Grid((8 * comm.size, 8), periodic=True, comm=comm, device="cpu") as grid:
        u = grid.zeros()
        for number in range(trials(300)):
            plan = grid.plan(u)
            if number % 2:
                plan.close()
            if number == 10:
                before = mapped_bytes()
        assert mapped_bytes() <= before


def types_of_mpi() -> dict[str, MPI.Datatype]:
    """Return a predefined type and derived types of every combiner that halox reads, within 1024 bytes."""
    double, pair = MPI.DOUBLE, MPI.DOUBLE.Create_vector(2, 1, 3)
    made = {
        "contiguous": double.Create_contiguous(5),
        "vector": double.Create_vector(4, 2, 5),
        "hvector": double.Create_hvector(4, 2, 72),
        "indexed": double.Create_indexed([1, 3, 2], [20, 2, 9]),
        "hindexed": double.Create_hindexed([2, 1], [80, 8]),
        "indexed_block": double.Create_indexed_block(2, [7, 1, 30]),
        "hindexed_block": double.Create_hindexed_block(2, [96, 16]),
        "struct": MPI.Datatype.Create_struct([1, 2], [0, 200], [pair, MPI.INT]),
        "subarray": double.Create_subarray([6, 8], [3, 4], [2, 1]),
        "resized": pair.Create_resized(-8, 40),
        "dup": pair.Dup(),
        "nested": pair.Create_resized(0, 16).Create_vector(3, 2, 4),
        "predefined": double.Dup(),
    }
    pair.Free()
    return made


@pytest.mark.parametrize("name", types_of_mpi())
def test_datatypes_of_mpi4py(name: str, comm: MPI.Intracomm) -> None:
    """Messages of mpi4py's types move the bytes that MPI moves, also if the types are freed before the exchange."""
    count, types = 2, types_of_mpi()
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    given = MPI.DOUBLE if name == "predefined" else types[name]
    source = np.random.default_rng(comm.rank).integers(0, 256, 1024).astype("u1")
    target, wanted = np.full(1024, 7, "u1"), np.full(1024, 7, "u1")
    committed = given.Dup().Commit()
    comm.Sendrecv([source, count, committed], high, 0, [wanted, count, committed], low, 0)
    assert (wanted != 7).any()
    with Exchange(
        [Send(source, given, high, count)], [Recv(target, given, low, count)], comm=comm
    ) as exchange:
        for one in (committed, *types.values()):
            one.Free()
        exchange()
    assert np.array_equal(target, wanted)


def test_messages_to_nobody_are_empty(comm: MPI.Intracomm) -> None:
    """On a row of ranks with walls, ``MPI.PROC_NULL`` leaves halos at walls as they are."""
    row = comm.Create_cart((comm.size,))
    below, above = row.Shift(0, 1)
    u = np.array([-1.0, comm.rank, comm.rank, -1.0])
    wanted = u.copy()
    row.Sendrecv(u[2:3], above, 0, wanted[:1], below, 0)
    row.Sendrecv(u[1:2], below, 0, wanted[3:], above, 0)
    with Exchange(
        [Send(u[2:], "f8", above, tag=1), Send(u[1:], MPI.DOUBLE, below, tag=2)],
        [Recv(u, "f8", below, tag=1), Recv(u[3:], "f8", above, tag=2)],
        comm=row,
    ) as exchange:
        exchange()
    assert np.array_equal(u, wanted)
    assert (u[0] == -1) == (comm.rank == 0)
    with Exchange([Send(None, None, MPI.PROC_NULL)], [], comm=row) as nothing:
        nothing()  # waits for no rank
    row.Free()
