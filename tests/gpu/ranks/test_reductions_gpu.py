"""Reductions of fields and arrays of a GPU grid: compared with NumPy, in streams and in graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError, MismatchError, StateError
from tests.mpi.conftest import agree
from tests.mpi.reductions.reduction_calls import calls_with, check_closed
from tests.support import require

require("gpu")

import cupy  # noqa: E402

from tests.gpu.guarded import stall  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4, 8)]

REPLAYS = 1000
NUMBERS = {
    "sum": lambda a: a.sum(),
    "min": lambda a: a.min(),
    "max": lambda a: a.max(),
    "norm": lambda a: np.sqrt((np.abs(a.astype("c16")) ** 2).sum()),
}


@pytest.fixture(params=["as it is", "a node each"])
def grid(
    request: pytest.FixtureRequest, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> Iterator[halox.Grid]:
    if request.param == "a node each":
        monkeypatch.setenv("HALOX_NODE", "rank")
    shape = (16 * comm.size + 1, 21, 34)
    with halox.Grid(shape, halo=((1, 2), (1, 1), (3, 0)), comm=comm, device="gpu") as found:
        yield found


def can_signal(grid: halox.Grid) -> bool:
    with halox.Allreduce(grid.comm, 1, "f8", device="gpu") as reduce:
        return reduce.captures


def field(grid: halox.Grid, dtype: Any, seed: int = 0) -> tuple[Any, np.ndarray]:
    """Return a field with wrong halo values, and the NumPy array of the whole grid."""
    rng = np.random.default_rng(seed)
    whole = rng.integers(-90, 90, grid.grid_shape) / 4
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        whole = whole + 1j * rng.integers(-90, 90, grid.grid_shape) / 4
    whole = (np.abs(whole) if dtype.kind in "ub" else whole).astype(dtype)
    found = grid.zeros(dtype)
    found[...] = cupy.asarray(np.full(found.shape, 99).astype(dtype))
    grid.interior(found)[...] = cupy.asarray(whole[grid.owned])
    return found, whole


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "c8", "c16", "i1", "i8", "u2", "?"])
def test_numbers(grid: halox.Grid, dtype: str, comm: MPI.Intracomm) -> None:
    u, whole = field(grid, dtype)
    wide = {"f": "f8", "c": "c16", "u": "u8"}.get(whole.dtype.kind, "i8")
    for name, number in NUMBERS.items():
        if whole.dtype.kind == "c" and name in ("min", "max"):
            with pytest.raises(FieldError):
                getattr(grid, name)(u)
            continue
        found = getattr(grid, name)(u)
        kind = np.dtype({"norm": "f8", "sum": wide}.get(name, dtype))
        assert isinstance(found, cupy.ndarray) and found.shape == () and found.dtype == kind
        ok = np.isclose(found.get(), number(whole.astype(wide)), rtol=1e-13)
        out = cupy.zeros(1, kind)
        assert getattr(grid, name)(u, out=out) is out
        ok &= out.get().tobytes() == found.get().tobytes()
        ok &= len(set(comm.allgather(found.get().tobytes()))) == 1
        assert agree(bool(ok), comm), name
    v, other = field(grid, dtype, 1)
    total = np.sum(np.conj(whole.astype(wide)) * other.astype(wide))
    assert agree(bool(np.isclose(grid.dot(u, v).get(), total, rtol=1e-11)), comm)


def test_nan_and_infinity(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    u, _ = field(grid, "f8")
    if comm.rank == comm.size - 1:
        grid.interior(u)[0, 1, 2] = np.inf
    assert agree(all(np.isposinf(float(getattr(grid, n)(u))) for n in ("sum", "max", "norm")), comm)
    if comm.rank == 0:
        grid.interior(u)[-1, 1, 2] = np.nan
    assert agree(all(np.isnan(float(getattr(grid, n)(u))) for n in NUMBERS), comm)


def test_the_same_bits_in_every_run(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    u = grid.zeros("f8")
    u[...] = cupy.asarray(np.random.default_rng(comm.rank).normal(size=u.shape))
    runs = REPLAYS if can_signal(grid) else 20
    for name in NUMBERS:
        first = getattr(grid, name)(u).get().tobytes()
        ok = all(getattr(grid, name)(u).get().tobytes() == first for _ in range(runs))
        assert agree(ok and len(set(comm.allgather(first))) == 1, comm), name


def test_temporaries_and_strides(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    """Temporary fields, and fields with different strides on each rank."""
    u, whole = field(grid, "f8")
    for _ in range(5):
        assert np.isclose(float(grid.sum(u * 2.0 + u)), 3 * whole.sum())
    turned = cupy.asfortranarray(u) if comm.rank else u
    assert np.isclose(float(grid.norm(turned)), np.linalg.norm(whole))
    assert np.isclose(float(grid.dot(turned, u)), (whole**2).sum())
    both = grid.zeros("f4", components=(2, ..., 3))
    both[...] = 1
    assert float(grid.sum(both)) == 6 * whole.size


def test_behind_what_the_stream_holds(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    u = grid.zeros("f8")
    cupy.cuda.runtime.deviceSynchronize()
    cells = int(np.prod(grid.grid_shape))
    for call in range(4):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stall()
            u[...] = call
            found = grid.sum(u) * 2
            stream.synchronize()
        assert agree(float(found) == 2 * call * cells, comm), call


def test_in_a_graph(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    """Replays a graph with a reduction and user kernels; grids without device signals leave the capture intact."""
    u = grid.zeros("f8")
    u[...] = 1
    out, sums = cupy.zeros(()), cupy.zeros(())
    grid.sum(u, out=out)
    sums += out * 0
    u += 0
    cupy.cuda.runtime.deviceSynchronize()
    captures, cells = can_signal(grid), int(np.prod(grid.grid_shape))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        if captures:
            grid.sum(u, out=out)
        else:
            with pytest.raises(StateError):
                grid.sum(u, out=out)
        with pytest.raises(StateError):
            grid.max(u)
        sums += out
        u += 1
        graph = stream.end_capture()
        for _ in range(REPLAYS if captures else 0):
            graph.launch(stream)
        stream.synchronize()
    if captures:
        assert agree(float(sums) == cells * REPLAYS * (REPLAYS + 1) / 2, comm)
    assert agree(float(grid.max(u)) == (REPLAYS + 1 if captures else 1), comm)


def test_errors(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    u, _ = field(grid, "f8")
    last = comm.rank == comm.size - 1
    with pytest.raises(FieldError, match="shape"):
        grid.sum(cupy.zeros((3, 99)) if last else u)
    with pytest.raises(FieldError):
        grid.max(u, out=cupy.zeros(2) if last else None)
    with pytest.raises(MismatchError):
        grid.norm(u.astype("f4") if last else u)
    with pytest.raises(FieldError):
        grid.dot(u, grid.zeros("f8", staggered=0))
    assert float(grid.norm(u)) > 0


def test_errors_of_what_has_been_taken_before(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    """A bad ``out`` on one rank makes all ranks raise if the host takes part; later calls work."""
    u, _ = field(grid, "f8")
    is_bad = can_signal(grid) or comm.rank == comm.size - 1  # else ranks wait until the time limit
    norm = float(grid.norm(u))
    with pytest.raises(FieldError):
        grid.norm(u, out=cupy.zeros(2) if is_bad else None)
    assert agree(float(grid.norm(u)) == norm, comm)
    with pytest.raises(FieldError):
        grid.norm(u, out=cupy.zeros(2))
    assert agree(float(grid.norm(u)) == norm, comm)


def test_arrays(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    total = comm.size * (comm.size + 1) // 2
    many = [cupy.full(n, comm.rank + 1, "i4") for n in range(1, 40)]
    for _ in range(2):
        found = [grid.allreduce(one) for one in many]
        assert agree(all(bool((one == total).all()) for one in found), comm)
    one = cupy.asarray(2.0)
    assert grid.allreduce(one, "prod", out=one) is one and float(one) == 2.0**comm.size
    host = grid.allreduce(np.array([comm.rank]), "max")
    assert isinstance(host, np.ndarray) and host.tolist() == [comm.size - 1]


@pytest.mark.ranks(1, 2, 4, 8)
class TestSeenBefore:
    """Arrays of earlier calls: where a call is one launch, the grid repeats the launch without checks."""

    @staticmethod
    def kept(grid: halox.Grid) -> Any:
        """Return the launches that the grid has cached for arrays of `Grid.allreduce`."""
        return grid._reductions.arrays.known

    def test_operations_and_places(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """Operations on one array in turn, with new values each; earlier results do not change."""
        base = np.arange(1024.0)
        ramp, given, out = cupy.asarray(base), cupy.zeros(1024), cupy.zeros(1024)
        ranks = comm.size * (comm.size + 1) // 2
        results = []
        for call in range(20):
            given[...] = ramp * (comm.rank + 1) + call
            total, most = base * ranks + call * comm.size, base * comm.size + call
            assert grid.allreduce(given, "max", out=out) is out
            results += [(out.copy(), most), (grid.allreduce(given), total)]
            results += [(grid.allreduce(given, "max"), most)]
            assert grid.allreduce(given, out=given) is given
            results += [(given.copy(), total)]
        assert agree(all(np.array_equal(found.get(), value) for found, value in results), comm)
        assert len(self.kept(grid)) == (4 if can_signal(grid) else 0)

    def test_numbers_without_out(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """Calls with and without ``out`` in turn, also of temporary fields."""
        u, out = grid.zeros("f8"), cupy.zeros(())
        cells = int(np.prod(grid.grid_shape))
        results = []
        for call in range(1, 20):
            u[...] = call
            results += [(grid.sum(u), call * cells), (grid.sum(u, out=out).copy(), call * cells)]
            results += [(grid.dot(u, u), call**2 * cells), (grid.sum(u * 2), 2 * call * cells)]
        assert agree(all(float(found) == value for found, value in results), comm)

    def test_arrays_that_are_gone(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """A cached launch is not used for another array at the same address."""
        total = comm.size * (comm.size + 1) // 2
        addresses, ok, count = set(), True, 0
        for dtype, elements in (("f8", 512), ("i8", 512), ("f8", 256)) * 10:
            given, out = cupy.full(elements, comm.rank + 1, dtype), cupy.zeros(elements, dtype)
            addresses.add((id(given), given.data.ptr))
            for _ in range(3):
                found = grid.allreduce(given)
                ok &= found.dtype == given.dtype and found.shape == given.shape
                ok &= bool((found == total).all())
                ok &= bool((grid.allreduce(given, out=out) == total).all())
            count += 1
            del given, out, found
            assert not self.kept(grid)
        assert agree(ok, comm)
        assert len(addresses) < count, "no address was used again, and so nothing was tried"

    def test_evicted_alike_on_all_ranks(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """All ranks evict the same reductions, even if they cache different arrays; an evicted one is built again."""
        kept, ok = cupy.zeros(3), True

        def often_used() -> bool:
            given = kept if comm.rank == 0 else cupy.zeros(3)
            given[...] = 1
            grid.allreduce(given, out=given)
            return bool((given == comm.size).all())

        for elements in range(4, 38):
            ok &= often_used() and often_used()
            other = cupy.ones(elements)
            ok &= bool((grid.allreduce(other, out=other) == comm.size).all())
            ok &= bool((grid.allreduce(other, out=other) == comm.size**2).all())
        ok &= often_used()
        assert agree(ok, comm)
        keys = tuple(grid._reductions.arrays.reductions)
        assert len(keys) == 32 and len(set(comm.allgather(keys))) == 1

    def test_other_shapes_in_place(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        given, out = cupy.ones(6), cupy.zeros(6)
        for _ in range(3):
            grid.allreduce(given)
            grid.allreduce(given, out=out)
        given.shape = (2, 3)
        with pytest.raises(FieldError):
            grid.allreduce(given, out=out)
        for _ in range(3):
            found = grid.allreduce(given)
            assert found.shape == (2, 3)
        out.shape = (2, 3)
        grid.allreduce(given, out=out)
        assert agree(bool((found == comm.size).all() and (out == comm.size).all()), comm)
        u, number = grid.zeros("f8"), cupy.zeros(())
        u[...] = 1
        for _ in range(3):
            grid.sum(u)
            grid.sum(u, out=number)
        right = u.shape
        u.shape = (u.size,)
        for place in (None, number):
            with pytest.raises(FieldError, match="shape"):
                grid.sum(u, out=place)
        u.shape = right
        assert agree(float(grid.sum(u, out=number)) == np.prod(grid.grid_shape), comm)

    def test_on_changing_streams(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """Calls are ordered after earlier work and before later work of two busy streams."""
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        array, out = cupy.zeros(4000), cupy.zeros(4000)
        cupy.cuda.runtime.deviceSynchronize()
        for call in range(8):
            wanted = sum(range(comm.size)) + comm.size * call
            with streams[call % 2]:
                stall()
                array[...] = comm.rank + call
                found = grid.allreduce(array)
                grid.allreduce(array, out=out)
                ok = bool(((found == wanted) & (out == wanted)).all())
            assert agree(ok, comm), call
            streams[call % 2].synchronize()

    def test_in_a_graph(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """A call of one launch is captured, replayed, and then called without the graph; other calls raise."""
        array, total, sums = (cupy.zeros(1000, "i8") for _ in range(3))
        array += 1
        sums += total  # compiled before the capture
        for _ in range(3):
            grid.allreduce(array, out=total)
        cupy.cuda.runtime.deviceSynchronize()
        captures = can_signal(grid)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            if captures:
                grid.allreduce(array, out=total)
            else:
                with pytest.raises(StateError, match="captured"):
                    grid.allreduce(array, out=total)
            sums += total
            array += 1
            graph = stream.end_capture()
            for _ in range(REPLAYS if captures else 0):
                graph.launch(stream)
            stream.synchronize()
        replays = REPLAYS if captures else 0
        ok = bool((sums == comm.size * replays * (replays + 1) // 2).all())
        grid.allreduce(array, out=total)
        assert agree(ok and bool((total == comm.size * (replays + 1)).all()), comm)

    def test_closed(self, comm: MPI.Intracomm) -> None:
        given, out, number = cupy.ones(4), cupy.ones(4), cupy.zeros(())
        with halox.Grid((8 * comm.size,), comm=comm, device="gpu") as grid:
            u = grid.zeros("f8")
            calls = calls_with(grid, given, out, u, number)
            for call in calls * 3:
                call()
        check_closed(calls)
