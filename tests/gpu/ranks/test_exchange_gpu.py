"""The exchange of GPU arrays, compared with the references of the CPU tests, and its order in the user's stream."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.io import gather_scatter
from tests.mpi import ways
from tests.mpi.conftest import agree
from tests.mpi.ways import GPU_DTYPES, Way
from tests.oracle import (
    NUMERIC,
    Case,
    Field,
    check_accumulate_as_on_cpu,
    check_adjoint,
    check_exchanges,
)
from tests.strategies import cells, folds, on_ranks, some_axes, walls
from tests.support import require

require("gpu")

import cupy  # noqa: E402

from tests.gpu.guarded import stall  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:boundary:UserWarning")]

CHOSEN = Way("")
"""The path that halox chooses; on one rank, the copies within it."""


GPU_CELLS = partial(cells, dtypes=GPU_DTYPES)


@on_ranks(GPU_CELLS, 40)
def test_cells(case: Case, comm: MPI.Intracomm) -> None:
    check_exchanges(case, comm, "gpu")


@on_ranks(partial(GPU_CELLS, wide=True), 10)
def test_wide_halos(case: Case, comm: MPI.Intracomm) -> None:
    check_exchanges(case, comm, "gpu")


@on_ranks(walls, 40)
def test_walls(case: Case, comm: MPI.Intracomm) -> None:
    check_exchanges(case, comm, "gpu")


@on_ranks(partial(walls, linear=True), 20)
def test_walls_accumulated(case: Case, comm: MPI.Intracomm) -> None:
    check_adjoint(case, comm, "gpu")


@on_ranks(folds, 40)
def test_folds(case: Case, comm: MPI.Intracomm) -> None:
    check_exchanges(case, comm, "gpu")


@on_ranks(folds, 20)
def test_folds_accumulated(case: Case, comm: MPI.Intracomm) -> None:
    check_adjoint(case, comm, "gpu")


@on_ranks(lambda ranks: some_axes(GPU_CELLS(ranks) | walls(ranks) | folds(ranks)), 40)
def test_some_axes(case: Case, comm: MPI.Intracomm) -> None:
    check_exchanges(case, comm, "gpu")


@on_ranks(lambda ranks: some_axes(walls(ranks, linear=True) | folds(ranks)), 20)
def test_some_axes_accumulated(case: Case, comm: MPI.Intracomm) -> None:
    check_adjoint(case, comm, "gpu")


@pytest.mark.parametrize("n", [64, 130])
@pytest.mark.parametrize("periodic", [True, False])
def test_large_faces(n: int, periodic: bool, comm: MPI.Intracomm) -> None:
    """Faces with thousands of blocks on every axis, with corners."""
    procs = MPI.Compute_dims(comm.size, 3)
    blocks = tuple((n,) * p for p in procs)
    fields = [Field(np.dtype("f8"), ((1, 1),) * 3)]
    check_exchanges(Case(blocks, (periodic,) * 3, fields), comm, "gpu")


@on_ranks(partial(cells, dtypes=NUMERIC), 12)
def test_accumulate_equals_that_on_the_cpu(case: Case, comm: MPI.Intracomm) -> None:
    check_accumulate_as_on_cpu(case, comm)


@on_ranks(partial(cells, dtypes=NUMERIC, wide=True), 4)
def test_wide_accumulate_equals_that_on_the_cpu(case: Case, comm: MPI.Intracomm) -> None:
    check_accumulate_as_on_cpu(case, comm)


def numbered(grid: halox.Grid, step: int) -> cupy.ndarray:
    """Values that differ between steps, ranks and cells."""
    x, y, z = grid.indices()
    return (x * 10000 + y * 100 + z + step * 1e7).astype("f8")


def halo_is_right(u: cupy.ndarray, grid: halox.Grid, step: int) -> bool:
    x, y, z = grid.indices(halo=True)
    nx, ny, nz = grid.grid_shape
    wanted = (x % nx) * 10000 + (y % ny) * 100 + z % nz + step * 1e7
    return bool((u == wanted).all())


@pytest.mark.parametrize("own", [False, True], ids=["default stream", "own stream"])
def test_after_a_stalled_stream(own: bool, comm: MPI.Intracomm) -> None:
    ways.after_a_stalled_stream(CHOSEN, comm, own)


def test_exchanges_that_change_streams(comm: MPI.Intracomm) -> None:
    """Calls of `Grid.exchange`, each behind other work on a stream."""
    with halox.Grid((16, 12, 8 * comm.size), periodic=True, comm=comm, device="gpu") as grid:
        u = grid.zeros("f8")
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        cupy.cuda.runtime.deviceSynchronize()
        for step in range(6):
            with streams[step % 2] as stream:
                stall()
                grid.interior(u)[...] = numbered(grid, step)
                grid.exchange(u)
                right = halo_is_right(u, grid, step)
                stream.synchronize()
                assert agree(right, comm)


def test_two_plans_under_way(comm: MPI.Intracomm) -> None:
    ways.work_in_between(CHOSEN, comm)


def test_reductions_and_gather(comm: MPI.Intracomm) -> None:
    with halox.Grid((9, 10, 7 * comm.size), comm=comm, device="gpu") as grid:
        u = grid.zeros("f4")
        u[...] = cupy.nan
        grid.interior(u)[...] = numbered(grid, 0)
        i, j, k = np.ix_(*(np.arange(n) for n in grid.grid_shape))
        whole = (i * 10000 + j * 100 + k).astype("f4")
        gathered = grid.gather(u)
        if comm.rank == 0:
            assert gathered is not None and np.array_equal(gathered, whole)
        assert grid.sum(u) == whole.sum(dtype="f8")
        assert (grid.min(u), grid.max(u)) == (whole.min(), whole.max())
        assert np.isclose(float(grid.norm(u)), np.linalg.norm(whole.astype("f8")), rtol=1e-12)
        assert np.isclose(float(grid.dot(u, u)), float(grid.norm(u)) ** 2, rtol=1e-6)
        assert float(grid.allreduce(cupy.asarray([1.0]))[0]) == comm.size


@pytest.mark.parametrize("axis", [0, 2])
@pytest.mark.parametrize("dtype", ["i2", "c16", [("a", "i4"), ("b", "f8")]], ids=str)
def test_gather_in_parts(
    dtype: Any, axis: int, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several dtypes, with a small limit on the bytes that one copy from the GPU may move."""
    monkeypatch.setattr(gather_scatter, "_COPIED_BYTES", 300)
    divided = [comm.size if k == axis else 1 for k in range(3)]
    with halox.Grid((8, 12, 16), halo=(2, 1, 3), proc_shape=divided, comm=comm, device="gpu") as g:
        found = np.arange(8 * 12 * 16 * 2).astype("i4").astype(np.dtype(dtype).descr[0][1])
        whole = np.zeros((2, 8, 12, 16), dtype)
        (whole if whole.dtype.names is None else whole["a"])[...] = found.reshape(whole.shape)
        u = g.scatter(whole if comm.rank == 0 else None)
        for root in range(comm.size):
            again = g.gather(u, root)
            assert (again is None) == (comm.rank != root)
            assert agree(again is None or again.tobytes() == whole.tobytes(), comm)


def test_field_on_the_host_is_refused(comm: MPI.Intracomm) -> None:
    with (
        halox.Grid((8, 8 * comm.size), comm=comm, device="gpu") as grid,
        pytest.raises(halox.errors.DeviceError),
    ):
        grid.exchange(np.zeros(grid.padded_shape))


def test_plans_of_many_fields_die_with_them(comm: MPI.Intracomm) -> None:
    with halox.Grid((8, 8, 8 * comm.size), periodic=True, comm=comm, device="gpu") as grid:
        for step in range(50):
            u = grid.zeros("f8")
            grid.interior(u)[...] = numbered(grid, step)
            grid.exchange(u)
            assert agree(halo_is_right(u, grid, step), comm)
        grid._plans.cache.sweep()
        assert len(grid._plans.cache) <= 1
