"""Plans and grids release their memory, and a new array at the address of a freed array is not confused with it.

HALOX_PLANS is the number of plans on each path. The target is 10,000 plans; the default is smaller to save time.
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
    """Used bytes of the GPU, read while no rank allocates."""
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
    # With 10,000 plans these limits detect a leak of a 4 KiB page per plan, and tolerate memory that allocators cache.
    assert all(grown <= 64 * MIB for grown, _, _ in everywhere), everywhere
    assert all(grown <= 2 for _, grown, _ in everywhere), everywhere
    assert all(grown <= 8 * MIB + 4000 * made for _, _, grown in everywhere), everywhere


@along(WAYS)
def test_many_plans(way: Way, comm: MPI.Intracomm) -> None:
    """Each plan is called once, and closed or dropped. Two faces suffice, since further messages only take time."""
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
    """New fields at addresses of freed fields, with other sizes and dtypes, exchange correctly.

    Small fields share allocations. Each large field has its own allocation, and the driver may reuse the address.
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
                pool.free_all_blocks()  # return the memory to the driver, which may reuse its addresses
        assert max(places.values()) > 1, "no address was used twice"
        assert agree(wrong == 0, comm), wrong


@along(WAYS)
def test_fields_that_outlive_their_plans(way: Way, comm: MPI.Intracomm) -> None:
    """One rank closes a plan earlier than its peers, whose launches may still use the plan's memory."""
    with way.box(comm) as grid:
        u, v = grid.zeros("f8"), grid.zeros("f8")
        wrong = cupy.zeros((), "i8")
        for step in range(60):
            plan, other = grid.plan(u), grid.plan(v)
            fill(grid, u, step)
            fill(grid, v, step + 9)
            plan()
            if comm.rank == step % comm.size:
                plan.close()  # the peers may not have started their exchange
            other()
            wrong += wrong_cells(grid, u, step) + wrong_cells(grid, v, step + 9)
            other.close()
        assert agree(int(wrong) == 0, comm), int(wrong)


@along(WAYS)
def test_memory_of_a_closed_plan_is_its_own_ranks(way: Way, comm: MPI.Intracomm) -> None:
    """Rank 0, which only sends, closes its plan before the kernels of its peers have started.

    Its next arrays may reuse the memory of the plan, and a late write of a peer must not reach them.
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
            comm.Barrier()  # all kernels have finished
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
