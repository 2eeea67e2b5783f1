"""Many exchanges with random delays of ranks, of their hosts or their GPUs."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from mpi4py import MPI

from tests.gpu.ranks.paths import BY_HOST, PEER, along
from tests.mpi.conftest import agree
from tests.mpi.ways import Way
from tests.support import require

require("gpu")

from tests.gpu.ranks.stepping import Stepper  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4)]

SEED = 20261122
EXCHANGES = int(os.environ.get("HALOX_EXCHANGES", "100000"))
"""Number of exchanges on the peer path. Paths that involve the host make a hundredth of them."""


def exchange_with_delays(way: Way, comm: MPI.Intracomm, exchanges: int, every: int) -> None:
    rng = np.random.default_rng([SEED, comm.rank])
    with way.box(comm) as grid:
        stepper = Stepper(grid)
        plan = grid.plan(stepper.u)
        assert way.check_taken(plan, comm)
        late = rng.integers(0, every, exchanges)
        for number in late:
            if number == 0:
                time.sleep(rng.random() * 0.002)
            stepper.advance()
            if number == 1:
                stepper.spin(rng.random() * 2)
            plan()
            if number == 2:
                stepper.spin(rng.random() * 2)
            stepper.check()
        found = stepper.found()
        assert agree(found == (exchanges, 0), comm), found
        assert agree(stepper.is_at(exchanges) and stepper.broken(), comm)


@along(PEER)
def test_delays(way: Way, comm: MPI.Intracomm) -> None:
    exchange_with_delays(way, comm, EXCHANGES, 1000)


@along(BY_HOST)
def test_delays_of_paths_by_the_host(way: Way, comm: MPI.Intracomm) -> None:
    exchange_with_delays(way, comm, EXCHANGES // 100, 50)
