"""Fields of one parity on GPUs, compared with the references of the CPU tests."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import PathError
from tests.gpu.ranks.paths import WAYS, along
from tests.mpi.checkerboards import Case, random_case
from tests.mpi.conftest import agree
from tests.mpi.reference import (
    NUMERIC,
    check_accumulate_as_on_cpu,
    check_exchanges,
    make_fields,
    small_integers,
)
from tests.mpi.test_checkerboards import SEED
from tests.mpi.ways import GPU_DTYPES, Way
from tests.support import require

require("gpu")

pytestmark = pytest.mark.gpu


def check(case: Case, grid: halox.Grid, comm: MPI.Intracomm, way: Way | None = None) -> bool:
    """Exchange the fields of a random checkerboard, and compare all cells and the number of received bytes.

    Returns whether any message used ``way``.
    """
    wanted = case.expected(grid.coords)
    fields = make_fields(grid, case, [w.before for w in wanted])
    try:
        plan = grid.plan(*fields)
    except PathError:
        assert way is not None
        return False  # all ranks raise; otherwise the next collective call would hang
    rows = plan.explain().rows
    received = sum(row.nbytes for row in rows if row.direction == "receive")
    assert agree(received == sum(w.moved_bytes for w in wanted), comm), (SEED, case, received)
    check_exchanges(grid, fields, wanted, (SEED, case), plan, rounds=1)
    check_exchanges(grid, fields, wanted, (SEED, case), plan if way else None, rounds=2)
    return way is not None and way.check_taken(plan, comm)


@pytest.mark.parametrize("number", range(24))
def test_random_checkerboard(number: int, comm: MPI.Intracomm) -> None:
    rng = np.random.default_rng([SEED, comm.size, number])
    case = random_case(rng, comm.size, GPU_DTYPES)
    with case.grid(comm, "gpu") as grid:
        check(case, grid, comm)


@pytest.mark.ranks(2, 4)
@along(WAYS)
def test_on_each_path(way: Way, comm: MPI.Intracomm) -> None:
    count, ran = 8, 0
    for number in range(count):
        rng = np.random.default_rng([SEED, 3, comm.size, number])
        case = random_case(rng, comm.size, way.dtypes)
        for f in case.fields:
            f.mine = f.mine and not way.is_straight
        with case.grid(comm, "gpu", path=way.path) as grid:
            ran += check(case, grid, comm, way)
    assert ran >= count // 4, f"{ran} of {count} grids had messages that can go this way"


@pytest.mark.parametrize("number", range(15))
def test_accumulate_equals_that_on_the_cpu(number: int, comm: MPI.Intracomm) -> None:
    rng = np.random.default_rng([SEED, 5, comm.size, number])
    case = random_case(rng, comm.size, NUMERIC)
    mine = np.random.default_rng([SEED, number, comm.rank])
    with case.grid(comm, "gpu") as gpu, case.grid(comm) as cpu:
        check_accumulate_as_on_cpu(gpu, cpu, case, mine)


@pytest.mark.parametrize("number", range(8))
def test_reductions_and_gather_equal_those_on_the_cpu(number: int, comm: MPI.Intracomm) -> None:
    rng = np.random.default_rng([SEED, 9, comm.size, number])
    case = random_case(rng, comm.size, ["f8", "i8"])
    mine = np.random.default_rng([SEED, number, comm.rank])
    with case.grid(comm, "gpu") as gpu, case.grid(comm) as cpu:
        start = small_integers(mine, case.expected(gpu.coords))
        for u, v in zip(make_fields(gpu, case, start), make_fields(cpu, case, start), strict=True):
            for name in ("sum", "min", "max", "norm"):
                found, right = getattr(gpu, name)(u), getattr(cpu, name)(v)
                assert agree(float(found) == float(right), comm), (SEED, case, name)
            assert agree(float(gpu.dot(u, u)) == float(cpu.dot(v, v)), comm), (SEED, case)
            parity = gpu.layout(u).spec.parity
            index = zip(gpu.indices(parity=parity), cpu.indices(parity=parity), strict=True)
            assert agree(all(np.array_equal(x.get(), y) for x, y in index), comm)
            whole, other = gpu.gather(u), cpu.gather(v)
            assert agree(whole is None or np.array_equal(whole, other), comm), (SEED, case)
