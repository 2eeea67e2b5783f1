"""Fields with random boundaries on a GPU, against `numpy.pad` of the whole field."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from tests.adjoint import accumulates_the_adjoint
from tests.boundaries import UNTOUCHED, block, random_case, random_numbers
from tests.mpi.conftest import agree
from tests.support import require

require("gpu")

import cupy  # noqa: E402


def check_halos(number: int, comm: MPI.Intracomm) -> None:
    """Exchange a random case: a field, an array of its own, and the field between start and finish."""
    rng = np.random.default_rng([20261124, comm.size, number])
    case = random_case(rng, comm.size, wide=number % 3 == 2)
    with case.grid(comm, "gpu") as grid:
        u = case.field(grid)
        own = cupy.full(u.shape, UNTOUCHED, u.dtype)
        layout = grid.layout(u)
        staggered = [axis for axis, is_so in enumerate(case.staggered) if is_so]
        grid.declare(
            own,
            components=case.before,
            components_after=case.after,
            staggered=staggered,
            halo=case.halo,
            boundary=case.sides,
        )
        plan = grid.plan(u)
        for call in range(4):
            whole = random_numbers(rng, layout.global_shape, case.dtype)
            field = (u, own, u, own)[call]
            owned = (slice(None),) * len(case.before) + layout.owned
            field[layout.interior] = cupy.asarray(whole[owned])
            if call == 2:
                plan.start()
                plan.finish()
            else:
                grid.exchange(field)
            expected = block(layout, case, case.padded(whole))
            assert agree(np.array_equal(field.get(), expected), comm), (case, call)


def check_adjoint(number: int, comm: MPI.Intracomm) -> None:
    case = random_case(
        np.random.default_rng([1, comm.size, number]), comm.size, linear=True, wide=number % 3 == 2
    )
    mine = np.random.default_rng([2, number, comm.rank])
    with case.grid(comm, "gpu") as grid:
        x, y = case.field(grid), case.field(grid)
        assert accumulates_the_adjoint(grid, x, y, mine, comm), case
