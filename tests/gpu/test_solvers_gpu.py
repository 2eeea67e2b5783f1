"""Linear operators on a GPU: CuPy's solvers on one rank, and vectors of the host for PETSc."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from tests.mpi.test_solvers import SHAPE, Vec, grid_options, laplacian, matrix
from tests.support import require

pytestmark = pytest.mark.gpu
require("gpu")

import cupy  # noqa: E402
from cupyx.scipy.sparse import linalg  # noqa: E402


def operator() -> tuple[halox.Grid, Any]:
    grid = halox.Grid(SHAPE, comm=MPI.COMM_SELF, device="gpu", **grid_options())
    return grid, grid.linear_operator(laplacian(grid), grid.zeros())


@pytest.mark.parametrize("solver", ["cg", "gmres"])
def test_solutions(solver: str) -> None:
    grid, A = operator()
    assert isinstance(A, linalg.LinearOperator)
    b = np.random.default_rng(3).random(A.shape[0])
    found, code = getattr(linalg, solver)(A, cupy.asarray(b))  # to 1e-5 by default
    assert code == 0
    assert np.linalg.norm(matrix() @ found.get() - b) < 2e-5 * np.linalg.norm(b)
    grid.close()


def test_vectors_of_the_host() -> None:
    grid, A = operator()
    x, y = np.random.default_rng(4).random(A.shape[0]), Vec(np.zeros(A.shape[0]))
    A.mult(None, Vec(x), y)
    assert type(y.array_r) is np.ndarray
    assert np.allclose(y.array_r, matrix() @ x, rtol=0, atol=1e-14)
    grid.close()
