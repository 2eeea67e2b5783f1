"""Bad arguments, files and environments for paths between GPUs: all ranks raise alike, and the grid stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send
from halox import datatypes as dt
from halox.errors import DeviceError, HaloxError, MismatchError, PathError
from tests.gpu.ranks.paths import WAYS, along, why_not
from tests.limits import fill_shared_memory
from tests.mpi import ways
from tests.mpi.conftest import agree
from tests.mpi.ways import Way, fill, wrong_cells
from tests.support import require

require("gpu")

import cupy  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4)]


def gpu_grid(comm: MPI.Intracomm, **options: Any) -> halox.Grid:
    options = {"periodic": True, "proc_shape": (comm.size, 1, 1), "device": "gpu"} | options
    return halox.Grid((8 * comm.size, 8, 8), comm=comm, **options)


def check_works(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    """Assert that the grid exchanges correctly after an error."""
    u = grid.zeros("f8")
    for step in range(2):
        fill(grid, u, step)
        grid.exchange(u)
        assert agree(int(wrong_cells(grid, u, step)) == 0, comm)


def refused(comm: MPI.Intracomm, kind: type[HaloxError], text: str, call: Callable[[], Any]) -> str:
    """Assert that all ranks raise the same class of error with a matching text, and return this rank's text."""
    with pytest.raises(kind, match=rf"(?s){text}") as caught:
        call()
    kinds = comm.allgather(type(caught.value).__name__)
    assert len(set(kinds)) == 1, kinds
    return str(caught.value)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALOX_PATH", raising=False)
    monkeypatch.delenv("HALOX_NODE", raising=False)


# Fields


def other_gpu(grid: halox.Grid) -> int:
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("needs two GPUs that one process sees")
    assert grid.device_id is not None
    return (grid.device_id + 1) % int(count)


@pytest.mark.parametrize("who", ["all", "one"])
def test_a_field_on_the_wrong_gpu(who: str, comm: MPI.Intracomm) -> None:
    with gpu_grid(comm) as grid:
        u = grid.zeros("f8")
        if who == "all" or comm.rank == 1:
            with cupy.cuda.Device(other_gpu(grid)):
                u = cupy.zeros(grid.padded_shape)
        else:
            other_gpu(grid)
        text = r"field is on GPU \d+, rank \d+ works on GPU \d+"
        refused(comm, DeviceError, text, lambda: grid.exchange(u))
        check_works(grid, comm)


def test_messages_on_two_gpus_of_a_rank(comm: MPI.Intracomm) -> None:
    xp = ways.module(Way("staged"), comm)
    here, count = xp.cuda.runtime.getDevice(), xp.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("needs two GPUs that one process sees")
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    a = xp.zeros(8)
    with xp.cuda.Device((here + 1) % count):
        b = xp.zeros(8)
    eight = dt.contiguous(8, "f8")
    refused(
        comm,
        HaloxError,
        "GPU",
        lambda: Exchange([Send(a, eight, high)], [Recv(b, eight, low)], comm=comm),
    )


