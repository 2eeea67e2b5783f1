"""Points, statistics and random fields on a GPU, on one rank: values, launches, graphs."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError, StateError
from tests.support import require

require("gpu")

import cupy  # noqa: E402

from tests.gpu.points import check_points, check_random, check_statistics  # noqa: E402

pytestmark = pytest.mark.gpu


def test_points_are_those_of_the_host() -> None:
    assert not check_points(MPI.COMM_SELF)


def test_statistics_are_those_of_numpy() -> None:
    assert not check_statistics(MPI.COMM_SELF)


def test_random_fields_are_those_of_the_host() -> None:
    assert not check_random(MPI.COMM_SELF)


def test_in_a_graph_and_in_one_launch() -> None:
    """A captured step adds sources, exchanges and reads receivers; each takes one launch."""
    with halox.Grid((40, 30), periodic=True, comm=MPI.COMM_SELF, device="gpu") as grid:
        rng = np.random.default_rng(0)
        indices = rng.random((10_000, 2)) * (40, 30)
        points, u = halox.Points(grid, indices), grid.zeros()
        values = cupy.asarray(rng.integers(0, 9, 10_000).astype("f8"))
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            try:
                with pytest.raises(StateError):
                    points.add(u, values)
                with pytest.raises(StateError):
                    points.record(u)
            finally:
                stream.end_capture()
            points.add(u, values)
            grid.exchange(u)
            first = points.get(u)
            with patch("halox.runtime.gpu.launch.PreparedLaunch._run", autospec=True) as run:
                points.add(u, values)
                points.get(u)
                assert run.call_count == 2
            stream.begin_capture()
            points.add(u, values)
            grid.exchange(u)
            found = points.get(u)
            graph = stream.end_capture()
            for _ in range(3):
                graph.launch()
            stream.synchronize()
        assert np.allclose(found.get(), 4 * first.get(), rtol=1e-12)
        host = halox.Grid((40, 30), periodic=True, comm=MPI.COMM_SELF, device="cpu")
        v, there = host.zeros(), halox.Points(host, indices)
        there.add(v, 4 * values.get())
        host.exchange(v)
        assert np.allclose(found.get(), there.get(v), rtol=1e-12)
        host.close()


def test_sources_in_one_cell_keep_their_order() -> None:
    """The bits of many sources in few cells are the same in every run."""
    with halox.Grid((4, 4), comm=MPI.COMM_SELF, device="gpu") as grid:
        rng = np.random.default_rng(1)
        points = halox.Points(grid, rng.random((5000, 2)) * 3)
        values, found = rng.normal(size=5000), set()
        for _ in range(5):
            u = grid.zeros()
            points.add(u, values)
            found.add(u.get().tobytes())
        assert len(found) == 1


def test_dtypes_without_a_kernel() -> None:
    with halox.Grid((4, 4), comm=MPI.COMM_SELF, device="gpu") as grid:
        with pytest.raises(FieldError):
            halox.Points(grid, [(1, 1)]).get(grid.ones("f2"))
        with pytest.raises(FieldError):
            halox.Points(grid, [(1, 1)]).add(grid.ones("f4"), 1j)
