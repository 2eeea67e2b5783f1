"""Reproducible reductions of ranks with GPUs: the exact sum of the whole field, rounded once, in any division."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from tests.exact import exact_sum, hard, norm, products, same_bits, sums
from tests.mpi.conftest import agree
from tests.support import require

require("gpu")

import cupy  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4, 8)]


@pytest.mark.parametrize("place", ["as it is", "a node each"])
@pytest.mark.parametrize("dtype", ["f8", "c8"])
@pytest.mark.parametrize("kind", ["normal", "all exponents", "cancelling", "odd"])
def test_whole_fields(
    kind: str, dtype: str, place: str, comm: MPI.Intracomm, monkeypatch: Any
) -> None:
    if place == "a node each":
        monkeypatch.setenv("HALOX_NODE", "rank")
    shape, rng = (19, 14, 33), np.random.default_rng(1)
    a, b = (hard(kind, int(np.prod(shape)), rng).reshape(shape) for _ in range(2))
    with np.errstate(all="ignore"):
        a, b = a.astype(dtype), b.astype(dtype)
    for axis in range(3):
        procs = [1, 1, 1]
        procs[axis] = comm.size
        with halox.Grid(
            shape, proc_shape=procs, comm=comm, device="gpu", reproducible=True
        ) as grid:
            u, v = grid.zeros(dtype), grid.zeros(dtype)
            grid.interior(u)[...] = cupy.asarray(a[grid.owned])
            grid.interior(v)[...] = cupy.asarray(b[grid.owned])
            for _ in range(3):
                ok = same_bits(grid.sum(u).get(), sums(a))
                ok &= same_bits(grid.norm(u).get(), norm(a))
                ok &= same_bits(grid.dot(u, v).get(), products(a, b))
                assert agree(ok, comm), axis


def test_arrays(comm: MPI.Intracomm) -> None:
    values = hard("cancelling", 5 * comm.size, np.random.default_rng(2)).reshape(comm.size, 5)
    wanted = np.array([exact_sum(column) for column in values.T])
    with halox.Allreduce(comm, 5, "f8", device="gpu", reproducible=True) as reduce:
        found = reduce(cupy.asarray(values[comm.rank]))
    assert agree(found.get().tobytes() == wanted.tobytes(), comm)
