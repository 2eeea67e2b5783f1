"""Cubed spheres on a GPU, against halos by geometry."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

import halox
from tests.mpi.conftest import agree
from tests.mpi.test_cubed_sphere import UNTOUCHED, block, sources
from tests.support import require

require("gpu")

import cupy  # noqa: E402


def check_cube(n: int, halo: int, comm: MPI.Intracomm) -> None:
    """Exchange a field on a cubed sphere; halos by geometry."""
    source: Any = sources(n, halo)
    with halox.CubedSphere(n, halo, comm=comm, device="gpu") as sphere:
        u = sphere.full(UNTOUCHED)
        whole = np.random.default_rng(1).random((6, n, n))
        sphere.interior(u)[...] = cupy.asarray(whole[sphere.owned])
        sphere.exchange(u)
        expected = block(sphere, u, np.where(source < 0, UNTOUCHED, whole.ravel()[source]))
        assert agree(np.array_equal(u.get(), expected), comm)
