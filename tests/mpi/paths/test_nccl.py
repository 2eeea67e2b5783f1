"""The NCCL path on simulated GPUs, with a simulated NCCL that moves bytes by MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send
from halox.errors import ExchangeTimeoutError, MismatchError, PathError, StateError
from halox.runtime import nccl_ranks
from halox.runtime.nccl_ranks import nccl_of
from halox.runtime.world import World
from tests.fakes.cpu_kernels import aligned
from tests.fakes.fake_cupy import Array, Machine
from tests.fakes.fake_nccl import FakeNccl, machine_with_nccl
from tests.fakes.host_launches import host_launches
from tests.mpi.conftest import agree
from tests.mpi.limits import short_waits
from tests.support import becomes, require

require("cxx")

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.usually(2)]


@pytest.fixture
def comm() -> MPI.Intracomm:
    """Return a new communicator, since halox keeps NCCL's communicator with it."""
    return MPI.COMM_WORLD.Dup()


@pytest.fixture(params=["one node", "a node each"])
def nodes(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gpu(
    nodes: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Machine, FakeNccl]]:
    monkeypatch.setenv("HALOX_NODE", "rank" if nodes == "a node each" else "")
    with host_launches():
        yield machine_with_nccl(comm, monkeypatch)


one_node = pytest.mark.parametrize("nodes", ["one node"], indirect=True)
apart = pytest.mark.parametrize("nodes", ["a node each"], indirect=True)


def array(shape: tuple[int, ...], dtype: Any = "f8", offset: int = 0) -> Array:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return Array(aligned(nbytes, offset).view(dtype).reshape(shape))


def box(comm: MPI.Intracomm, **options: Any) -> halox.Grid:
    return halox.Grid(
        (4 * comm.size, 6, 5), comm=comm, device="gpu", **{"periodic": True, **options}
    )


def paths_of(report: Any) -> set[str]:
    return {f"{row.path}/{row.protocol}" for row in report.rows if row.peer != report.rank}


def fill(grid: halox.Grid, u: Array, seed: int) -> np.ndarray:
    """Fill the interior of a field, poison its halo, and return its values after an exchange."""
    whole = np.random.default_rng(seed).integers(1, 200, grid.grid_shape).astype(u.dtype)
    places = [np.arange(s.start - 1, s.stop + 1) % n for s, n in zip(grid.owned, whole.shape)]  # noqa: B905
    wanted: np.ndarray = whole[np.ix_(*places)]
    u.values[...] = 0
    u.values[1:-1, 1:-1, 1:-1] = whole[grid.owned]
    assert not np.array_equal(u.values, wanted)
    return wanted


def check_next_grid(comm: MPI.Intracomm) -> None:
    """Exchange a field of a new grid, as after a failure."""
    with box(comm) as grid:
        u = array(grid.padded_shape)
        wanted = fill(grid, u, 5)
        grid.exchange(u)
        assert agree(np.array_equal(u.values, wanted), comm)


DTYPES: list[Any] = ["f8", "f4", "c16", "i1", [("a", "f8"), ("b", "i2")]]


def test_exchange(gpu: tuple[Machine, FakeNccl], nodes: str, comm: MPI.Intracomm) -> None:
    """NCCL moves each dtype as bytes: between nodes by default, within a node by name."""
    options = {} if nodes == "a node each" else {"path": "nccl"}
    for number, dtype in enumerate(map(np.dtype, DTYPES)):
        axis = number % 3
        procs = tuple(comm.size if a == axis else 1 for a in range(3))
        with halox.Grid(
            (8, 6, 9), halo=1, periodic=True, comm=comm, device="gpu", proc_shape=procs, **options
        ) as grid:
            u = array(grid.padded_shape, "i8" if dtype.fields else dtype)
            wanted = fill(grid, u, axis)
            if dtype.fields:
                u, wanted = Array(_records(u.values, dtype)), _records(wanted, dtype)
            grid.exchange(u)
            assert agree(u.values.tobytes() == wanted.tobytes(), comm), (dtype, axis)
            found = paths_of(grid.explain(u))
            assert agree(bool(found) and found <= {"nccl/packed"}, comm), found


