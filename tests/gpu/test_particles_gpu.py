"""Particles on a GPU, on one rank: the same as on the host, no change after an error, arrays of CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError
from tests.support import require

require("gpu")

import cupy  # noqa: E402

from tests.gpu.particles import check_particles  # noqa: E402

pytestmark = pytest.mark.gpu


def test_particles_are_those_of_the_host() -> None:
    assert not check_particles(MPI.COMM_SELF)


def test_bad_positions_and_many_absorbed() -> None:
    """No particle changes where one has no place, not even around a periodic axis."""
    options: dict[str, Any] = {"comm": MPI.COMM_SELF, "device": "gpu"}
    with halox.Grid((40, 30), periodic=(False, True), **options) as grid:
        x = cupy.random.default_rng(1).random((100_000, 2)) * 20
        p = halox.Particles(grid, x, walls=("absorb", "keep"), key=cupy.arange(100_000))
        p.position[::4, 1] += 30
        p.position[1::2, 0] = -1
        before = p.position.copy()
        p.position[777, 1] = np.nan
        with pytest.raises(FieldError, match="particle 777"):
            p.migrate()
        p.position[777, 1] = before[777, 1]
        assert (p.position == before).all()
        p.migrate()
        assert len(p) == 50_000 and isinstance(p["key"], cupy.ndarray)
        assert (cupy.sort(p["key"]) == cupy.arange(0, 100_000, 2)).all()
        assert (abs(p.position - x[p["key"]]) < 1e-12).all()
        p.position[:, 0] = 1e9
        p.migrate()
        assert len(p) == 0 == p.count()
