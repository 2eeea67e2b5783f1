"""Fields of one parity on GPUs, compared with the references of the CPU tests."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import PathError
from tests.gpu.ranks.paths import WAYS, along
from tests.mpi.checkerboards import Case, expected, random_case
from tests.mpi.conftest import agree
from tests.mpi.reference import same_bytes
from tests.mpi.test_checkerboards import SEED, make_fields, make_grid
from tests.mpi.ways import GPU_DTYPES, Way
from tests.support import require

require("gpu")

import cupy  # noqa: E402

pytestmark = pytest.mark.gpu

NUMERIC = ["f8", "f4", "c16", "i4", "i8"]


def check(case: Case, grid: halox.Grid, comm: MPI.Intracomm, way: Way | None = None) -> bool:
    """Exchange the fields of a random checkerboard, and compare all cells and the number of received bytes.

    Returns whether any message used ``way``.
    """
    wanted = [expected(case, f, grid.coords, k) for k, f in enumerate(case.fields)]
    fields = make_fields(grid, case, [w.before for w in wanted])
    try:
        plan = grid.plan(*fields)
    except PathError:
        assert way is not None
        return False  # all ranks raise; otherwise the next collective call would hang
    rows = plan.explain().rows
    received = sum(row.nbytes for row in rows if row.direction == "receive")
    assert agree(received == sum(w.moved_bytes for w in wanted), comm), (SEED, case, received)
    for turn in range(3):
        for u, w in zip(fields, wanted, strict=True):
            u[...] = cupy.asarray(w.before)
        comm.Barrier()
        if turn and way is None:
            grid.exchange(*fields)
        else:
            plan()
        right = [same_bytes(u.get(), w.after) for u, w in zip(fields, wanted, strict=True)]
        assert agree(all(right), comm), (SEED, case, right)
    return way is not None and way.check_taken(plan, comm)


@pytest.mark.parametrize("number", range(24))
def test_random_checkerboard(number: int, comm: MPI.Intracomm) -> None:
    rng = np.random.default_rng([SEED, comm.size, number])
    case = random_case(rng, comm.size, GPU_DTYPES)
    with make_grid(case, comm, device="gpu") as grid:
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
        with make_grid(case, comm, device="gpu", path=way.path) as grid:
            ran += check(case, grid, comm, way)
    assert ran >= count // 4, f"{ran} of {count} grids had messages that can go this way"


@pytest.mark.parametrize("number", range(15))
def test_accumulate_equals_that_on_the_cpu(number: int, comm: MPI.Intracomm) -> None:
    rng = np.random.default_rng([SEED, 5, comm.size, number])
    case = random_case(rng, comm.size, NUMERIC)
    mine = np.random.default_rng([SEED, number, comm.rank])
    with make_grid(case, comm, device="gpu") as gpu, make_grid(case, comm) as cpu:
        wanted = [expected(case, f, gpu.coords, k) for k, f in enumerate(case.fields)]
        start = [mine.integers(-9, 10, w.before.shape).astype(w.before.dtype) for w in wanted]
        a, b = make_fields(gpu, case, start), make_fields(cpu, case, start)
        gpu.accumulate(*a)
        cpu.accumulate(*b)
        right = [bool(np.array_equal(x.get(), y)) for x, y in zip(a, b, strict=True)]
        assert agree(all(right), comm), (SEED, case, right)


@pytest.mark.parametrize("number", range(8))
def test_reductions_and_gather_equal_those_on_the_cpu(number: int, comm: MPI.Intracomm) -> None:
    rng = np.random.default_rng([SEED, 9, comm.size, number])
    case = random_case(rng, comm.size, ["f8", "i8"])
    mine = np.random.default_rng([SEED, number, comm.rank])
    with make_grid(case, comm, device="gpu") as gpu, make_grid(case, comm) as cpu:
        wanted = [expected(case, f, gpu.coords, k) for k, f in enumerate(case.fields)]
        start = [mine.integers(-9, 10, w.before.shape).astype(w.before.dtype) for w in wanted]
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
