"""Arrays that CuPy makes anew each step: one plan, and one shift of the launch's addresses a step."""

from __future__ import annotations

import numpy as np
import pytest

import halox
from halox.errors import FieldError
from tests.support import require

require("gpu")

import cupy  # noqa: E402
from mpi4py import MPI  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["f8", "f4", "c16", "u1"])
def test_steps_of_new_arrays(dtype: str) -> None:
    options = {"periodic": True, "comm": MPI.COMM_SELF, "device": "gpu"}
    with halox.Grid((20, 14, 9), halo=(1, 2, 1), **options) as grid:
        kept = []
        for step in range(8):
            cells = np.random.default_rng(step).integers(0, 200, grid.rank_shape).astype(dtype)
            u = cupy.zeros(grid.padded_shape, dtype) + cupy.zeros((), dtype)
            grid.interior(u)[...] = cupy.asarray(cells)
            kept.append(u if step % 3 else None)  # so that addresses go up and down
            grid.exchange(u)
            assert np.array_equal(u.get(), np.pad(cells, ((1, 1), (2, 2), (1, 1)), mode="wrap"))
            assert grid._plan_number == 1
        for u in [one for one in kept if one is not None]:
            grid.exchange(u)
        assert grid._plan_number == 1


def test_layouts_of_results() -> None:
    with halox.Grid((8, 8), halo=1, periodic=True, comm=MPI.COMM_SELF, device="gpu") as grid:
        u = grid.ones(staggered=0)
        for n in range(3):
            v = u * 2 + n
            assert grid.layout(v) is grid.layout(u)
            grid.exchange(v)
        w = grid.zeros_like(u, "f4")
        assert w.shape == u.shape and grid.layout(w) is grid.layout(u)
        grid.exchange(u, w)
        with pytest.raises(FieldError, match="share memory"):
            grid.accumulate(u, u)
