"""Overlapped steps on ranks, in a stream and in CUDA graphs, against a serial run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from tests.mpi.conftest import agree
from tests.support import require

require("gpu")

import cupy  # noqa: E402

from tests.gpu.test_overlap_gpu import run_pairs_of_steps, smoothed  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(1, 2, 3, 4)]


@pytest.mark.parametrize("own", [True, False], ids=["fields", "arrays"])
@pytest.mark.parametrize("axis", [0, 1])
def test_overlapped_steps(axis: int, own: bool, comm: MPI.Intracomm) -> None:
    """Rims along one axis, and copies within the rank along the other one."""
    procs = (comm.size, 1) if axis == 0 else (1, comm.size)
    shape = 9 * procs[0] + 2, 80 * procs[1] + 3
    options: dict[str, Any] = {"periodic": True, "proc_shape": procs, "comm": comm, "device": "gpu"}
    with halox.Grid(shape, halo=1, corners=False, **options) as grid:
        whole = np.random.default_rng(3).random(shape)
        u, new = grid.full(np.nan), grid.full(np.nan)
        if not own:
            u, new = u.copy(), new.copy()
        grid.interior(u)[...] = cupy.asarray(whole[grid.owned])
        plan = grid.plan(u, overlap=True)
        captures = all(row.path in ("peer", "local") for row in plan.explain().rows)
        run_pairs_of_steps(plan, u, new, pairs=7, captured=captures)
        wanted = smoothed(whole, 14)[grid.owned]
        assert agree(bool(np.array_equal(grid.interior(u).get(), wanted)), comm)
        assert comm.size == 1 or "; on" in str(plan.explain())
