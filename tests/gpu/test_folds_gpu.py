"""Folds, poles, strips and cubed spheres on a GPU, on one rank: cubes and graphs."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import halox
from tests.support import require

require("gpu")

import cupy  # noqa: E402

from tests.gpu.folds import check_cube  # noqa: E402

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tripolar.py"


@pytest.mark.parametrize(("n", "halo"), [(4, 1), (6, 3), (3, 3)])
def test_cubes(n: int, halo: int) -> None:
    check_cube(n, halo, MPI.COMM_SELF)


def test_in_a_graph() -> None:
    """A captured step moves the halo, changes its sign, and then fills the walls, in every replay."""
    grid = halox.Grid(
        (8, 6),
        halo=((2, 2), (2, 2)),
        connect={(0, "high"): halox.Connection(flip=1)},
        boundary="symmetric",
        comm=MPI.COMM_SELF,
        device="gpu",
    )
    u = grid.zeros(sign=-1)
    grid.interior(u)[...] = cupy.arange(48.0).reshape(8, 6)
    plan = grid.plan(u)
    plan()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        u *= 2
        plan()
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch()
        stream.synchronize()
    inner = 8 * np.arange(48.0).reshape(8, 6)
    expected = np.concatenate([inner, -inner[:-3:-1, ::-1]])
    expected = np.pad(expected, ((2, 0), (2, 2)), mode="symmetric")
    assert np.array_equal(u.get(), expected)
    grid.close()


def test_unique_points() -> None:
    """Of the 6 points on the line of the fold, 3 are images of the others."""
    connect = {(0, "high"): halox.Connection(flip=1)}
    with halox.Grid((8, 6), connect=connect, comm=MPI.COMM_SELF, device="gpu") as grid:
        u = grid.ones(components=2, staggered=0)
        sums = [grid.sum(u), grid.sum(u, unique=True), grid.sum(u, reproducible=True, unique=True)]
        assert [float(one) for one in sums] == [108, 102, 102]
        assert float(grid.dot(u, u, unique=True)) == 102 and float(grid.mean(u, unique=True)) == 1


def test_the_example() -> None:
    program = runpy.run_path(str(EXAMPLE))["main"]
    assert program(["--cells", "24", "72", "--device", "gpu"]) < 1e-12
