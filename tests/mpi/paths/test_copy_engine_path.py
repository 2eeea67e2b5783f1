"""The copy-engine path from end to end on simulated GPUs, with a driver that copies mapped host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send
from halox import datatypes as dt
from halox.errors import DecompositionError, MismatchError, PathError
from halox.runtime.gpu.pools import Pool
from tests.fakes.fake_cupy import Array, Machine, MappedArena
from tests.fakes.fake_driver import fake_driver
from tests.fakes.host_launches import host_launches
from tests.mpi.conftest import agree
from tests.support import require

require("cxx")
require("nvrtc")  # in the same package as the driver's bindings

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.usually(2)]

PATH = "scatter_gather/copy_engine"


@pytest.fixture
def machine(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Simulate one GPU, shared by all ranks; yield the driver, which counts its calls."""
    gpu = Machine(comm.rank, shared=True)
    gpu.install(monkeypatch)
    event = SimpleNamespace(ptr=0)
    side = SimpleNamespace(stream=gpu.stream, before=event, after=event)
    for name, fake in {
        "paths.scatter_gather.copy_engine.SIDE_STREAMS": Pool(lambda device: side),
        "runtime.device_arena.DeviceArena": MappedArena,
    }.items():
        monkeypatch.setattr(f"halox.{name}", fake)
    with ExitStack() as stack:
        stack.enter_context(host_launches())
        fake = stack.enter_context(fake_driver())
        fake.gpu = gpu
        yield fake


def of_grid(comm: MPI.Intracomm, n: int) -> tuple[halox.Grid, Any]:
    """Return a grid, and n bytes that it has allocated."""
    grid = halox.Grid((comm.size,), halo=0, comm=comm.Dup(), device="gpu")
    return grid, grid.zeros("u1", components=(n,)).reshape(n)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_halos(axis: int, machine: Any, comm: MPI.Intracomm) -> None:
    """Fields of several dtypes, with edges, corners and uneven blocks, are right after every step."""
    shape, procs = [7, 8, 9], [1, 1, 1]
    shape[axis], procs[axis] = 4 * comm.size + 1, comm.size
    with halox.Grid(
        tuple(shape),
        halo=((1, 2), 1, 1),
        periodic=True,
        proc_shape=tuple(procs),
        comm=comm.Dup(),
        device="gpu",
        path=PATH,
    ) as grid:
        fields = [grid.zeros("f8"), grid.zeros("i2", components=(3,))]
        plan = grid.plan(*fields)
        rows = [row for row in plan.explain().rows if row.peer != comm.rank]
        assert {(row.path, row.protocol) for row in rows} == {tuple(PATH.split("/"))}
        machine.counts()
        for step in range(3):
            wanted = []
            for number, u in enumerate(fields):
                whole = np.random.default_rng((step, number)).integers(1, 99, tuple(shape))
                u.values[...] = 0
                owned = whole[grid.owned]
                inner = tuple(
                    slice(low, low + n)
                    for (low, _), n in zip(grid.halo, grid.rank_shape, strict=True)
                )
                u.values[(..., *inner)] = owned
                index = [
                    (np.arange(s.start - low, s.stop + high)) % n
                    for s, (low, high), n in zip(grid.owned, grid.halo, shape, strict=True)
                ]
                wanted.append(whole[np.ix_(*index)])
            plan()
            right = [bool((u.values == w).all()) for u, w in zip(fields, wanted, strict=True)]
            assert agree(all(right), comm), right
        assert sum(machine.counts()) > 0
        plan.close()


