"""Exchanges of NumPy arrays with random delays of ranks; tests/gpu/ranks/test_delays_gpu.py has paths of GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

from tests.faults.calls import CPU_PATHS
from tests.mpi.conftest import agree
from tests.mpi.ways import Way, values

LATE, MOST_LATE_S = 0.1, 0.002


@pytest.mark.ranks(2, 3)
@pytest.mark.usually(2)
@pytest.mark.parametrize("path", CPU_PATHS)
def test_delays(path: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell of every field is right after every exchange, of one field or two, in one call or two."""
    monkeypatch.setenv("HALOX_NODE", "rank" if path == "host/mpi" else "")
    same, mine = np.random.default_rng(1), np.random.default_rng([2, comm.rank])

    def dawdle() -> None:
        if mine.random() < LATE:
            time.sleep(mine.random() * MOST_LATE_S)

    way = Way(path, "cpu")
    # Edges are too short to be read in place.
    halo = ((1, 1), (0, 0), (0, 0)) if path == "host/direct" else 1
    with way.box(comm, halo=halo) as grid:
        make: Callable[[], np.ndarray] = (
            (lambda: np.empty(grid.padded_shape)) if path == "host/shared" else grid.empty
        )
        fields, wrong = [make(), make()], 0
        plan, places, inside = grid.plan(*fields), values(grid), grid.layout(fields[0]).interior
        assert way.check_taken(plan, comm)
        for step in range(100):
            some = fields[: 1 + step % 2]
            for number, field in enumerate(some):
                field[...] = -1
                field[inside] = places[inside] + 2 * step + number
            dawdle()
            if len(some) == 2 and same.integers(2):
                plan.start()
                dawdle()
                plan.finish()
            else:
                grid.exchange(*some)
            wrong += sum((u != places + 2 * step + n).sum() for n, u in enumerate(some))
        assert agree(wrong == 0, comm)
