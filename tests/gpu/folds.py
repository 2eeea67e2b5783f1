"""Grids with random connections on a GPU, against the serial reference."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

import halox
from tests.adjoint import accumulates_the_adjoint
from tests.folds import process_grids, random_case
from tests.mpi.conftest import agree
from tests.mpi.test_cubed_sphere import UNTOUCHED, block, sources
from tests.support import require

require("gpu")

import cupy  # noqa: E402


def check_halos(number: int, comm: MPI.Intracomm) -> None:
    """Exchange two fields of a random case together, also between start and finish, on some process grid."""
    rng = np.random.default_rng([20261126, comm.size, number])
    case = random_case(rng, corners=number % 5 > 0)
    grids = process_grids(comm.size, len(case.shape))
    with case.grid(comm, grids[number % len(grids)], "gpu") as grid:
        fields = case.field(grid), case.field(grid)
        layout, first = grid.layout(fields[0]), (slice(None),) * len(case.before)
        plan = grid.plan(*fields)
        for call in range(2):
            wholes = []
            for u in fields:
                wholes.append(rng.integers(-9, 10, layout.global_shape).astype(case.dtype))
                u[layout.interior] = cupy.asarray(wholes[-1][first + layout.owned])
            if call:
                plan.start()
                plan.finish()
            else:
                grid.exchange(*fields)
            for u, whole in zip(fields, wholes, strict=True):
                expected = case.expected(layout, whole)
                assert agree(np.array_equal(u.get(), expected), comm), (case, call)


def check_adjoint(number: int, comm: MPI.Intracomm) -> None:
    case = random_case(np.random.default_rng([1, comm.size, number]))
    grids = process_grids(comm.size, len(case.shape))
    mine = np.random.default_rng([2, number, comm.rank])
    with case.grid(comm, grids[number % len(grids)], "gpu") as grid:
        x, y = case.field(grid), case.field(grid)
        assert accumulates_the_adjoint(grid, x, y, mine, comm), case


def check_cube(n: int, halo: int, comm: MPI.Intracomm) -> None:
    """Exchange a field on a cubed sphere; halos by geometry."""
    source: Any = sources(n, halo)
    with halox.CubedSphere(n, halo, comm=comm, device="gpu") as sphere:
        u = sphere.full(UNTOUCHED)
        whole = np.random.default_rng(1).random((6, n, n))
        sphere.interior(u)[...] = cupy.asarray(whole[sphere.owned])
        sphere.exchange(u)
        expected = block(sphere, u, np.where(source < 0, UNTOUCHED, whole.ravel()[source]))
        assert agree(np.array_equal(u.get(), expected), comm)
