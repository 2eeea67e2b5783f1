"""Every path between GPUs: received values, kinds of memory, datatypes, and order in streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send
from halox import datatypes as dt
from halox.errors import PathError
from tests.gpu.ranks.paths import (
    BY_HOST,
    COPIES,
    NCCL,
    PEER,
    WAYS,
    along,
    mappable_arrays,
    why_not,
)
from tests.mpi import ways
from tests.mpi.conftest import agree
from tests.mpi.ways import Way
from tests.support import require

require("gpu")

import cupy  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4)]

STRIDED = [Way("peer/ll"), Way("peer/staging"), *NCCL, *BY_HOST]
"""The paths that accept arrays that halox did not allocate."""

EVERY = [*WAYS, *COPIES]


@pytest.fixture
def zeros(way: Way, comm: MPI.Intracomm) -> Iterator[Any]:
    """A function that allocates arrays that other ranks can map, if the path needs such arrays; else None."""
    with mappable_arrays(comm) if way.is_straight else nullcontext() as made:
        yield made


def test_paths_that_must_be_there(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA runtime's answers about peer access, rather than halox, decide which paths must be available."""
    runtime = cupy.cuda.runtime
    monkeypatch.setenv("HALOX_NODE", "")
    count = runtime.getDeviceCount()
    devices = [rank % count for rank in range(comm.size)]
    pairs = [(a, b) for a in devices for b in devices if a != b]
    linked = all(runtime.deviceCanAccessPeer(a, b) for a, b in pairs)
    alone = len(set(devices)) == comm.size
    for path in PEER:
        reason = why_not(path, comm)
        assert (reason is None) == (alone and linked), reason
        if not alone:
            assert reason is not None and "shares its GPU with rank" in reason, reason
    if linked:
        assert why_not(Way("ipc"), comm) is None, why_not(Way("ipc"), comm)
    assert why_not(COPIES[0], comm) is None or why_not(Way("ipc"), comm) is not None
    assert why_not(Way("staged"), comm) is None
    monkeypatch.setenv("HALOX_NODE", "rank")
    assert why_not(Way("staged", node="rank"), comm) is None


@along(EVERY)
def test_random_grids(way: Way, comm: MPI.Intracomm) -> None:
    ways.random_grids(way, comm, 8)


@along(STRIDED)
def test_accumulate(way: Way, comm: MPI.Intracomm) -> None:
    ways.accumulations(way, comm, 5)


def test_accumulate_never_goes_straight(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALOX_NODE", "")
    with Way("peer/direct").box(comm) as grid, pytest.raises(PathError, match="peer/direct"):
        grid.accumulate(grid.zeros("f8"))


@along(EVERY)
def test_fields_of_many_kinds(way: Way, comm: MPI.Intracomm) -> None:
    ways.fields_of_many_kinds(way, comm)


@pytest.mark.parametrize("axis", [0, 2])
@along(EVERY)
def test_large_faces(way: Way, axis: int, comm: MPI.Intracomm) -> None:
    ways.large_faces(way, comm, axis)


@along(EVERY)
def test_two_plans_under_way(way: Way, comm: MPI.Intracomm) -> None:
    ways.work_in_between(way, comm)


@along(EVERY)
def test_streams_that_change(way: Way, comm: MPI.Intracomm) -> None:
    ways.changing_streams(way, comm)


@along(EVERY)
def test_two_streams(way: Way, comm: MPI.Intracomm) -> None:
    ways.two_streams(way, comm, 8, 200)


@along(EVERY)
def test_two_streams_of_much_work(way: Way, comm: MPI.Intracomm) -> None:
    """Each exchange could fill the whole GPU. A waiting exchange must leave room for the other exchange."""
    ways.two_streams(way, comm, 128, 20, 4)


@pytest.mark.parametrize("own", [False, True], ids=["default stream", "own stream"])
@along(EVERY)
def test_after_a_stalled_stream(way: Way, own: bool, comm: MPI.Intracomm) -> None:
    ways.after_a_stalled_stream(way, comm, own)


@pytest.mark.parametrize("one_way", [False, True], ids=["both ways", "one way"])
@pytest.mark.parametrize("pair", ways.TYPE_PAIRS)
@along([*STRIDED, *COPIES])
def test_typed_messages(
    way: Way, pair: str, one_way: bool, zeros: Any, comm: MPI.Intracomm
) -> None:
    try:
        ways.typed_messages(way, comm, pair, one_way, zeros)
    except PathError as error:
        # LL packets carry words of 4 bytes or more.
        assert way.path == "peer/ll" and pair == "records", error
        pytest.skip(str(error))


@along([*STRIDED, *COPIES])
def test_one_way_runs_ahead(way: Way, zeros: Any, comm: MPI.Intracomm) -> None:
    ways.one_way_runs_ahead(way, comm, zeros)


# Arrays of other libraries


@pytest.fixture
def torch(comm: MPI.Intracomm) -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this PyTorch is for the host alone")
    return module


@along(STRIDED)
def test_fields_of_torch(way: Way, torch: Any, comm: MPI.Intracomm) -> None:
    with way.box(comm) as grid:
        place = f"cuda:{grid.device_id}"
        u = torch.zeros(grid.padded_shape, dtype=torch.float64, device=place)
        v = torch.zeros(grid.padded_shape, dtype=torch.float32, device=place)
        for step in range(4):
            for number, t in enumerate((u, v)):
                host = ways.values(grid, "f8", step + number).get()
                t.fill_(-1)
                t[1:-1, 1:-1, 1:-1] = torch.tensor(host[1:-1, 1:-1, 1:-1], device=place)
            grid.exchange(u, v)
            right = [
                np.array_equal(t.cpu().numpy(), ways.values(grid, "f8", step + number).get())
                for number, t in enumerate((u, v))
            ]
            assert agree(all(right), comm), right
        assert way.check_taken(grid.plan(u, v), comm)


@along(STRIDED)
def test_messages_of_torch(way: Way, torch: Any, comm: MPI.Intracomm) -> None:
    """The columns of a PyTorch matrix are received as rows of a CuPy matrix."""
    xp = ways.module(way, comm)
    n, low, high = 40, (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    place = f"cuda:{xp.cuda.runtime.getDevice()}"
    matrix = torch.arange(n * n, dtype=torch.float64, device=place).reshape(n, n)
    target = xp.zeros((n, n))
    sends = [Send(matrix, ways.transposed(n), high)]
    receives = [Recv(target, dt.contiguous(n * n, "f8"), low)]
    with Exchange(sends, receives, comm=comm, path=way.path) as exchange:
        for step in range(3):
            matrix += 1000 * comm.rank
            exchange()
            wanted = np.arange(n * n).reshape(n, n).T + 1000 * low * (step + 1)
            assert agree(bool(np.array_equal(target.get(), wanted)), comm)


def test_the_path_chosen_is_one_of_them(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default halox chooses the fastest available path by the shipped constants, and explains the rejected paths."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    monkeypatch.setenv("HALOX_NODE", "")
    monkeypatch.delenv("HALOX_PATH", raising=False)
    fastest = next(w.path for w in WAYS if why_not(w, comm) is None).partition("/")[0]
    shape, procs = (8 * comm.size, 8, 8), (comm.size, 1, 1)
    with halox.Grid(shape, periodic=True, proc_shape=procs, comm=comm, device="gpu") as grid:
        rows = [r for r in grid.plan(grid.zeros("f8")).explain().rows if r.peer != comm.rank]
        assert rows and {row.path for row in rows} == {fastest}
        for row in rows:
            assert "host" in row.why_not and row.path not in row.why_not