def _records(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    found = np.zeros(values.shape, dtype)
    for name in dtype.names or ():
        found[name] = values
    return found


@apart
def test_several_fields_and_permuted_components(
    gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm
) -> None:
    """All fields of a rank travel in one send per neighbour."""
    _, nccl = gpu
    with box(comm, halo=1) as grid:
        u, v = array(grid.padded_shape), array(grid.padded_shape, "f4")
        w = Array(np.moveaxis(array((3, *grid.padded_shape), "f4").values, 0, -1))
        wanted = [fill(grid, one, n) for n, one in enumerate((u, v))]
        parts = [Array(w.values[..., c]) for c in range(3)]
        wanted_w = [fill(grid, part, 7 + c) for c, part in enumerate(parts)]
        grid.exchange(u, v, w)
        right = all(np.array_equal(a.values, b) for a, b in zip((u, v), wanted, strict=True))
        right &= all(np.array_equal(w.values[..., c], wanted_w[c]) for c in range(3))
        assert agree(right, comm)
        sends = [op.peer for op in nccl.groups[-1] if op.is_send]
        assert agree(sorted(set(sends)) == sorted(sends), comm), sends


@apart
def test_accumulate(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    with box(comm, halo=1) as grid:
        for step in range(3):
            u = array(grid.padded_shape)
            u.values[...] = step + 1
            grid.accumulate(u)
            ends = [
                (np.arange(n) == 0).astype(int) + (np.arange(n) == n - 1) for n in grid.rank_shape
            ]
            i, j, k = np.ix_(*(1 + one for one in ends))
            right = np.array_equal(u.values[1:-1, 1:-1, 1:-1], (step + 1) * i * j * k)
            assert agree(right and u.values.sum() == (step + 1) * (i * j * k).sum(), comm)


@apart
def test_new_arrays_and_start_and_finish(
    gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm
) -> None:
    """One plan serves all arrays of a layout; several plans can be in progress at once."""
    with box(comm, halo=1) as grid:
        for step, offset in enumerate((0, 8, 0, 8 * (comm.rank % 2))):
            u = array(grid.padded_shape, "f8", offset)
            wanted = fill(grid, u, step)
            grid.exchange(u)
            assert agree(np.array_equal(u.values, wanted), comm), step
        assert grid.domain.plans_made == 1
        arrays = [array(grid.padded_shape) for _ in range(2)]
        plans = [grid.plan(u) for u in arrays]
        for step in range(3):
            wanted_all = [fill(grid, u, 10 * step + n) for n, u in enumerate(arrays)]
            for plan in plans:
                plan.start()
            for plan in reversed(plans):
                plan.finish()
            right = all(np.array_equal(u.values, w) for u, w in zip(arrays, wanted_all))  # noqa: B905
            assert agree(right, comm), step


@apart
def test_captured(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    """The first call of a plan can be captured, but not its construction."""
    machine, _ = gpu
    with box(comm, halo=1) as grid:
        u, v = array(grid.padded_shape), array((2, *grid.padded_shape))
        plan, wanted = grid.plan(u), fill(grid, u, 1)
        machine.capturing = True
        plan()
        plan.start()
        plan.finish()
        with pytest.raises(StateError):
            grid.exchange(v)
        machine.capturing = False
        assert agree(np.array_equal(u.values, wanted), comm)


@apart
@pytest.mark.ranks(2)
def test_plans_in_another_order(
    gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL matches messages of one length, also of different plans; the next call raises, on all ranks."""
    monkeypatch.setenv("HALOX_TIMEOUT", "0")  # no thread watches between the calls
    planes: dict[str, Any] = {"halo": (1, 0, 0), "periodic": False, "proc_shape": (2, 1, 1)}
    with pytest.warns(UserWarning, match="message of plan") as warned, box(comm, **planes) as grid:
        fields = [array(grid.padded_shape) for _ in range(3)]
        first, second, third = plans = [grid.plan(u, path="nccl") for u in fields]
        for plan in (*plans, second, first):
            plan()
        for plan in (first, second) if comm.rank == 0 else (second, first):
            plan()
        for late, number in ((first, 2), (third, 2)):
            with pytest.raises(MismatchError) as raised:
                late()
            said = f"received from rank {1 - comm.rank} a message of plan {number} of"
            assert said in str(raised.value)
            assert "in the same order on all ranks" in str(raised.value)
        with pytest.raises(StateError):
            first()
    assert len(warned) == 1  # of the second plan, which was not called again
    check_next_grid(comm)


@one_node
def test_not_looked_for_within_a_node(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    with box(comm) as grid:
        report: Any = grid.plan(array(grid.padded_shape), path="staged").explain()
        rows = [row for row in report.rows if row.peer != comm.rank]
        assert rows and all("looks for NCCL only if" in row.why_not["nccl"] for row in rows)


WHYS = {
    "missing": "rank 1: no libnccl.so.2",
    "too old": "rank 1: NCCL 2.9.6 is too old",
    "other version": "rank 0 has NCCL 2.29.7, rank 1 has 2.27.3; install the same version",
    "shared": "ranks 0 and 1 share a GPU, which NCCL refuses",
}


@pytest.mark.parametrize(
    ("what", "nodes"),
    [*((what, "a node each") for what in WHYS), ("shared", "one node")],
    indirect=["nodes"],
)
def test_reasons(
    what: str, nodes: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, all ranks raise one error; by default the plan takes another path, and `explain` gives the reason."""
    monkeypatch.setenv("HALOX_NODE", "rank" if nodes == "a node each" else "")
    second = comm.rank == 1
    version = 22703 if what == "other version" and second else 22907
    with host_launches():
        _, nccl = machine_with_nccl(comm, monkeypatch, shared=what == "shared", version=version)
        whys = {"missing": "no libnccl.so.2 can be loaded", "too old": "NCCL 2.9.6 is too old"}
        nccl.why_not = whys.get(what, "") if second else ""
        with box(comm) as grid:
            u = array(grid.padded_shape)
            with pytest.raises(PathError, match=WHYS[what]) as raised:
                grid.plan(u, path="nccl")
            said = comm.allgather(str(raised.value).partition(";")[0][-60:])
            assert len(set(said)) == 1, said
            wanted = fill(grid, u, 3)
            # Within a node halox looks for NCCL only by name, and this test does not simulate the peer path.
            unasked = {} if nodes == "a node each" else {"path": "staged"}
            plan = grid.plan(u, **unasked)
            plan()
            assert agree(np.array_equal(u.values, wanted), comm)
            if not unasked:
                rows = [row for row in plan.explain().rows if row.peer != comm.rank]
                assert all(WHYS[what] in row.why_not["nccl"] for row in rows)


@apart
def test_a_communicator_that_cannot_be_made(
    gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm
) -> None:
    """A wait inside NCCL ends with a timeout on all ranks."""
    _, nccl = gpu
    nccl.blocks = threading.Event()
    with box(comm) as grid:
        u = array(grid.padded_shape)
        with short_waits(), pytest.raises(ExchangeTimeoutError, match="ncclCommInitRank"):
            grid.exchange(u)
        nccl.blocks.set()


@apart
def test_a_stalled_rank(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    """The pending exchange is aborted, the next call names the missing ranks, and a new grid works."""
    _, nccl = gpu
    with pytest.raises(ExchangeTimeoutError) as raised, box(comm) as grid:
        u = array(grid.padded_shape)
        plan = grid.plan(u)
        for _ in range(4):
            plan()
        watch = plan._runner._channels[0]._watch
        watch.limit_s = 0.3  # only from here on, after all construction
        time.sleep(0.6)  # time between exchanges does not count
        assert not nccl.aborted
        nccl.is_stuck = True
        watch._words[0] = 1  # as a kernel writes at the start of an exchange
        assert becomes(lambda: nccl.aborted)
        plan()
    peers = sorted({(comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size})
    assert "waited for rank" in str(raised.value) and str(peers[0]) in str(raised.value)
    assert "HALOX_TIMEOUT" in str(raised.value)
    comm.Barrier()
    nccl.is_stuck = False
    check_next_grid(comm)


@apart
def test_one_communicator_for_all_grids(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    """The first plan that needs NCCL's communicator makes it; later grids on the same ranks use it too."""
    _, nccl = gpu
    for _ in range(3):
        with box(comm) as grid:
            for shape in ((), (2,)):
                grid.exchange(array((*grid.padded_shape, *shape)))
    assert nccl.made == 1 and not nccl.aborted
    nccl_ranks._end_all()  # as MPI_Finalize does
    assert len(nccl.aborted) == 1
    nccl_ranks._end_all()
    assert len(nccl.aborted) == 1


@apart
def test_a_communicator_is_of_the_same_gpus(
    gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm
) -> None:
    """All ranks make a new communicator after one rank has returned to its first GPU, with its old one still there."""
    _, nccl = gpu
    world = World(comm)
    for second in (0, 1, 0):
        device = second if comm.rank == 1 else 0
        found = nccl_of(SimpleNamespace(world=world, device=device))  # type: ignore[arg-type]
        assert agree(found.unique_id == comm.bcast(found.unique_id), comm)
        assert not found.failed
    assert nccl.made == 3
    world.close()


@apart
def test_ranks_with_arrays_on_the_host(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    """A single message between a GPU and the host excludes NCCL for all messages of the plan."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    made: Any = [np.full(8, comm.rank, "f8"), np.zeros(8)]
    if comm.rank == 0:
        made = [Array(a) for a in made]
    sends, receives = [Send(made[0], "f8", right, count=8)], [Recv(made[1], "f8", left, count=8)]
    with Exchange(sends, receives, comm=comm) as exchange:
        exchange()
        assert not any(one.startswith("nccl") for one in paths_of(exchange.explain()))
    found = made[1].values if comm.rank == 0 else made[1]
    assert agree(bool((found == left).all()), comm)


@apart
@pytest.mark.ranks(3)
@pytest.mark.usually(3)
def test_a_rank_without_messages(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    """The GPU of a rank without messages is unknown: NCCL by name is an error, the default is another path."""
    a, other = array((8,)), 1 - comm.rank
    sends, receives = [Send(a, "f8", other, count=4)], [Recv(a[4:], "f8", other, count=4)]
    given: Any = (sends, receives) if comm.rank < 2 else ([], [])
    with pytest.raises(PathError):
        Exchange(*given, comm=comm, path="nccl")
    with Exchange(*given, comm=comm) as exchange:
        exchange()
