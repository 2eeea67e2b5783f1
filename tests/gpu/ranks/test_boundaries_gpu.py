"""Halos at walls on a GPU, on several ranks."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from tests.support import require

require("gpu")

from tests.gpu.boundaries import check_adjoint, check_halos  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 3, 4)]


@pytest.mark.parametrize("number", range(24))
def test_halos_are_those_of_numpy_pad(number: int, comm: MPI.Intracomm) -> None:
    check_halos(number, comm)


@pytest.mark.parametrize("number", range(12))
def test_accumulate_is_the_adjoint(number: int, comm: MPI.Intracomm) -> None:
    check_adjoint(number, comm)
