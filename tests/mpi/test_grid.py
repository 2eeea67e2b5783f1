"""The public interface of the grid: fields, interiors, gathering, reductions, plans, closing."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.lib.stride_tricks import as_strided

import halox
from halox.errors import FieldError, MismatchError
from tests.limits import fill_shared_memory
from tests.mpi.conftest import agree

pytestmark = pytest.mark.geometry


@pytest.fixture
def grid(comm: MPI.Intracomm) -> Iterator[halox.Grid]:
    with halox.Grid((11, 7 * comm.size), halo=(1, 2), periodic=True, comm=comm, device="cpu") as g:
        yield g


def coded(grid: halox.Grid) -> np.ndarray:
    i, j = grid.indices()
    return i * 1000.0 + j


def test_shapes(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    assert (grid.rank, grid.size) == (comm.rank, comm.size)
    assert math.prod(grid.proc_shape) == comm.size
    assert grid.padded_shape == (grid.rank_shape[0] + 2, grid.rank_shape[1] + 4)
    assert tuple(s.stop - s.start for s in grid.owned) == grid.rank_shape
    cells = comm.allgather(math.prod(grid.rank_shape))
    assert sum(cells) == math.prod(grid.grid_shape)
    assert all(0 <= c < p for c, p in zip(grid.proc_coords, grid.proc_shape, strict=True))


@pytest.mark.usually(3)
def test_factories(grid: halox.Grid) -> None:
    assert np.all(grid.zeros("i4") == 0)
    assert np.all(grid.ones("f4") == 1)
    assert np.all(grid.full(2.5) == 2.5)
    assert grid.empty("c16").shape == grid.padded_shape
    assert grid.zeros(components=(3, ..., 2, 2)).shape == (3, *grid.padded_shape, 2, 2)
    assert grid.zeros(halo=0).shape == grid.rank_shape
    staggered = grid.zeros(staggered=1)
    assert staggered.shape == (grid.padded_shape[0], grid.padded_shape[1] + 1)
    record = grid.zeros([("a", "f8"), ("b", "i4")])
    assert record["a"].sum() == 0 and record.dtype.names == ("a", "b")


@pytest.mark.usually(3)
def test_fields_in_shared_memory_do_not_overlap(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    """Also while fields are allocated and released, and if a view outlives its array."""
    views = []
    for number in range(9):
        u = grid.zeros()
        assert not u.any()  # also in memory that a released field had
        u += number
        views.append((number, u[1:, 1:]))
        if number % 3 == 0:
            views.pop(0)
        grid.exchange(u)
        del u
        comm.Barrier()
        assert agree(all(bool(np.all(v == n)) for n, v in views), comm)


@pytest.mark.ranks(2)
def test_fields_by_the_hundred(comm: MPI.Intracomm) -> None:
    """Many small fields of one grid, some with plans, some released and replaced by new fields."""
    with halox.Grid((16 * comm.size, 30), periodic=True, comm=comm, device="cpu") as grid:
        fields = {number: grid.full(number, "f8") for number in range(300)}
        for number in range(0, 300, 50):
            grid.exchange(fields[number])
        for number in range(0, 300, 2):
            del fields[number]
        fields |= {number: grid.full(number, "f8") for number in range(300, 400)}
        for number in range(300, 400, 50):
            grid.exchange(fields[number])
        wrong = [number for number, field in fields.items() if not np.all(field == number)]
        assert agree(not wrong, comm), wrong


@pytest.mark.usually(3)
def test_flags_in_memory_that_was_a_field(comm: MPI.Intracomm) -> None:
    """The memory of a plan's flags may hold arbitrary values of a former field."""
    with halox.Grid((4 * comm.size, 3), periodic=True, comm=comm, device="cpu") as grid:
        for value in (np.iinfo("i8").max, -1, 2**62 + 5, 0):
            u = grid.full(value, "i8")
            del u
            mine = np.zeros(grid.padded_shape)
            grid.interior(mine)[...] = grid.indices()[0]
            grid.exchange(mine)
            rows = grid.indices(halo=True)[0] % grid.grid_shape[0]
            assert np.array_equal(mine, np.broadcast_to(rows, mine.shape))


