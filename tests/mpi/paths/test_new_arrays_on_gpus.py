"""New arrays on simulated GPUs: one plan serves all arrays of a layout, on each path between GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.runtime.gpu.pools import Pool
from tests.fakes.cpu_kernels import aligned
from tests.fakes.cpu_peer import Launch, few_kernels, multiprocessor
from tests.fakes.fake_cupy import Array, Machine
from tests.fakes.host_launches import host_launches
from tests.mpi.conftest import agree
from tests.support import require

require("cxx")

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.usually(3)]

SHAPE, HALO = (6, 5, 4), 1
PATHS = ["staged/shared", "staged/mpi", "ipc", "peer/ll", "peer/staging"]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def running(rank: int) -> Any:
    """Take the place of PreparedLaunch: the peer kernel runs at once, and waits for the kernels of other processes."""

    def prepared(
        defines: Any, blocks: int, threads: int, arguments: Any, *, device: int, dependent: bool
    ) -> Any:
        made = few_kernels(defines, blocks, threads, arguments)

        def launch(pointer: int) -> None:
            parameters = []
            for argument in made.args:
                memory = aligned(ctypes.sizeof(argument))
                memory[:] = np.frombuffer(argument, np.uint8)
                parameters.append(memory)
            order = np.arange(made.blocks, dtype=np.uint32)
            multiprocessor(made.defines, rank, 0).run(
                ctypes.c_uint(made.blocks),
                ctypes.c_uint(made.threads),
                ctypes.c_int(0),
                ctypes.c_void_p(order.ctypes.data),
                ctypes.c_uint(order.size),
                *(ctypes.c_void_p(memory.ctypes.data) for memory in parameters),
            )

        found: Any = Launch(made.defines, made.blocks, made.threads, made.args)
        found.launch = launch
        return found

    return prepared


@pytest.fixture
def grid(path: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[halox.Grid]:
    if path == "staged/mpi":
        monkeypatch.setenv("HALOX_NODE", f"node of rank {comm.rank}")
    machine = Machine(comm.rank, shared=not path.startswith("peer") and comm.size > 1)
    machine.install(monkeypatch)
    for name, fake in {
        "paths.peer.negotiation.PreparedLaunch": running(comm.rank),
        "paths.peer.negotiation.kernel": lambda name, function, device, defines: defines,
        "paths.peer.negotiation.multiprocessors": lambda device: 1,
        "runtime.gpu.pools.SIDE_STREAMS": Pool(lambda device: machine.stream),
    }.items():
        monkeypatch.setattr(f"halox.{name}", fake)
    options: dict[str, Any] = {"proc_shape": (comm.size, 1, 1), "device": "gpu", "path": path}
    with (
        host_launches(),
        halox.Grid(SHAPE, halo=HALO, periodic=True, comm=comm.Dup(), **options) as made,
    ):
        yield made


def array_at(shape: tuple[int, ...], dtype: str, offset: int) -> Array:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return Array(aligned(nbytes, offset).view(dtype).reshape(shape))


def check(grid: halox.Grid, arrays: list[Array], seed: int, comm: MPI.Intracomm) -> None:
    """Exchange arrays, and compare them with blocks of whole NumPy arrays."""
    wanted = []
    rows = range(grid.owned[0].start - HALO, grid.owned[0].stop + HALO)
    for number, u in enumerate(arrays):
        whole = np.random.default_rng((seed, number)).integers(1, 200, SHAPE).astype(u.dtype)
        u.values[...] = 0
        u.values[1:-1, 1:-1, 1:-1] = whole[grid.owned]
        padded = np.pad(
            np.take(whole, rows, axis=0, mode="wrap"), ((0, 0), (1, 1), (1, 1)), mode="wrap"
        )
        wanted.append(padded)
    grid.exchange(*arrays)
    right = all(np.array_equal(u.values, want) for u, want in zip(arrays, wanted, strict=True))
    assert agree(right, comm), seed


def test_one_plan_for_new_arrays(grid: halox.Grid, path: str, comm: MPI.Intracomm) -> None:
    """Also for arrays of different alignment, on one rank and between ranks."""
    for step, offset in enumerate((0, 16, 8 * (comm.rank % 2), 24, 8)):
        check(grid, [array_at(grid.padded_shape, "f8", offset)], step, comm)
        assert grid.domain.plans_made == 1
    u = array_at(grid.padded_shape, "f8", 0)
    check(grid, [u], 20, comm)
    if comm.size > 1:
        used = {row.path for row in grid.explain(u).rows if row.peer != comm.rank}
        assert used == {path.partition("/")[0]}


def test_several_fields_move_each_by_itself(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    dtypes = ("f8", "i4", "c16")
    for step in range(4):
        offsets = np.random.default_rng((step, comm.rank)).choice([0, 16, 32], 3)
        arrays = [
            array_at(grid.padded_shape, dtype, int(at) + np.dtype(dtype).itemsize * (step == 2))
            for dtype, at in zip(dtypes, offsets, strict=True)
        ]
        check(grid, arrays, step, comm)
    assert grid.domain.plans_made == 1
    check(grid, arrays[:2], 7, comm)
    assert grid.domain.plans_made == 2


def test_accumulation_of_new_arrays(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    """Each owned cell receives the halo values of other ranks, and of the opposite ends of the grid."""
    inner = grid.rank_shape
    for offset in (0, 8, 16, 0):
        u = array_at(grid.padded_shape, "f8", offset)
        u.values[...] = 1
        grid.accumulate(u)
        ends = [(np.arange(n) == 0).astype(int) + (np.arange(n) == n - 1) for n in inner]
        i, j, k = np.ix_(*(1 + one for one in ends))
        right = np.array_equal(u.values[1:-1, 1:-1, 1:-1], i * j * k)
        assert agree(right and u.values.sum() == (i * j * k).sum(), comm)
    assert grid.domain.plans_made == 1


# Other paths do not tell the grid's fields from arrays of the user.
mapping = pytest.mark.parametrize("path", ["ipc", "peer/staging"], indirect=True)


@mapping
def test_a_field_of_the_grid_has_a_plan_of_its_own(grid: halox.Grid, comm: MPI.Intracomm) -> None:
    own: Any = grid.zeros()
    for step in range(2):
        check(grid, [own], step, comm)
        check(grid, [array_at(grid.padded_shape, "f8", 0)], step + 9, comm)
    assert grid.domain.plans_made == 2


@mapping
@pytest.mark.ranks(2, 3)
def test_one_rank_has_its_own_field_and_others_new_arrays(
    grid: halox.Grid, comm: MPI.Intracomm
) -> None:
    """All ranks then use a plan of these arrays only."""
    own: Any = grid.zeros()
    mine = own if comm.rank == 0 else array_at(grid.padded_shape, "f8", 0)
    for step in range(3):
        check(grid, [mine], step, comm)
    assert grid.domain.plans_made == 1
