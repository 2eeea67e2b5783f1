"""Cubed spheres on a GPU, on several ranks; test_exchange_gpu.py has random folds."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from tests.support import require

require("gpu")

from tests.gpu.folds import check_cube  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 3, 4)]


@pytest.mark.parametrize(("n", "halo"), [(4, 1), (6, 3)])
def test_cubes(n: int, halo: int, comm: MPI.Intracomm) -> None:
    check_cube(n, halo, comm)
