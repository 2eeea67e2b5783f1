"""Clouds of particles on a GPU, on one rank: the values and sums of the host, and the energies of ppic2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError
from tests import ppic2
from tests.support import require

require("gpu")

import cupy  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [
        ((40, 30), "f8", {}),
        ((11,), "c8", {"staggered": 0}),
        ((9, 7, 8), "f4", {"components": (2, ..., 3), "staggered": (0, 2)}),
    ],
)
def test_values_and_sums(shape: tuple[int, ...], dtype: str, layout: Any, order: int) -> None:
    rng = np.random.default_rng(2)
    x = rng.uniform(-0.5, np.array(shape) - 0.5, (5000, len(shape)))
    weight = rng.normal(size=len(x))
    small = 1e-4 if dtype in ("f4", "c8") else 1e-12
    found, bits = [], []
    for device in ("cpu", "gpu"):
        options: Any = {"halo": 1, "periodic": True, "comm": MPI.COMM_SELF, "device": device}
        with halox.Grid(shape, **options) as grid:
            p = halox.Particles(grid, x, key=np.arange(len(x)))
            p.sort(order)
            u, sums = grid.random(1, dtype=dtype, **layout), grid.zeros(dtype, **layout)
            grid.exchange(u)
            values = p.get(u, order)
            p.add(sums, grid.xp.asarray(weight)[p["key"]], order)
            p.add(sums, -0.25, order)
            by_key = grid.xp.argsort(p["key"])
            found.append([cupy.asnumpy(each) for each in (values[by_key], sums)])
            for key in (0, 1):
                p.sort(key)
                exact = grid.zeros(dtype, **layout)
                p.add(exact, grid.xp.asarray(weight)[p["key"]], order, reproducible=True)
                bits.append(cupy.asnumpy(exact))
    for ours, host in zip(*found, strict=True):
        assert np.allclose(ours, host, 10 * small, 10 * small)
    assert np.array_equal(bits[2], bits[3]) and np.allclose(bits[0], bits[2], small, small)


def test_particles_that_have_left_are_seen() -> None:
    with halox.Grid((6, 5), halo=1, comm=MPI.COMM_SELF, device="gpu") as grid:
        p, u = halox.Particles(grid, [(3.0, 2.0), (1.0, 1.0)]), grid.ones()
        p.position[1, 0] = 200
        assert np.array_equal(p.get(u).get(), [1, np.nan], equal_nan=True)
        with pytest.raises(FieldError, match="particle 1 is at 200"):
            p.add(u, 1, reproducible=True)
        p.add(u, 1)
        assert bool(cupy.isnan(u).any())


@pytest.mark.full
def test_energies_of_ppic2() -> None:
    """To all seven published digits."""
    options: Any = {"halo": 1, "periodic": True, "comm": MPI.COMM_SELF, "device": "gpu"}
    with halox.Grid((512, 512), **options) as grid:
        field, kinetic = ppic2.run(grid, 3072, 100)
    assert abs(field - ppic2.FIELD) < 0.001 and abs(kinetic - ppic2.KINETIC) < 1
