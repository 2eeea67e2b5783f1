"""Particles on the GPUs of several ranks: the same as on the host of one rank."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from tests.mpi.conftest import agree
from tests.support import require

require("gpu")

from tests.gpu.particles import check_particles  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4)]


def test_particles_are_those_of_the_host(comm: MPI.Intracomm) -> None:
    wrong = check_particles(comm)
    assert agree(not wrong, comm), wrong
