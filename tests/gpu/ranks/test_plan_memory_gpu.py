"""Plans and grids release the memory that they take; an array at the address of an earlier one is not mistaken for it.

HALOX_PLANS=10000 makes as many plans on each path as the figure asks for; by default there are fewer.
"""

from __future__ import annotations

import gc
import os

import pytest
from mpi4py import MPI

import halox
from tests.gpu.ranks.paths import WAYS, along
from tests.mpi.conftest import agree
from tests.mpi.ways import Way, fill, wrong_cells
from tests.support import require

require("gpu")

import cupy  # noqa: E402

from tests.gpu.guarded import stall  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4)]

PLANS = int(os.environ.get("HALOX_PLANS", "400"))
WARM_UP = 200
MIB = 1 << 20


def device_bytes(comm: MPI.Intracomm) -> int:
    """Bytes of the GPU that are in use; all ranks look at a time when none allocates."""
    cupy.cuda.runtime.deviceSynchronize()
    comm.Barrier()
    free, total = cupy.cuda.runtime.memGetInfo()
    comm.Barrier()
    return int(total - free)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def taken(comm: MPI.Intracomm) -> tuple[int, int, int]:
    gc.collect()
    return device_bytes(comm), descriptors(), resident_bytes()


def check_growth(before: tuple[int, int, int], comm: MPI.Intracomm, made: int) -> None:
    device, files, resident = (b - a for a, b in zip(before, taken(comm), strict=True))
    everywhere = comm.allgather((device, files, resident))
    # In 10,000 plans a page of 4 KiB each is found; what allocators keep for themselves is not taken for one.
    assert all(grown <= 64 * MIB for grown, _, _ in everywhere), everywhere
    assert all(grown <= 2 for _, grown, _ in everywhere), everywhere
    assert all(grown <= 8 * MIB + 4000 * made for _, _, grown in everywhere), everywhere


@along(WAYS)
def test_many_plans(way: Way, comm: MPI.Intracomm) -> None:
    """Closed, or dropped; each is used once. Of two faces, since the making of a message takes time and no memory."""
    with way.box(comm, halo=(1, 0, 0)) as grid:
        u = grid.zeros("f8")

        def make(count: int, first: int) -> None:
            for number in range(first, first + count):
                plan = grid.plan(u)
                fill(grid, u, number)
                plan()
                if number % 2:
                    plan.close()
                del plan

        make(WARM_UP, 0)
        before = taken(comm)
        make(PLANS, WARM_UP)
        assert agree(int(wrong_cells(grid, u, WARM_UP + PLANS - 1)) == 0, comm)
        check_growth(before, comm, PLANS)


@along(WAYS)
def test_plans_of_fields_that_are_gone(way: Way, comm: MPI.Intracomm) -> None:
    """Fields come to lie where others were, of other sizes and in fresh memory: their data go where they are now.

    Small ones share segments; large ones have a segment each, which the driver may give out again at the same address.
    """
    pool = cupy.get_default_memory_pool()
    places: dict[int, int] = {}
    wrong = 0
    with way.box(comm, n=16) as small, way.box(comm, n=128) as large:
        for number in range(40):
            grid = large if number % 4 == 3 else small
            own = number % 8 >= 4 and not way.is_straight
            dtype = ("f8", "c16", "f4")[number % 3]
            u = cupy.empty(grid.padded_shape, dtype) if own else grid.empty(dtype)
            places[int(u.data.ptr)] = places.get(int(u.data.ptr), 0) + 1
            for step in range(2):
                fill(grid, u, number + step)
                grid.exchange(u)
                wrong += int(wrong_cells(grid, u, number + step))
            del u
            if number % 5 == 4:
                gc.collect()
                pool.free_all_blocks()  # to the driver, which hands it out again
        assert max(places.values()) > 1, "no address was used twice"
        assert agree(wrong == 0, comm), wrong


@along(WAYS)
def test_fields_that_outlive_their_plans(way: Way, comm: MPI.Intracomm) -> None:
    """A plan closed by one rank at another time than by the other, and what the others' launches still use."""
    with way.box(comm) as grid:
        u, v = grid.zeros("f8"), grid.zeros("f8")
        wrong = cupy.zeros((), "i8")
        for step in range(60):
            plan, other = grid.plan(u), grid.plan(v)
            fill(grid, u, step)
            fill(grid, v, step + 9)
            plan()
            if comm.rank == step % comm.size:
                plan.close()  # while the peers may not have begun
            other()
            wrong += wrong_cells(grid, u, step) + wrong_cells(grid, v, step + 9)
            other.close()
        assert agree(int(wrong) == 0, comm), int(wrong)


@along(WAYS)
def test_memory_of_a_closed_plan_is_its_own_ranks(way: Way, comm: MPI.Intracomm) -> None:
    """The first rank, to which nothing is sent, closes its plan before the others' kernels have begun.

    What it allocates next comes to lie where the plan was, and no late word of a peer may be written there.
    """
    found = []
    halo = ((1, 0), (0, 0), (0, 0))
    for _ in range(4):
        with way.grid((8 * comm.size, 8, 8), comm, halo=halo, proc_shape=(comm.size, 1, 1)) as grid:
            u = grid.full(float(comm.rank), "f8")
            plan = grid.plan(u)
            plan()
            cupy.cuda.runtime.deviceSynchronize()
            comm.Barrier()
            if comm.rank:
                for _ in range(4):
                    stall()
            plan()
            if comm.rank == 0:
                plan.close()
            fields = [grid.full(7.0, "f8") for _ in range(8)]
            cupy.cuda.runtime.deviceSynchronize()
            comm.Barrier()  # all kernels have ended
            found.append(all(bool((v == 7).all()) for v in fields))
            if comm.rank:
                found.append(bool((u[0] == comm.rank - 1).all()))
    assert agree(all(found), comm), found


@along(WAYS)
def test_grids_opened_again(way: Way, comm: MPI.Intracomm) -> None:
    def live(number: int) -> halox.Grid:
        with way.box(comm) as grid:
            u, plans = grid.zeros("f8"), []
            for step in range(3):
                plans.append(grid.plan(u))
                fill(grid, u, number + step)
                plans[-1]()
                grid.exchange(u)
                assert agree(int(wrong_cells(grid, u, number + step)) == 0, comm)
        return grid

    for number in range(4):
        live(number)
    before = taken(comm)
    for number in range(20):
        closed = live(number)
    with pytest.raises(halox.errors.ClosedError):
        closed.zeros("f8")
    check_growth(before, comm, 1000)