DISAGREEMENTS: dict[str, tuple[str, Callable[[halox.Grid, bool], list[Any]]]] = {
    "a dtype": (
        "f4.*f8|f8.*f4|is field number 1",
        lambda g, odd: [[g.zeros("f8"), g.zeros("f4")][odd]],
    ),
    "components": ("f8|components=", lambda g, odd: [g.zeros("f8", components=3 if odd else 2)]),
    "how many fields": (
        r"datatype\(s\)",
        lambda g, odd: [g.zeros("f8") for _ in "ab"][: 1 if odd else 2],
    ),
    "how many fields of their own": (
        r"datatype\(s\)",
        lambda g, odd: [cupy.zeros(g.padded_shape) for _ in range(3 if odd else 2)],
    ),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
@along(WAYS)
def test_ranks_that_disagree_on(way: Way, what: str, comm: MPI.Intracomm) -> None:
    text, make = DISAGREEMENTS[what]
    with way.box(comm) as grid:
        fields = make(grid, comm.rank == 1)
        # The direct protocol may refuse such fields earlier, with another error.
        kind, text = (HaloxError, "") if way.is_straight else (MismatchError, text)
        refused(comm, kind, text, lambda: grid.exchange(*fields))
        check_works(grid, comm)


# Path selection


@pytest.mark.parametrize("how", ["grid", "plan", "environment"])
def test_paths_that_differ(how: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "ipc" if comm.rank == 1 else "staged"
    if how == "grid":
        refused(
            comm, MismatchError, "path differs between ranks", lambda: gpu_grid(comm, path=path)
        )
        return
    with gpu_grid(comm) as grid:
        u = grid.zeros("f8")
        if how == "environment":
            monkeypatch.setenv("HALOX_PATH", path)
        text = "path differs between ranks: rank 0 has staged, rank 1 has ipc"
        wish = path if how == "plan" else None
        refused(comm, MismatchError, text, lambda: grid.plan(u, path=wish))
        monkeypatch.delenv("HALOX_PATH", raising=False)
        check_works(grid, comm)


def is_shared(comm: MPI.Intracomm) -> bool:
    return comm.size > int(cupy.cuda.runtime.getDeviceCount())


def test_peer_on_a_shared_gpu(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_PATH", "peer")
    with gpu_grid(comm) as grid:
        u = grid.zeros("f8")
        if is_shared(comm):
            text = r"path 'peer' cannot be taken from rank \d to rank \d: rank \d shares its GPU with rank \d"
            said = refused(comm, PathError, text, lambda: grid.exchange(u))
            assert "or take one of " in said and "staged/shared" in said
            monkeypatch.delenv("HALOX_PATH")
        check_works(grid, comm)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("host", r"path 'host' cannot be taken .*it is for NumPy arrays, and these are on a GPU"),
        ("staged/mpi", r"path 'staged/mpi' cannot be taken .*no such protocol for this message"),
    ],
)
def test_paths_that_cannot_be_had(
    path: str, text: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALOX_PATH", path)
    with gpu_grid(comm) as grid:
        u = grid.zeros("f8")
        refused(comm, PathError, text, lambda: grid.exchange(u))
        refused(comm, PathError, text, lambda: grid.accumulate(u))
        monkeypatch.delenv("HALOX_PATH")
        refused(comm, PathError, text, lambda: grid.plan(u, path=path))
        check_works(grid, comm)


def test_between_nodes_only_the_host_helps(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALOX_NODE", "rank")
    with gpu_grid(comm) as grid:
        u = grid.zeros("f8")
        for path in ("peer", "ipc"):
            text = rf"path '{path}' cannot be taken .*different nodes|shares its GPU"
            refused(comm, PathError, text, lambda path=path: grid.plan(u, path=path))
        check_works(grid, comm)


def test_a_path_that_there_is_not(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    text = r"there is no path 'nonsense' between ranks; paths are peer, nccl, ipc"
    refused(comm, PathError, rf"path: {text}", lambda: gpu_grid(comm, path="nonsense"))
    monkeypatch.setenv("HALOX_PATH", "nonsense")
    refused(comm, PathError, rf"HALOX_PATH: {text}", lambda: gpu_grid(comm))
    a = ways.module(Way("staged"), comm).zeros(4)
    four = dt.contiguous(4, "f8")
    exchange = [Send(a, four, comm.rank)], [Recv(cupy.zeros(4), four, comm.rank)]
    refused(comm, PathError, rf"HALOX_PATH: {text}", lambda: Exchange(*exchange, comm=comm))


def test_a_grid_on_the_host(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """HALOX_PATH names a GPU path, but the fields are NumPy arrays, on a machine with GPUs."""
    monkeypatch.setenv("HALOX_PATH", "peer")
    with gpu_grid(comm, device="cpu") as grid:
        u = grid.zeros("f8")
        text = r"path 'peer' cannot be taken .*these arrays are NumPy's"
        refused(comm, PathError, text, lambda: grid.exchange(u))
        monkeypatch.delenv("HALOX_PATH")
        check_works(grid, comm)


# Memory


@along([w for w in WAYS if not w.node])
def test_without_shared_memory(
    way: Way, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/shm is full: paths that use only device memory still work, and the other paths fall back to MPI."""
    # On `comm` the tests' plugin keeps freed memory, which would serve again.
    own = comm.Dup()
    with way.box(own):
        pass
    fill_shared_memory(monkeypatch)
    with way.box(own) as grid:
        u = grid.zeros("f8")
        plan = grid.plan(u)
        rows = [row for row in plan.explain().rows if row.peer != comm.rank]
        if way.path.startswith("peer") or way.path in ("nccl", "cuda_aware"):
            assert way.check_taken(plan, comm)
        else:
            assert {(row.path, row.protocol) for row in rows} == {("staged", "mpi")}
            assert all("/dev/shm" in row.reason for row in rows), rows
        for step in range(4):
            fill(grid, u, step)
            plan()
            assert agree(int(wrong_cells(grid, u, step)) == 0, comm)


def test_results_do_not_depend_on_the_path(comm: MPI.Intracomm) -> None:
    """Plans of one field by all available paths, called in turn."""
    with gpu_grid(comm) as grid:
        u = grid.zeros("f8")
        plans = [grid.plan(u, path=w.path) for w in WAYS if not w.node and not why_not(w, comm)]
        wrong = cupy.zeros((), "i8")
        for step in range(40):
            fill(grid, u, step)
            plans[step % len(plans)]()
            wrong += wrong_cells(grid, u, step)
        assert agree(int(wrong) == 0, comm)
