"""Folds, poles, strips and cubed spheres on a GPU, on several ranks."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from tests.support import require

require("gpu")

from tests.gpu.folds import check_adjoint, check_cube, check_halos  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 3, 4)]


@pytest.mark.parametrize("number", range(24))
def test_halos_equal_the_serial_reference(number: int, comm: MPI.Intracomm) -> None:
    check_halos(number, comm)


@pytest.mark.parametrize("number", range(12))
def test_accumulate_is_the_adjoint(number: int, comm: MPI.Intracomm) -> None:
    check_adjoint(number, comm)


@pytest.mark.parametrize(("n", "halo"), [(4, 1), (6, 3)])
def test_cubes(n: int, halo: int, comm: MPI.Intracomm) -> None:
    check_cube(n, halo, comm)
