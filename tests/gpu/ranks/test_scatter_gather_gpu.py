"""The scatter_gather path by copy engines on GPUs, shared or not: kinds of memory and of copies.

test_paths_gpu.py tests received values and stream order on every path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send
from halox import datatypes as dt
from halox.errors import PathError
from tests.gpu.ranks.paths import mappable_arrays
from tests.mpi import ways
from tests.mpi.conftest import agree
from tests.mpi.ways import Way
from tests.support import require

require("gpu")

import cupy  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4)]

WAY = Way("scatter_gather/copy_engine")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, comm: MPI.Intracomm) -> None:
    """Place all ranks on one node; skips if their GPUs cannot map each other's memory."""
    monkeypatch.setenv("HALOX_NODE", "")
    monkeypatch.delenv("HALOX_PATH", raising=False)
    with halox.Grid(
        (8 * comm.size, 8), proc_shape=(comm.size, 1), periodic=True, comm=comm, device="gpu"
    ) as grid:
        u = grid.zeros("f8")
        try:
            grid.plan(u, path="ipc").close()
        except PathError as error:
            pytest.skip(str(error))


@pytest.fixture
def zeros(comm: MPI.Intracomm) -> Iterator[Callable[[int, str], Any]]:
    """Return a function that allocates arrays that other ranks can map."""
    with mappable_arrays(comm) as made:
        yield made


@pytest.mark.parametrize("mappable", ["sender", "receiver", "neither"])
def test_one_end_must_be_mappable(mappable: str, zeros: Any, comm: MPI.Intracomm) -> None:
    """halox puts to a mappable receive array, or gets from a mappable send array; without either, all ranks raise."""
    n, low, high = 1 << 12, (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    ways.module(WAY, comm)
    x = zeros(2 * n, "f8") if mappable == "sender" else cupy.zeros(2 * n)
    y = zeros(2 * n, "f8") if mappable == "receiver" else cupy.zeros(2 * n)
    types = dt.vector(n // 4, 4, 8, "f8"), dt.vector(n // 8, 8, 16, "f8")
    sends, receives = [Send(x, types[0], high)], [Recv(y, types[1], low)]
    if mappable == "neither":
        with pytest.raises(PathError):
            Exchange(sends, receives, comm=comm, path=WAY.path)
        return
    with Exchange(sends, receives, comm=comm, path=WAY.path) as exchange:
        for step in range(4):
            x[...] = cupy.arange(2 * n) + 1e6 * comm.rank + step
            exchange()
            came = (cupy.arange(2 * n) + 1e6 * low + step).reshape(-1, 8)[:, :4].ravel()
            found = y.reshape(-1, 16)
            right = (found[:, :8].ravel() == came).all() & (found[:, 8:] == 0).all()
            assert agree(bool(right), comm)


def test_no_kernel_runs(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only driver copies move data between ranks."""
    from halox.runtime.gpu.launch import PreparedLaunch

    with WAY.grid(
        (8 * comm.size, 64, 64), comm, proc_shape=(comm.size, 1, 1), periodic=(True, False, False)
    ) as grid:
        u = grid.full(-1.0, "f8")
        grid.interior(u)[...] = comm.rank
        plan = grid.plan(u)
        assert WAY.check_taken(plan, comm)

        def launch(*_: Any) -> None:
            raise AssertionError("a kernel was launched")

        for name in ("launch", "launch_at", "ready"):
            monkeypatch.setattr(PreparedLaunch, name, launch)
        plan()
        low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        right = (u[0, 1:-1, 1:-1] == low).all() & (u[-1, 1:-1, 1:-1] == high).all()
        assert agree(bool(right), comm)


def test_multiprocessors_are_left_alone(comm: MPI.Intracomm) -> None:
    """With ``leave_sms`` copy engines move long rows, and the multiprocessors remain free for the user's kernels."""
    procs, shape = (comm.size, 1, 1), (16 * comm.size, 32, 128)
    options: Any = {"periodic": (True, False, False), "proc_shape": procs, "device": "gpu"}
    with halox.Grid(shape, halo=(1, 0, 0), comm=comm, leave_sms=True, **options) as grid:
        u, work = grid.zeros("f8"), cupy.zeros(1 << 22)
        plan = grid.plan(u)
        rows = [row for row in plan.explain().rows if row.peer != comm.rank]
        assert rows and {row.path for row in rows} == {"scatter_gather"}, plan.explain()
        low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        wrong = cupy.zeros((), "i8")
        for step in range(20):
            grid.interior(u)[...] = 100 * step + comm.rank
            plan.start()
            work += 1
            plan.finish()
            wrong += (u[0] != 100 * step + low).sum() + (u[-1] != 100 * step + high).sum()
        assert agree(int(wrong) == 0 and bool((work == 20).all()), comm), int(wrong)


def test_fields_that_come_and_go(comm: MPI.Intracomm) -> None:
    """Fields of other dtypes reuse freed memory; memory keys of freed fields are never used for new fields."""
    with WAY.box(comm, n=24) as grid:
        wrong = cupy.zeros((), "i8")
        for step in range(30):
            u = grid.zeros(("f8", "f4", "c16")[step % 3])
            if step % 4 == 1:
                grid.zeros("f8")  # shifts the address of the next field
            ways.fill(grid, u, step)
            grid.exchange(u)
            wrong += ways.wrong_cells(grid, u, step)
            del u
        assert agree(int(wrong) == 0, comm), int(wrong)
