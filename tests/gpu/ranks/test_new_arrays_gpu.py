"""Fields allocated anew in each step, on several ranks: one plan serves all fields of a layout, on each path."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from tests.gpu.ranks.paths import along
from tests.mpi.conftest import agree
from tests.mpi.ways import Way
from tests.support import require

require("gpu")

import cupy  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 3, 4)]

MOVING = [
    Way("peer/ll"),
    Way("peer/staging"),
    Way("nccl"),
    Way("ipc"),
    Way("staged"),
    Way("staged", node="rank"),
    Way("cuda_aware"),
]


def array_at(grid: halox.Grid, dtype: str, offset: int = 0) -> Any:
    """A new array, ``offset`` bytes after a multiple of 512."""
    shape = grid.padded_shape
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = cupy.zeros(nbytes + offset, "u1")
    return memory[offset:].view(dtype).reshape(shape)


def fill(grid: halox.Grid, arrays: Sequence[Any], seed: int) -> list[np.ndarray]:
    """Fill the interiors, and return the expected padded arrays, cut by NumPy from the whole grid."""
    wanted = []
    (low, high), rows = grid.halo[0], grid.owned[0]
    for number, u in enumerate(arrays):
        rng = np.random.default_rng((seed, number))
        whole = rng.integers(1, 100, grid.grid_shape).astype(u.dtype)
        grid.interior(u)[...] = cupy.asarray(whole[grid.owned])
        mine = np.take(whole, range(rows.start - low, rows.stop + high), axis=0, mode="wrap")
        wanted.append(np.pad(mine, ((0, 0), *grid.halo[1:]), mode="wrap"))
    return wanted


def check(grid: halox.Grid, arrays: Sequence[Any], seed: int, comm: MPI.Intracomm) -> None:
    wanted = fill(grid, arrays, seed)
    grid.exchange(*arrays)
    right = all(np.array_equal(u.get(), one) for u, one in zip(arrays, wanted, strict=True))
    assert agree(right, comm), seed


@pytest.mark.parametrize("dtype", ["f8", "f4", "c16"])
@along(MOVING)
def test_one_plan_for_new_arrays(way: Way, dtype: str, comm: MPI.Intracomm) -> None:
    """Includes arrays of other alignment, which may differ between ranks."""
    with way.box(comm, n=14) as grid:
        kept = []
        for step, offset in enumerate((0, 0, 64, 16, 8, 8 * (comm.rank % 2), 0, 24, 4, 4)):
            offset -= offset % np.dtype(dtype).itemsize  # CuPy's kernels need aligned elements
            u = array_at(grid, dtype, offset)
            kept.append(u if step % 3 else None)  # reuse of freed memory varies the addresses
            check(grid, [u], step, comm)
            assert grid.domain.plans_made == 1
        for step, u in enumerate(one for one in kept if one is not None):
            check(grid, [u], 100 + step, comm)
        assert grid.domain.plans_made == 1
        assert way.check_taken(SimpleNamespace(explain=lambda: grid.explain(u)), comm)


@along(MOVING)
def test_large_arrays(way: Way, comm: MPI.Intracomm) -> None:
    """Large messages: tables in device memory, LL128-like packets, fragments."""
    with way.grid(
        (64 * comm.size, 150, 130), comm, periodic=True, proc_shape=(comm.size, 1, 1)
    ) as grid:
        for step, offset in enumerate((0, 0, 8, 8 * (comm.rank % 2), 512)):
            check(grid, [array_at(grid, "f8", offset)], step, comm)
        assert grid.domain.plans_made == 1


@along(MOVING)
def test_several_fields(way: Way, comm: MPI.Intracomm) -> None:
    dtypes = ("f8", "i4", "c16")
    with way.box(comm) as grid:
        for step in range(6):
            itemsizes = [np.dtype(dtype).itemsize if step == 3 else 0 for dtype in dtypes]
            arrays = [array_at(grid, *one) for one in zip(dtypes, itemsizes, strict=True)]
            check(grid, arrays, step, comm)
        check(grid, arrays, 7, comm)
        assert grid.domain.plans_made == 1


@along(MOVING)
def test_accumulation(way: Way, comm: MPI.Intracomm) -> None:
    with way.box(comm) as grid:
        for offset in (0, 0, 8, 256):
            u = array_at(grid, "f8", offset)
            u[...] = 1
            grid.accumulate(u)
            ends = [(np.arange(n) == 0) * 1 + (np.arange(n) == n - 1) for n in grid.rank_shape]
            i, j, k = np.ix_(*(1 + one for one in ends))
            right = np.array_equal(grid.interior(u).get(), i * j * k)
            assert agree(right and float(u.sum()) == (i * j * k).sum(), comm), offset
        assert grid.domain.plans_made == 1


@along([Way("peer/ll"), Way("peer/staging")])
def test_a_capture_keeps_its_array(way: Way, comm: MPI.Intracomm) -> None:
    """A captured graph exchanges its array even after the plan has served other arrays."""
    with way.box(comm) as grid:
        first, other, mine = (array_at(grid, "f8") for _ in range(3))
        for u in (first, other):
            check(grid, [u], 1, comm)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            check(grid, [mine], 2, comm)
            stream.begin_capture()
            grid.exchange(mine)
            graph = stream.end_capture()
            for step in range(5):
                for u in (other, array_at(grid, "f8")):
                    check(grid, [u], step, comm)
                wanted = fill(grid, [mine], 10 + step)
                graph.launch(stream)
                stream.synchronize()
                assert agree(np.array_equal(mine.get(), wanted[0]), comm)
        assert grid.domain.plans_made == 1
