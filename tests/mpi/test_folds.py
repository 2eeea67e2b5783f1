"""Folds, poles and strips: exchanges and accumulations equal a serial reference on every process grid."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from tests.folds import Case, process_grids, random_case
from tests.mpi.conftest import agree
from tests.support import trials

pytestmark = pytest.mark.geometry

SEED = int(os.environ.get("HALOX_SEED", "20261126"))
CASES = int(os.environ.get("HALOX_GRIDS", trials(24)))


def whole_field(case: Case, grid: halox.Grid, u: Any, rng: np.random.Generator) -> Any:
    """Return random owned values of the whole field, the same on all ranks, and set this rank's cells."""
    layout = grid.layout(u)
    whole = rng.integers(-9, 10, layout.global_shape).astype(case.dtype)
    grid.interior(u)[...] = whole[(slice(None),) * len(case.before) + layout.owned]
    return whole


@pytest.mark.parametrize("number", range(CASES))
def test_halos_equal_the_serial_reference(
    number: int, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    if number % 3 == 1:  # read in place, as on large grids
        monkeypatch.setattr("halox.paths.host.DIRECT_BYTES", 1)
    if number % 3 == 2:
        monkeypatch.setenv("HALOX_NODE", "rank")
    rng = np.random.default_rng([SEED, comm.size, number])
    case = random_case(rng, corners=number % 5 > 0)
    for proc_shape in process_grids(comm.size, len(case.shape)):
        if any(p > n for p, n in zip(proc_shape, case.shape, strict=True)):
            continue
        with case.grid(comm, proc_shape) as grid:
            u, v = case.field(grid), case.field(grid)
            plan = grid.plan(u, v)
            for call in range(2):
                wholes = [whole_field(case, grid, field, rng) for field in (u, v)]
                if call:
                    plan.start()
                    plan.finish()
                else:
                    grid.exchange(u, v)
                for field, whole in zip((u, v), wholes, strict=True):
                    expected = case.expected(grid.layout(u), whole)
                    assert agree(np.array_equal(field, expected), comm), (SEED, case, proc_shape)


@pytest.mark.parametrize("number", range(CASES // 2))
def test_accumulate_is_the_adjoint(number: int, comm: MPI.Intracomm) -> None:
    """<E x, y> = <x, E' y> over all ranks, exactly, since all values are small integers."""
    rng = np.random.default_rng([SEED, 1, comm.size, number])
    case = random_case(rng)
    proc_shapes = [
        one
        for one in process_grids(comm.size, len(case.shape))
        if all(p <= n for p, n in zip(one, case.shape, strict=True))
    ]
    mine = np.random.default_rng([SEED, 2, number, comm.rank])
    with case.grid(comm, proc_shapes[number % len(proc_shapes)]) as grid:
        x, y = case.field(grid), case.field(grid)
        x[...] = 0
        before = mine.integers(-9, 10, grid.interior(x).shape).astype(case.dtype)
        grid.interior(x)[...] = before
        y[...] = mine.integers(-9, 10, y.shape).astype(case.dtype)
        grid.exchange(x)
        left = comm.allreduce(complex(np.vdot(x, y)))
        grid.accumulate(y)
        right = comm.allreduce(complex(np.vdot(before, grid.interior(y))))
        assert left == right, (SEED, case)