@pytest.mark.parametrize("mappable", ["sender", "receiver", "both", "neither"])
def test_which_end_is_mapped(mappable: str, machine: Any, comm: MPI.Intracomm) -> None:
    n, low, high = 1 << 10, (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    grid, own = of_grid(comm, 2 * n)
    other, theirs = of_grid(comm, 2 * n)
    x = own if mappable in ("sender", "both") else Array(np.zeros(2 * n, "u1"))
    y = theirs if mappable in ("receiver", "both") else Array(np.zeros(2 * n, "u1"))
    sends = [Send(x, dt.vector(n // 32, 32, 64, "u1"), high)]
    receives = [Recv(y, dt.vector(n // 16, 16, 32, "u1"), low)]
    if mappable == "neither":
        with pytest.raises(PathError):
            Exchange(sends, receives, comm=comm, path=PATH)
    else:
        with Exchange(sends, receives, comm=comm, path=PATH) as exchange:
            reason = exchange.explain().rows[0].reason
            assert ("from the sender" in reason) == (mappable == "sender")
            for step in range(3):
                x.values[...] = (np.arange(2 * n) + 7 * comm.rank + step) % 251
                exchange()
                came = ((np.arange(2 * n) + 7 * low + step) % 251).reshape(-1, 64)[:, :32].ravel()
                found = y.values.reshape(-1, 32)
                right = (found[:, :16].ravel() == came).all() and not found[:, 16:].any()
                assert agree(bool(right), comm)
    grid.close()
    other.close()


@pytest.mark.parametrize("n", [6, 128])
def test_multiprocessors_are_left_alone(n: int, machine: Any, comm: MPI.Intracomm) -> None:
    """With leave_sms copy engines copy rows of a kilobyte and kernels copy shorter rows, unless ``path`` is given."""
    options: Any = {"periodic": True, "proc_shape": (comm.size, 1), "device": "gpu"}
    with halox.Grid((4 * comm.size, n), comm=comm.Dup(), leave_sms=True, **options) as grid:
        u = grid.zeros("f8")
        wanted = {"scatter_gather"} if n == 128 else {"ipc"}
        for path, found in ((None, wanted), ("ipc", {"ipc"})):
            rows = grid.plan(u, path=path).explain().rows
            assert {row.path for row in rows if row.peer != comm.rank} == found
        u.values[...] = comm.rank
        grid.exchange(u)
        low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        assert agree(bool((u.values[0] == low).all() and (u.values[-1] == high).all()), comm)


def test_odd_values_of_leave_sms(machine: Any, comm: MPI.Intracomm) -> None:
    options: Any = {"comm": comm, "device": "gpu"}
    with pytest.raises(MismatchError, match="leave_sms"):
        halox.Grid((4 * comm.size,), leave_sms=comm.rank == 1, **options)
    with pytest.raises(DecompositionError):
        halox.Grid((4 * comm.size,), leave_sms="yes", **options)


def test_it_is_not_taken_unasked(machine: Any, comm: MPI.Intracomm) -> None:
    """Short blocks would take a copy engine far longer than a kernel; it adds nothing, even by name."""
    with halox.Grid((4 * comm.size, 6), periodic=True, comm=comm.Dup(), device="gpu") as grid:
        u = grid.zeros("f8")
        assert all(row.path != "scatter_gather" for row in grid.plan(u).explain().rows)
    with (
        halox.Grid((4 * comm.size,), comm=comm.Dup(), device="gpu", path=PATH) as grid,
        pytest.raises(PathError),
    ):
        grid.accumulate(grid.zeros("f8"))


def test_constants_are_measured(machine: Any, comm: MPI.Intracomm) -> None:
    """The code of ``halox tune`` measures the path in fields of a grid; later predictions use the constants."""
    from halox.cli.probing import Prober, campaign, partners
    from halox.plans.costs import Costs
    from halox.runtime.world import World

    world = World(comm, "tune")
    prober = Prober(world, comm, 0, *partners(comm.rank, world.nodes))
    before = Costs.default()
    found = campaign(
        prober,
        [PATH],
        before,
        lambda *_: None,
        shared_gpu=True,
        large_bytes=16 << 10,
    )
    world.close()
    full = f"{PATH}, shared GPU"
    assert not found.refused and set(found.costs) == {full}
    after = before.updated(found.costs, "measured here")
    asked = *PATH.split("/"), 1 << 20, 1024
    assert after.predict(*asked, shared_gpu=True) == found.costs[full].us(1 << 20, 1024)
    assert after.predict(*asked, shared_gpu=True) != before.predict(*asked, shared_gpu=True)
