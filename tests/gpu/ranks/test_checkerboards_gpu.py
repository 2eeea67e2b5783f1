"""Fields of one parity on GPUs, compared with the references of the CPU tests."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

from halox.errors import PathError
from tests.gpu.ranks.paths import WAYS, along
from tests.mpi.conftest import agree
from tests.mpi.ways import GPU_DTYPES, Way
from tests.oracle import (
    NUMERIC,
    Case,
    check_accumulate_as_on_cpu,
    check_exchanges,
    exchange_all,
    small_integers,
)
from tests.strategies import checkerboards, on_ranks, sample
from tests.support import require

require("gpu")

pytestmark = pytest.mark.gpu


@on_ranks(partial(checkerboards, dtypes=GPU_DTYPES), 24)
def test_random_checkerboard(case: Case, comm: MPI.Intracomm) -> None:
    check_exchanges(case, comm, "gpu")


@pytest.mark.ranks(2, 4)
@along(WAYS)
def test_on_each_path(way: Way, comm: MPI.Intracomm) -> None:
    count, ran = 8, 0
    for case in sample(checkerboards(comm.size, way.dtypes), count, comm):
        case.way = "packed"
        for f in case.fields:
            f.mine = f.mine and not way.is_straight
        with case.grid(comm, "gpu", path=way.path) as grid:
            fields = case.make(grid)
            try:
                plan = grid.plan(*fields)
            except PathError:
                continue  # all ranks raise; otherwise the next collective call would hang
            is_right = exchange_all(case, grid, [(fields, lambda *_, plan=plan: plan())] * 3)
            assert agree(is_right, comm), case
            ran += way.check_taken(plan, comm)
    assert ran >= count // 4, f"{ran} of {count} grids had messages that can go this way"


@on_ranks(partial(checkerboards, dtypes=NUMERIC), 15)
def test_accumulate_equals_that_on_the_cpu(case: Case, comm: MPI.Intracomm) -> None:
    check_accumulate_as_on_cpu(case, comm)


@on_ranks(partial(checkerboards, dtypes=["f8", "i8"]), 8)
def test_reductions_and_gather_equal_those_on_the_cpu(case: Case, comm: MPI.Intracomm) -> None:
    right = []
    with case.grid(comm, "gpu") as gpu, case.grid(comm) as cpu:
        start = small_integers(case, gpu, 9)
        for u, v in zip(case.make(gpu, start), case.make(cpu, start), strict=True):
            for name in ("sum", "min", "max", "norm"):
                found, wanted = getattr(gpu, name)(u), getattr(cpu, name)(v)
                right.append(float(found) == float(wanted))
            right.append(float(gpu.dot(u, u)) == float(cpu.dot(v, v)))
            parity = gpu.layout(u).spec.parity
            index = zip(gpu.indices(parity=parity), cpu.indices(parity=parity), strict=True)
            right += [np.array_equal(x.get(), y) for x, y in index]
            whole, other = gpu.gather(u), cpu.gather(v)
            right.append(whole is None or np.array_equal(whole, other))
    assert all(right), right
