"""NumPy arrays that the kernel copies between processes: selection, refusals, new arrays, and failures."""

from __future__ import annotations

import errno
import os
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send
from halox import datatypes as dt
from halox.errors import ExchangeTimeoutError, HaloxError, PathError
from halox.paths.scatter_gather.node_channel import NodeChannel
from halox.runtime import cross_memory
from halox.runtime.cross_memory import MemoryCopy, survey
from halox.runtime.world import World
from tests.mpi.conftest import agree
from tests.mpi.limits import short_waits

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.usually(2)]

PATH = "scatter_gather/process_vm"
BLOCK, COUNT = 16 << 10, 8
LONG = dt.vector(COUNT, BLOCK, 2 * BLOCK, "u1")


def peers(comm: MPI.Intracomm) -> tuple[int, int]:
    return (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


def ring(comm: MPI.Intracomm, x: Any, y: Any, kind: Any = LONG, path: str | None = None) -> Any:
    """Make an exchange in which each rank sends to the next, around a ring."""
    low, high = peers(comm)
    return Exchange([Send(x, kind, high)], [Recv(y, kind, low)], comm=comm, path=path)


def chain(comm: MPI.Intracomm, x: Any, y: Any, kind: Any = LONG, path: str | None = None) -> Any:
    """Make an exchange in which each rank except the last sends to the next, in one direction only."""
    sends = [Send(x, kind, comm.rank + 1)] if comm.rank < comm.size - 1 else []
    receives = [Recv(y, kind, comm.rank - 1)] if comm.rank else []
    return Exchange(sends, receives, comm=comm, path=path)


def taken(exchange: Any) -> set[str]:
    return {f"{row.path}/{row.protocol}" for row in exchange.explain().rows}


def values(comm: MPI.Intracomm, rank: int, step: int = 0) -> np.ndarray:
    return ((np.arange(2 * BLOCK * COUNT) * 7 + 13 * rank + step) % 251).astype("u1")


def check(comm: MPI.Intracomm, y: np.ndarray, step: int = 0) -> None:
    came = values(comm, peers(comm)[0], step).reshape(COUNT, 2, BLOCK)
    found = y.reshape(COUNT, 2, BLOCK)
    assert agree(bool((found[:, 0] == came[:, 0]).all() and not found[:, 1].any()), comm)


@pytest.mark.parametrize(
    ("block", "count", "wanted", "both_ways"),
    [
        (4096, 32, PATH, "host/shared"),
        (4096, 31, "host/shared", "host/shared"),
        (2048, 128, "host/shared", "host/shared"),
        (16384, 64, PATH, PATH),
        (16384, 63, PATH, "host/shared"),
    ],
    ids=["long", "few", "short", "longer", "fewer"],
)
def test_long_blocks_are_not_packed(
    block: int, count: int, wanted: str, both_ways: str, comm: MPI.Intracomm
) -> None:
    """The kernel copies long blocks of user arrays. Short blocks and few bytes are packed, sooner if both send."""
    x, y = (np.zeros(2 * block * count, "u1") for _ in range(2))
    kind = dt.vector(count, block, 2 * block, "u1")
    with chain(comm, x, y, kind) as exchange:
        assert taken(exchange) == {wanted}
        why = exchange.explain().rows[0].reason
        said = f"copied by the kernel: blocks of {block} B on average, half by each end"
        assert (said if wanted == PATH else "packed") in why
    if comm.size == 2:
        with ring(comm, x, y, kind) as exchange:
            assert taken(exchange) == {both_ways}


def test_fields_in_shared_memory_are_read_in_place(comm: MPI.Intracomm) -> None:
    with halox.Grid(
        (4 * comm.size, 1 << 14), periodic=True, proc_shape=(comm.size, 1), comm=comm, corners=False
    ) as grid:
        rows = [row for row in grid.plan(grid.zeros()).explain().rows if row.peer != comm.rank]
        assert {f"{row.path}/{row.protocol}" for row in rows} == {"host/direct"}
        assert all("scatter_gather" not in row.why_not for row in rows), "it is possible, too"


def test_an_exchange_serves_arrays_that_come_and_go(comm: MPI.Intracomm) -> None:
    """One plan serves all arrays of a layout; the ranks only tell one another the addresses."""
    with halox.Grid(
        (4 * comm.size, 64), periodic=True, proc_shape=(comm.size, 1), comm=comm, path=PATH
    ) as grid:
        low, high = peers(comm)
        kept = []
        for step in range(12):
            u = np.full((*grid.padded_shape,), -1.0)
            if (step + comm.rank) % 3:
                kept.append(u)  # the next array has another address, which differs between ranks
            u[1:-1] = 100 * step + comm.rank
            grid.exchange(u)
            right = (u[0] == 100 * step + low).all() and (u[-1] == 100 * step + high).all()
            assert agree(bool(right), comm), step
        assert grid.plans_made == 1
        for step, v in enumerate(kept):
            v[1:-1] = step + 1000 * comm.rank
        n = comm.allreduce(len(kept), MPI.MIN)
        for v in kept[:n]:
            grid.exchange(v)
            assert agree(bool((v[0] - v[1] == 1000 * (low - comm.rank)).all()), comm)


def test_messages_that_come_go_back(comm: MPI.Intracomm) -> None:
    """A rank sends in the next plan the blocks that it has received in the last one."""
    rows, columns = (comm.size, 1), (1, comm.size)
    n = 2 * comm.size + 1
    with (
        halox.Grid((n, n), halo=0, proc_shape=rows, comm=comm, path=PATH) as a,
        halox.Grid((n, n), halo=0, proc_shape=columns, comm=comm) as b,
        halox.Transpose(a, b) as transpose,
    ):
        whole = np.arange(float(n * n)).reshape(n, n)
        u, v = whole[a.owned].copy(), np.full(b.rank_shape, -1.0)
        for _ in range(2):
            transpose.forward(u, v)
            ok = bool((v == whole[b.owned]).all())
            u[...], v[...] = -1, v + 1
            whole = whole + 1
            transpose.backward(v, u)
            assert agree(ok and bool((u == whole[a.owned]).all()), comm)


def test_both_ends_move_half_of_what_goes_one_way(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A one-way message is half put by its sender, half got by its receiver; both ways, each rank gets its message."""
    moved: list[tuple[str, int]] = []

    class Counted(MemoryCopy):
        def __init__(self, kind: Any, *rest: Any) -> None:
            super().__init__(kind, *rest)
            self.kind = kind

        def __call__(self) -> None:
            moved.append((self.kind, self.nbytes))
            super().__call__()

    monkeypatch.setattr("halox.paths.scatter_gather.process_vm.MemoryCopy", Counted)
    x, y = values(comm, comm.rank), np.zeros(2 * BLOCK * COUNT, "u1")
    sends = [Send(x, LONG, 1)] if comm.rank == 0 else []
    receives = [Recv(y, LONG, 0)] if comm.rank == 1 else []
    half = BLOCK * COUNT // 2
    with Exchange(sends, receives, comm=comm, path=PATH) as exchange:
        exchange()
        found = {kind: sum(n for k, n in moved if k == kind) for kind in ("read", "write")}
        wanted = {0: (0, half), 1: (half, 0)}.get(comm.rank, (0, 0))
        assert agree((found["read"], found["write"]) == wanted, comm), found
        if comm.rank == 1:
            check_one = values(comm, 0).reshape(COUNT, 2, BLOCK)[:, 0]
            assert (y.reshape(COUNT, 2, BLOCK)[:, 0] == check_one).all()
    moved.clear()
    with ring(comm, x, np.zeros_like(y), path=PATH) as exchange:
        exchange()
    both_ways = comm.size == 2
    kinds = {kind for kind, _ in moved}
    assert agree(kinds == ({"read"} if both_ways else {"read", "write"}), comm), kinds


def test_blocks_of_more_than_a_call_takes(comm: MPI.Intracomm) -> None:
    """Thousands of short blocks at one end, and a different number of blocks at the other end."""
    n, low, high = 5000, *peers(comm)
    x, y = np.arange(3 * n, dtype="f4") + 100_000 * comm.rank, np.zeros(5 * n, "f4")
    sends = [Send(x, dt.vector(n, 2, 3, "f4"), high)]
    receives = [Recv(y, dt.vector(2 * n, 1, 2, "f4"), low)]
    with Exchange(sends, receives, comm=comm, path=PATH) as exchange:
        for step in range(3):
            x += step
            exchange()
            came = np.arange(3 * n, dtype="f4").reshape(n, 3)[:, :2].ravel() + 100_000 * low
            came += sum(range(step + 1))
            found = y[: 4 * n].reshape(2 * n, 2)
            assert agree(bool((found[:, 0] == came).all() and not found[:, 1].any()), comm)


# Refusals


@pytest.fixture
def refusing(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the kernel refuse one rank's reads and writes, or its writes only."""
    calls = cross_memory._functions()

    def refuse(rank: int, code: int, which: int = 0) -> None:
        def fail(*_: Any) -> int:
            import ctypes

            ctypes.set_errno(code)
            return -1

        mine = tuple(fail if n >= which else calls[n] for n in range(2))
        monkeypatch.setattr(
            cross_memory, "_functions", lambda: mine if comm.rank == rank else calls
        )

    return refuse


def fresh(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a new communicator, for which halox has cached nothing."""
    return comm.Dup()


@pytest.mark.parametrize("which", [0, 1], ids=["reads and writes", "writes alone"])
def test_a_kernel_that_refuses_on_one_side(which: int, refusing: Any, comm: MPI.Intracomm) -> None:
    """Rank 1 has no permission: all ranks raise if the path is requested, and pack otherwise."""
    refusing(1, errno.EPERM, which)
    own = fresh(comm)
    x, y = values(comm, comm.rank), np.zeros(2 * BLOCK * COUNT, "u1")
    with ring(own, x, y) as exchange:
        assert taken(exchange) <= {"host/shared", PATH}
        for row in exchange.explain().rows:
            if 1 in (row.peer, comm.rank):
                why = row.why_not["scatter_gather"]
                assert "rank 1 cannot reach the memory of rank" in why and "not permitted" in why
        exchange()
    check(comm, y)
    with pytest.raises(PathError) as caught:
        ring(own, x, y, path="scatter_gather")
    texts = comm.allgather(str(caught.value))
    assert len(set(texts)) == 1, "one error on all ranks"
    own.Free()


def test_a_process_that_is_not_the_rank(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another PID namespace a rank's number may belong to another process, which must not be written to."""
    parent = os.getppid()
    own = fresh(comm)
    world = World(own, "tune")
    written = []

    class Watched(MemoryCopy):
        def __init__(self, kind: Any, pid: int, *blocks: Any) -> None:
            super().__init__(kind, pid, *blocks)
            written.append((kind, pid))

    monkeypatch.setattr(cross_memory, "MemoryCopy", Watched)
    if comm.rank == 1:
        monkeypatch.setattr(os, "getpid", lambda: parent)
    found = survey(world)
    assert ("write", parent) not in written
    others = [rank for rank in range(comm.size) if rank != 1]
    for rank in others:
        why = found.why_not(rank, 1)
        assert why is not None and "PID namespaces" in why
        assert why == found.why_not(1, rank)
    if comm.size > 2:
        assert found.why_not(0, 2) is None
    world.close()
    own.Free()


def test_ranks_of_other_pid_namespaces(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks in different PID namespaces cannot use each other's numbers, and touch no process."""
    monkeypatch.setattr(cross_memory, "_namespace", lambda: 1 + comm.rank % 2)
    monkeypatch.setattr(cross_memory, "MemoryCopy", lambda *_: pytest.fail("it was tried"))
    own = fresh(comm.Split(comm.rank // 2))
    if own.size == 2:
        x, y = values(comm, comm.rank), np.zeros(2 * BLOCK * COUNT, "u1")
        with pytest.raises(PathError):
            ring(own, x, y, path=PATH)
    own.Free()
    comm.Barrier()


def test_a_system_without_such_calls(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError(errno.ENOSYS, "this system has no process_vm_readv")

    monkeypatch.setattr(cross_memory, "_functions", missing)
    own = fresh(comm)
    x, y = values(comm, comm.rank), np.zeros(2 * BLOCK * COUNT, "u1")
    with pytest.raises(PathError):
        ring(own, x, y, path=PATH)
    own.Free()


def test_ranks_of_other_nodes(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_NODE", "rank")
    x, y = values(comm, comm.rank), np.zeros(2 * BLOCK * COUNT, "u1")
    with pytest.raises(PathError):
        ring(comm, x, y, path=PATH)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("copy_engine", "these arrays are NumPy's"),
        ("mlx5_umr", "mlx5_umr is for different nodes, and ranks"),
        ("pigeon", "there is no protocol 'scatter_gather/pigeon' of the path"),
    ],
)
@pytest.mark.parametrize("by", ["argument", "variable"])
def test_engines_that_are_not_there(
    engine: str, said: str, by: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks raise the same error."""
    x, y = values(comm, comm.rank), np.zeros(2 * BLOCK * COUNT, "u1")
    path: str | None = f"scatter_gather/{engine}"
    if by == "variable":
        monkeypatch.setenv("HALOX_PATH", str(path))
        path = None
    with pytest.raises(PathError, match=said) as caught:
        ring(comm, x, y, path=path)
    assert len(set(comm.allgather(str(caught.value)))) == 1


def test_sizes_that_cannot_agree(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message needs too many windows: all ranks raise one error, with a remedy."""
    monkeypatch.setattr("halox.paths.scatter_gather.windows.MOST_WINDOWS", 2)
    n, (low, high) = 4000, peers(comm)
    x, y = np.zeros(2 * n, "u1"), np.zeros(2 * n, "u1")
    kind = dt.vector(n, 1, 2, "u1")
    with pytest.raises(PathError):
        Exchange([Send(x, kind, high)], [Recv(y, kind, low)], comm=comm, path=PATH)


# Failures during an exchange


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (errno.ESRCH, ExchangeTimeoutError, "whose process has ended"),
        (errno.EFAULT, PathError, "an array of the plan was freed"),
        (errno.EPERM, PathError, "any more"),
    ],
)
def test_a_call_that_fails(
    code: int, kind: type[HaloxError], text: str, comm: MPI.Intracomm
) -> None:
    x, y = values(comm, comm.rank), np.zeros(2 * BLOCK * COUNT, "u1")
    own = fresh(comm)
    exchange = ring(own, x, y, path=PATH)
    exchange()
    caught: HaloxError | None = None
    if comm.rank == 0:
        (channel,) = (c for c in exchange._plan._channels if isinstance(c, NodeChannel))

        def fail() -> None:
            raise OSError(code, os.strerror(code))

        moves: Any = channel._transfers  # one call of the kernel each
        channel._transfers[:] = [partial(t.func, fail, *t.args[1:]) for t in moves]
    comm.Barrier()
    with short_waits(2):
        try:
            exchange()
        except HaloxError as error:
            caught = error
    told = comm.allgather(str(caught))
    if comm.rank == 0:
        assert isinstance(caught, kind) and text in str(caught)
    assert "rank 0 cannot reach the memory of rank" in told[0]
    near = comm.rank in (1, comm.size - 1)
    assert not near or isinstance(caught, HaloxError), "nobody hangs"
    comm.Barrier()


def test_memory_is_reached_exactly(comm: MPI.Intracomm) -> None:
    """The kernel stops at the first block that it cannot reach: the call raises, and returns no short count."""
    a, b = np.arange(64, dtype="u1"), np.zeros(64, "u1")
    own = np.array([[b.ctypes.data, 16], [b.ctypes.data + 32, 16]], np.uint64)
    theirs = np.array([[a.ctypes.data, 16], [1, 16]], np.uint64)
    with pytest.raises(OSError) as caught:
        MemoryCopy("read", os.getpid(), own, theirs)()
    assert caught.value.errno == errno.EFAULT
    theirs[1, 0] = a.ctypes.data + 48
    call = MemoryCopy("read", os.getpid(), own, theirs)
    call()
    assert b[:16].tolist() == a[:16].tolist() and b[32:48].tolist() == a[48:].tolist()
    b[:] = 0
    call._copy_rest(20)  # as after a call that moved 20 bytes only
    assert not b[:32].any() and b[36:48].tolist() == a[52:].tolist()