def test_interior_gather_and_indices(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    u = grid.full(-1)
    grid.interior(u)[...] = coded(grid)
    whole = grid.gather(u, root=comm.size - 1)
    if comm.rank == comm.size - 1:
        i, j = np.indices(grid.grid_shape)
        assert whole is not None and np.array_equal(whole, i * 1000.0 + j)
    else:
        assert whole is None
    grid.exchange(u)
    i, j = grid.indices(halo=True)
    ni, nj = grid.grid_shape
    assert np.array_equal(u, (i % ni) * 1000.0 + j % nj)


@pytest.mark.usually(3)
def test_indices_of_staggered_fields(comm: MPI.Intracomm) -> None:
    with halox.Grid((6, 5), comm=comm, periodic=(True, False), device="cpu") as grid:
        points = np.zeros((6, 6), int)
        v = grid.zeros("i8", staggered=(0, 1), halo=2)
        grid.interior(v)[...] = sum(grid.indices(staggered=(0, 1)))
        points[np.ix_(*map(np.ravel, grid.indices(field=v)))] = grid.interior(v)
        assert np.array_equal(comm.allreduce(points), np.indices((6, 6)).sum(axis=0))
        for axis, indices in enumerate(grid.indices(field=v, halo=True)):
            assert indices.shape[axis] == v.shape[axis] and np.all(np.diff(indices.ravel()) == 1)
            assert indices.min() == grid.layout(v).owned[axis].start - 2


@pytest.mark.usually(3)
@pytest.mark.parametrize("dtype", ["f4", "i4", "u1", "?", "c16"])
def test_reductions(dtype: str, grid: halox.Grid) -> None:
    ni, nj = grid.grid_shape
    i, j = np.indices((ni, nj))
    whole = ((i * 31 + j * 7) % 50 - 20).astype(dtype)
    if dtype[0] == "c":
        whole *= 1 + 2j
    u = grid.zeros(dtype)
    u[...] = 99  # halo values must not count
    grid.interior(u)[...] = whole[grid.owned]
    assert grid.sum(u) == whole.sum(dtype=grid.sum(u).dtype)
    expected = math.sqrt(float((np.abs(whole.astype("c16")) ** 2).sum()))
    assert math.isclose(float(grid.norm(u)), expected, rel_tol=1e-12)
    vdot = np.vdot(whole.astype("c16"), whole.astype("c16"))
    assert np.isclose(grid.dot(u, u), vdot if dtype not in ("?", "u1") else grid.dot(u, u))
    if dtype[0] != "c":
        assert grid.min(u) == whole.min() and grid.max(u) == whole.max()


@pytest.mark.usually(3)
def test_reductions_give_the_same_bits_everywhere(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    u = grid.zeros()
    u[...] = np.random.default_rng(comm.rank).standard_normal(u.shape)
    found = [grid.sum(u).tobytes() for _ in range(5)] + [grid.norm(u).tobytes() for _ in range(5)]
    assert comm.allgather(found) == [found] * comm.size


@pytest.mark.usually(3)
def test_a_nan_is_seen_by_all(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    u = grid.zeros()
    if comm.rank == comm.size - 1:
        grid.interior(u)[0, 0] = np.nan
    assert all(np.isnan(r) for r in (grid.min(u), grid.max(u), grid.sum(u), grid.norm(u)))


@pytest.mark.usually(3)
def test_reductions_into_arrays(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    u = grid.zeros("f8")
    u[...] = comm.rank + 1
    for name in ("sum", "min", "max", "norm"):
        found = getattr(grid, name)(u)
        for out in (np.zeros(()), np.zeros((1, 1))):
            assert getattr(grid, name)(u, out=out) is out
            assert out.tobytes() == found.tobytes()
    out = np.zeros(())
    assert grid.dot(u, u, out=out) is out and out == grid.dot(u, u)
    values = np.array([comm.rank, 1.0])
    assert grid.allreduce(values, "max", out=values) is values
    assert values.tolist() == [comm.size - 1, 1]
    last = comm.rank == comm.size - 1
    fixed = np.zeros(())
    fixed.flags.writeable = False
    for bad in (np.zeros(2), np.zeros((), "i4"), fixed):
        for call in (lambda out: grid.norm(u, out=out), lambda out: grid.allreduce(1.0, out=out)):
            with pytest.raises(FieldError, match="out"):
                call(bad if last else None)
    sliding = as_strided(np.zeros(3), (2, 2), (8, 8))
    with pytest.raises(FieldError):
        grid.allreduce(np.ones((2, 2)), out=sliding if last else None)
    columns = np.zeros((2, 3))[:, ::2]
    assert grid.allreduce(np.ones((2, 2)), out=columns) is columns and (columns == comm.size).all()


@pytest.mark.usually(3)
def test_plan_around_interior_work(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    u, v = grid.zeros(), grid.zeros("i4")
    plan = grid.plan(u, v)
    i, j = grid.indices(halo=True)
    ni, nj = grid.grid_shape
    for step in range(8):
        grid.interior(u)[...] = coded(grid) + step
        grid.interior(v)[...] = coded(grid) - step
        plan.start()
        time.sleep(0.001 * (comm.rank % 3))
        plan.finish()
        wanted = (i % ni) * 1000.0 + j % nj
        right = np.array_equal(u, wanted + step) and np.array_equal(v, wanted - step)
        assert agree(bool(right), comm)
    assert plan.messages_sent <= comm.size - 1, "one message a peer, for all fields and directions"


def test_ranks_out_of_step(comm: MPI.Intracomm) -> None:
    """With slow and fast ranks, one way and both ways, no rank sees a neighbour's next step."""
    for halo in [((1, 0), (0, 0)), ((1, 1), (0, 0)), ((0, 2), (0, 0))]:
        options = {"proc_shape": (comm.size, 1), "periodic": True, "device": "cpu"}
        with halox.Grid((4 * comm.size, 500), halo=halo, comm=comm, **options) as grid:
            u = grid.zeros(components=1)
            rng = np.random.default_rng(comm.rank)
            for step in range(20):
                grid.interior(u)[...] = step * comm.size + comm.rank
                if rng.integers(4) == 0:
                    time.sleep(rng.random() * 0.002)
                grid.exchange(u)
                low, high = halo[0]
                below, above = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
                right = np.all(u[:, :low] == step * comm.size + below)
                right &= np.all(u[:, u.shape[1] - high :] == step * comm.size + above)
                assert right, (halo, step)


@pytest.mark.usually(3)
def test_plans_are_found_again(grid: halox.Grid) -> None:
    state = grid.zeros(components=3)
    for _ in range(4):
        for k in range(3):
            grid.exchange(state[k])  # a new view object each time
        grid.exchange(state)
    assert grid.domain.plans_made == 4


def mappings() -> int:
    """Return the number of mappings in the memory of this process."""
    with open("/proc/self/maps") as maps:
        return len(maps.readlines())


@pytest.mark.usually(3)
def test_arrays_die_without_a_collection(grid: halox.Grid) -> None:
    """A cached plan keeps no array alive, whereas a plan of the user keeps its own."""
    gone = []
    for _ in range(3):
        u, mine = grid.zeros(), np.zeros(grid.padded_shape)
        grid.exchange(u)
        grid.exchange(mine)
        grid.exchange(u, mine)
        gone += [weakref.ref(u), weakref.ref(mine)]
    del u, mine
    assert all(one() is None for one in gone)
    before = mappings()
    for _ in range(30):
        grid.exchange(grid.zeros())
    assert mappings() < before + 12, "the memory of fields is used again"
    u = grid.full(3)
    held, plan = weakref.ref(u), grid.plan(u)
    del u
    plan()
    kept = held()
    assert kept is not None and float(kept.min()) == 3


@pytest.mark.usually(3)
def test_fields_outlive_their_grid(comm: MPI.Intracomm) -> None:
    grid = halox.Grid((8, 8 * comm.size), comm=comm, device="cpu")
    u = grid.full(5)
    grid.exchange(u)
    grid.close()
    grid.close()
    comm.Barrier()
    u += 1
    assert np.all(u == 6)


@pytest.mark.usually(3)
def test_grids_on_one_communicator(comm: MPI.Intracomm) -> None:
    """Exchanges of several grids at once, in another order than the grids."""
    options: dict[str, Any] = {"periodic": True, "comm": comm, "device": "cpu"}
    with (
        halox.Grid((4 * comm.size,), **options) as a,
        halox.Grid((6, 3 * comm.size), **options) as b,
    ):
        u, v, w = (grid.full(comm.rank + 10.0 * n) for n, grid in enumerate((a, b, a)))
        plans = [grid.plan(field) for grid, field in ((a, u), (b, v), (a, w))]
        for number in (0, 1, 2):
            plans[number].start()
        for number in (2, 0, 1):
            plans[number].finish()
        below = (comm.rank - 1) % comm.size
        assert agree((u[0], w[0]) == (below, below + 20), comm)
        assert b.sum(v) == 18 * sum(rank + 10 for rank in range(comm.size))


def test_public_names_only(grid: halox.Grid) -> None:
    for each in (grid, grid.plan(grid.zeros())):
        names = dir(each)
        assert {"close"} < {*names} and not [name for name in names if name.startswith("_")]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("arguments", "options", "word"),
    [
        ((64, 48), {}, r"Grid\(\(64, 48\)"),
        (((64, 48), 2), {}, "by keyword"),
        ((), {"shape": (64, 48)}, "write grid_shape"),
        ((8,), {"ghost": 2}, "write halo"),
        ((8,), {"peridic": True}, "write periodic"),
        ((8,), {"grid_shape": 8}, "one grid_shape"),
    ],
)
def test_arguments_of_no_grid(arguments: Any, options: Any, word: str) -> None:
    with pytest.raises(TypeError, match=word):
        halox.Grid(*arguments, **options)


def test_a_grid_that_could_not_be_made() -> None:
    grid = halox.Grid.__new__(halox.Grid)
    with pytest.raises(halox.HaloxError):
        grid.__init__((4, 4), device="none")  # type: ignore[misc]
    assert "halox.Grid" in repr(grid)


def test_explain(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    u = grid.zeros()
    said = str(grid.describe())
    assert repr(grid.describe()) == said and isinstance(grid.describe(), str)
    with pytest.raises(FieldError, match="describe"):
        grid.explain()
    assert str(grid.proc_shape) in said and "placed" in said
    report = grid.explain(u)
    assert {row.path for row in report.rows} <= {"local", "host"}
    sent = sum(row.nbytes for row in report.rows if row.direction == "send")
    # Slabs that are copied within a rank may also contain corners that neighbours send.
    halo = (u.size - grid.interior(u).size) * 8
    corners = math.prod(low + high for low, high in grid.halo) * 8
    assert sent == halo if grid.size == 1 else halo <= sent <= halo + corners
    assert str(report).count("\n") == len(report.rows) + 1
    assert report.as_dict()["rank"] == comm.rank
    if comm.size > 1:  # the error names the method if only one rank knows the plan
        other = grid.zeros()
        with pytest.raises(MismatchError, match="explain"):
            grid.explain(u if comm.rank == 0 else other)
            grid.exchange(u)


@pytest.mark.usually(2)
def test_without_space_for_shared_memory(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_shared_memory(monkeypatch)
    options = {"periodic": True, "proc_shape": (comm.size, 1), "device": "cpu"}
    own = comm.Dup()  # without any shared memory yet
    with halox.Grid((4 * comm.size, 50), comm=own, **options) as grid:
        u = grid.zeros()
        i, _ = grid.indices()
        grid.interior(u)[...] = i
        grid.exchange(u)
        i, _ = grid.indices(halo=True)
        assert np.array_equal(u, np.broadcast_to(i % grid.grid_shape[0], u.shape))
        said = str(grid.explain(u))
        assert comm.size == 1 or "/dev/shm has too little space" in said


@pytest.mark.usually(2)
def test_node_placement_says_what_it_gains(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALOX_NODE", "rank")
    with halox.Grid((8, 8 * comm.size), periodic=True, comm=comm, device="cpu") as grid:
        assert f"on {comm.size} node" in grid.describe()


@pytest.mark.ranks(1)
def test_host_overhead(comm: MPI.Intracomm) -> None:
    """A cached exchange of one small field takes less than 20 us if it waits for no other rank."""
    with halox.Grid((8, 8, 8), periodic=(False, False, True), comm=comm, device="cpu") as grid:
        u = grid.zeros()
        times = []
        for _ in range(300):
            start = time.thread_time()  # CPU time: the machine may be busy
            grid.exchange(u)
            times.append(time.thread_time() - start)
        assert np.median(times) < 20e-6
