"""Requested paths that NumPy arrays cannot take: all ranks raise an error with the reason, and can continue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send
from halox import datatypes as dt
from halox.errors import HaloxError, PathError
from tests.limits import fill_shared_memory
from tests.mpi.conftest import agree
from tests.mpi.ways import fill, wrong_cells

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usually(2)]

FOR_GPUS = ["peer/ll", "nccl", "ipc", "staged/shared", "cuda_aware"]


@pytest.fixture(autouse=True)
def no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALOX_PATH", raising=False)


def grid_of(comm: MPI.Intracomm, **options: Any) -> halox.Grid:
    options = {"periodic": True, "device": "cpu", "proc_shape": (comm.size, 1)} | options
    return halox.Grid((4 * comm.size, 6), comm=comm, **options)


def refused(
    comm: MPI.Intracomm, kind: type[HaloxError], word: str, call: Callable[[], Any]
) -> None:
    """Assert that all ranks raise the same class, with a word in the text."""
    with pytest.raises(HaloxError) as caught:
        call()
    assert set(comm.allgather(type(caught.value))) == {kind}
    assert word in str(caught.value)


def check_works(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    u = grid.zeros("f8")
    fill(grid, u, comm.size)
    grid.exchange(u)
    assert agree(int(wrong_cells(grid, u, comm.size)) == 0, comm)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("how", ["of the grid", "of the environment"])
def test_a_path_of_gpus_for_a_grid(
    how: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its calls raise, and the path of a plan overrides the path of the grid and of the environment."""
    if how == "of the environment":
        monkeypatch.setenv("HALOX_PATH", "ipc")
    with grid_of(comm, path="ipc" if how == "of the grid" else None) as grid:
        u = grid.zeros("f8")
        for call in (grid.plan, grid.exchange, grid.accumulate):
            refused(comm, PathError, "NumPy", lambda call=call: call(u))  # type: ignore[misc]
        plan = grid.plan(u, path="host")
        fill(grid, u, 1)
        plan()
        assert agree(int(wrong_cells(grid, u, 1)) == 0, comm)
        if how == "of the environment":
            monkeypatch.delenv("HALOX_PATH")
            check_works(grid, comm)


@pytest.mark.ranks(2, 3, 4)
def test_paths_of_gpus_for_a_plan_and_for_messages(comm: MPI.Intracomm) -> None:
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    x, y, four = np.arange(4.0), np.zeros(4), dt.contiguous(4, "f8")
    sends, receives = [Send(x, four, high)], [Recv(y, four, low)]
    with grid_of(comm) as grid:
        u = grid.zeros("f8")
        for path in FOR_GPUS:
            refused(comm, PathError, "NumPy", lambda path=path: grid.plan(u, path=path))  # type: ignore[misc]
            refused(
                comm,
                PathError,
                path,
                lambda path=path: Exchange(sends, receives, comm=comm, path=path),  # type: ignore[misc]
            )
        check_works(grid, comm)
    with Exchange(sends, receives, comm=comm, path="host") as exchange:
        exchange()
        assert np.array_equal(x, y)


@pytest.mark.parametrize("path", ["peer/ll", "cuda_aware"])
def test_messages_to_self_take_any(path: str, comm: MPI.Intracomm) -> None:
    """Without messages to other ranks, any path is accepted."""
    with grid_of(comm, halo=((0, 0), (2, 1)), path=path) as grid:
        check_works(grid, comm)
        u = grid.zeros("f8")
        assert {row.path for row in grid.plan(u).explain().rows} == {"local"}


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("HALOX_CUDA_AWARE", "yes", HaloxError),
        ("HALOX_PATH", "host/pigeon", PathError),
    ],
)
@pytest.mark.parametrize("where", ["on all ranks", "on the last one"])
def test_settings_that_are_none(
    name: str,
    value: str,
    kind: type[HaloxError],
    where: str,
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Variables are also checked for NumPy arrays if they concern GPUs, or if an argument overrides them."""
    last = comm.size - 1
    if where == "on all ranks" or comm.rank == last:
        monkeypatch.setenv(name, value)
    four = dt.contiguous(4, "f8")
    own = [Send(np.zeros(4), four, comm.rank)], [Recv(np.zeros(4), four, comm.rank)]
    refused(comm, kind, name, lambda: grid_of(comm))
    refused(comm, kind, name, lambda: grid_of(comm, path="host"))
    refused(comm, kind, name, lambda: Exchange(*own, comm=comm))
    monkeypatch.delenv(name, raising=False)
    with grid_of(comm) as grid:
        if where == "on all ranks" or comm.rank == last:
            monkeypatch.setenv(name, value)
        refused(comm, kind, name, lambda: grid.exchange(grid.zeros("f4")))
        refused(comm, kind, name, lambda: halox.Transpose(grid, grid))
        monkeypatch.delenv(name, raising=False)
        check_works(grid, comm)


@pytest.mark.ranks(2, 3, 4)
def test_a_way_that_some_fields_cannot_go(comm: MPI.Intracomm) -> None:
    """Long runs can be read in place, short runs cannot."""
    with grid_of(comm) as grid:
        first, second = grid.zeros("f8", components=(..., 64)), grid.zeros("f8")
        assert grid.plan(first, path="host/direct").messages_sent > 0
        refused(comm, PathError, "host/direct", lambda: grid.plan(second, path="host/direct"))
        check_works(grid, comm)


@pytest.mark.ranks(2, 3, 4)
def test_without_shared_memory(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a full /dev/shm, the requested path is taken with another protocol."""
    fill_shared_memory(monkeypatch)
    with grid_of(comm.Dup(), path="host") as grid:  # a new communicator, without shared memory yet
        rows = [r for r in grid.plan(grid.zeros()).explain().rows if r.peer != comm.rank]
        assert {(row.path, row.protocol) for row in rows} == {("host", "mpi")}
        assert all("/dev/shm has too little space" in row.reason for row in rows)
        check_works(grid, comm)
