"""Points, statistics and random fields of a GPU grid on several ranks, and receivers in a graph."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import MismatchError
from tests.mpi.conftest import agree
from tests.support import require

require("gpu")

import cupy  # noqa: E402

from tests.gpu.points import check_points, check_random, check_statistics  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4)]


@pytest.mark.parametrize("check", [check_points, check_statistics, check_random])
def test_results_are_those_of_the_host(check, comm: MPI.Intracomm) -> None:
    wrong = check(comm)
    assert agree(not wrong, comm), wrong


def test_receivers_in_a_graph(comm: MPI.Intracomm) -> None:
    with halox.Grid((40, 30), periodic=True, comm=comm, device="gpu") as grid:
        indices = np.random.default_rng(0).random((1000, 2)) * (40, 30)
        points, u = halox.Points(grid, indices), grid.ones()
        points.get(u)
        with halox.Allreduce(comm, 1000, "u8", "bitwise_or", device="gpu") as reduce:
            captures = reduce.captures
        if not agree(captures, comm):
            return  # the allreduce needs the host
        with cupy.cuda.Stream(non_blocking=True) as stream:
            points.get(u)
            stream.begin_capture()
            found = points.get(u)
            graph = stream.end_capture()
            for value in (2, 3):
                u[...] = value
                graph.launch()
                stream.synchronize()
                assert agree(np.allclose(found.get(), value, rtol=1e-14), comm)


def test_unlike_dtypes(comm: MPI.Intracomm) -> None:
    with halox.Grid((40, 30), comm=comm, device="gpu") as grid:
        points = halox.Points(grid, [(1, 1)])
        with pytest.raises(MismatchError):
            points.get(cupy.zeros(grid.padded_shape, ("f8", "f4")[comm.rank > 0]))
