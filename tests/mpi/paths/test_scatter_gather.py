"""NumPy arrays that the kernel copies between processes: selection, refusals, new arrays, and failures."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send
from halox import datatypes as dt
from halox.errors import HaloxError, PathError
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
        assert grid.domain.plans_made == 1
        for step, v in enumerate(kept):
            v[1:-1] = step + 1000 * comm.rank
        n = comm.allreduce(len(kept), MPI.MIN)
        for v in kept[:n]:
            grid.exchange(v)
            assert agree(bool((v[0] - v[1] == 1000 * (low - comm.rank)).all()), comm)


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


def refuse(monkeypatch: pytest.MonkeyPatch, *calls: bool) -> None:
    """Let the kernel refuse this rank's reads and writes, or its writes alone; without flags it has no such calls."""
    real = cross_memory._functions()

    def fail(*_: Any) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    def functions() -> Any:
        if not calls:
            raise OSError(errno.ENOSYS, "this system has no process_vm_readv")
        return tuple(fail if refused else call for call, refused in zip(real, calls, strict=True))

    monkeypatch.setattr(cross_memory, "_functions", functions)


def fresh(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a new communicator, for which halox has cached nothing."""
    return comm.Dup()


@pytest.mark.parametrize("calls", [(True, True), (False, True), ()], ids=["all", "writes", "none"])
def test_a_kernel_that_refuses_on_one_side(
    calls: tuple[bool, ...], comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has no permission: all ranks raise if the path is requested, and pack otherwise."""
    if comm.rank == 1:
        refuse(monkeypatch, *calls)
    own = fresh(comm)
    x, y = values(comm, comm.rank), np.zeros(2 * BLOCK * COUNT, "u1")
    with ring(own, x, y) as exchange:
        assert taken(exchange) == {"host/shared"}, "on the whole node"
        for row in exchange.explain().rows:
            assert "rank 1 cannot reach the memory of rank" in row.why_not["scatter_gather"]
        exchange()
    check(comm, y)
    with pytest.raises(PathError) as caught:
        ring(own, x, y, path="scatter_gather")
    assert len(set(comm.allgather(str(caught.value)))) == 1, "one error on all ranks"
    own.Free()


def test_a_process_that_is_not_the_rank(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another PID namespace a rank's number may belong to another process, which must not be written to."""
    parent, own = os.getppid(), fresh(comm)
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
    assert found.refused is not None and "PID namespace" in found.refused
    assert len(set(comm.allgather(found.refused))) == 1
    world.close()
    own.Free()


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("copy_engine", "it has no such protocol for this message, but process_vm"),
        ("mlx5_umr", "it has no such protocol for this message, but process_vm"),
        ("pigeon", "there is no protocol 'scatter_gather/pigeon' of the path"),
        ("process_vm", "on different nodes, where mlx5_umr alone works"),
    ],
)
@pytest.mark.parametrize("by", ["argument", "variable"])
def test_engines_that_are_not_there(
    engine: str, said: str, by: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks raise the same error."""
    x, y = values(comm, comm.rank), np.zeros(2 * BLOCK * COUNT, "u1")
    path: str | None = f"scatter_gather/{engine}"
    if engine == "process_vm":
        monkeypatch.setenv("HALOX_NODE", "rank")
    if by == "variable":
        monkeypatch.setenv("HALOX_PATH", str(path))
        path = None
    with pytest.raises(PathError, match=said) as caught:
        ring(comm, x, y, path=path)
    assert len({str(text)[:40] for text in comm.allgather(str(caught.value))}) == 1


# Failures during an exchange


def test_memory_that_the_kernel_cannot_reach(comm: MPI.Intracomm) -> None:
    """A rank's array is gone: all its neighbours and the rank itself raise, and nobody hangs."""
    page, own = mmap.PAGESIZE, fresh(comm)
    memory = mmap.mmap(-1, -(-2 * BLOCK * COUNT // page) * page)
    x, y = np.frombuffer(memory, np.uint8), np.zeros(2 * BLOCK * COUNT, "u1")
    x[:] = values(comm, comm.rank)
    exchange = ring(own, x[: y.size], y, path=PATH)
    exchange()
    check(comm, y)
    protect = ctypes.CDLL(None).mprotect
    extent = ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(len(memory))
    if comm.rank == 1:
        assert protect(*extent, 0) == 0
    comm.Barrier()
    caught: HaloxError | None = None
    with short_waits():
        try:
            exchange()
        except HaloxError as error:
            caught = error
    told = comm.allgather(None if caught is None else type(caught))
    reader = (1 + 1) % comm.size
    assert told[reader] is PathError and all(kind is not None for kind in told), told
    if comm.rank == reader:
        assert "cannot reach the memory of rank 1" in str(caught)
    protect(*extent, mmap.PROT_READ | mmap.PROT_WRITE)
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
