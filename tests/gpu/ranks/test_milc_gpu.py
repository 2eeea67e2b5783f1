"""The staggered fermions mini-app on several GPU ranks: the bits of one rank, and agreement with NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from apps.milc import checks
from apps.milc.cg import ConjugateGradient, Stop
from apps.milc.lattice import PARITIES, Lattice
from apps.milc.operator import Staggered
from tests.mpi.conftest import agree
from tests.mpi.test_milc import (
    SHAPE,
    check_bytes,
    check_definition_and_bits,
    error,
    operator_of,
    whole_links,
    whole_vectors,
)
from tests.support import require

require("gpu")

import cupy  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4)]


@pytest.fixture(params=[3, 1], ids=["improved", "naive"])
def lattice(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> Iterator[Lattice]:
    with (
        cupy.cuda.Stream(non_blocking=True),
        Lattice(SHAPE, request.param, comm, "gpu") as found,
    ):
        yield found


@pytest.mark.parametrize("precision", ["double", "single"])
def test_definition_and_the_bits_of_one_rank(
    lattice: Lattice, precision: str, comm: MPI.Intracomm
) -> None:
    check_definition_and_bits(lattice, precision, comm)


def test_bytes_are_the_fewest(lattice: Lattice, comm: MPI.Intracomm) -> None:
    check_bytes(lattice, comm)


@pytest.mark.parametrize("precision", ["double", "single", "mixed"])
def test_the_iterations_and_the_solution_of_numpy(
    lattice: Lattice, precision: str, comm: MPI.Intracomm
) -> None:
    naive = lattice.depth == 1
    whole, b = whole_links(), np.ascontiguousarray(whole_vectors()[lattice.owned])
    stop = Stop(1e-9 if precision == "single" else 1e-14, 500)
    with Lattice(SHAPE, lattice.depth, comm) as host:
        of_host, of_gpu = (
            [solver_of(where, whole, naive, precision, parity, stop) for parity in PARITIES]
            for where in (host, lattice)
        )
        for parity in PARITIES:
            (here, operator), (there, other) = of_host[parity], of_gpu[parity]
            expected = here.solve(checks.vectors(operator, b)[parity])
            found = there.solve(checks.vectors(other, b)[parity])
            x, limit = lattice.values(found.x), 30 * stop.residual**0.5
            # In single precision rounding may change the number of iterations.
            apart = abs(found.iterations - expected.iterations)
            ok = apart <= (0 if precision == "double" else 2) and found.residual <= stop.residual
            assert agree(ok and error(x, expected.x) < limit, comm), (found, expected)


def solver_of(
    lattice: Lattice, whole: np.ndarray, naive: bool, precision: str, parity: int, stop: Stop
) -> tuple[ConjugateGradient, Staggered]:
    inner = operator_of(lattice, whole, naive, "single") if precision == "mixed" else None
    operator = operator_of(lattice, whole, naive, precision)
    return ConjugateGradient(operator, parity, 0.3, stop, inner), operator


def test_the_same_bits_in_every_run(lattice: Lattice, comm: MPI.Intracomm) -> None:
    operator = operator_of(lattice, whole_links(), lattice.depth == 1)
    b = checks.vectors(operator, np.ascontiguousarray(whole_vectors()[lattice.owned]))[0]
    solver = ConjugateGradient(operator, 0, 0.3, Stop(1e-10, 500))
    first = solver.solve(b)
    x = first.x.get()
    second = solver.solve(b)
    ok = first.history == second.history and np.array_equal(x, second.x.get())
    histories = comm.allgather(first.history)
    assert agree(ok and all(one == histories[0] for one in histories), comm)
