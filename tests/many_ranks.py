"""Program of many ranks: a grid of three axes, a plan, an exchange and a sum, compared with closed forms.

tests/test_ranks.py starts it. Rank 0 prints the times, and the largest memory of a rank.
"""

from __future__ import annotations

import resource
import time

import numpy as np
from mpi4py import MPI

import halox

CELLS = 4
"""Cells of a block along each axis."""


def main() -> None:
    comm = MPI.COMM_WORLD
    procs = MPI.Compute_dims(comm.size, 3)
    shape = [CELLS * parts for parts in procs]
    start_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = [time.perf_counter()]
    grid = halox.Grid(shape, halo=1, periodic=True, proc_shape=procs, comm=comm, device="cpu")
    times.append(time.perf_counter())
    u = grid.zeros("i8")
    plan = grid.plan(u)
    times.append(time.perf_counter())
    weights = np.array([1, 1000, 1_000_000])
    axes = [np.arange(own.start, own.stop) for own in grid.owned]
    grid.interior(u)[...] = sum(np.ix_(*(w * axis for w, axis in zip(weights, axes, strict=True))))
    plan()
    times.append(time.perf_counter())
    total = grid.sum(u)
    times.append(time.perf_counter())
    # With the halo, each axis has the indices of the neighbours' cells too, modulo the period.
    wrapped = [
        np.arange(own.start - 1, own.stop + 1) % n for own, n in zip(grid.owned, shape, strict=True)
    ]
    wanted = sum(np.ix_(*(w * axis for w, axis in zip(weights, wrapped, strict=True))))
    assert np.array_equal(u, wanted)
    # The mean of 0, 1, ..., n - 1 is (n - 1) / 2.
    cells = int(np.prod(shape))
    assert 2 * total == cells * sum(int(w) * (n - 1) for w, n in zip(weights, shape, strict=True))
    grid.close()
    most_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = comm.gather((*np.diff(times) * 1e3, start_kib / 1024, (most_kib - start_kib) / 1024))
    if rows is not None:
        grid_ms, plan_ms, exchange_ms, sum_ms, before, more = np.max(rows, axis=0)
        print(
            f"{comm.size} ranks correct: grid {grid_ms:.0f} ms, plan {plan_ms:.0f} ms, first exchange "
            f"{exchange_ms:.0f} ms, sum {sum_ms:.0f} ms; memory of a rank {before:.0f} MiB + {more:.1f} MiB"
        )


if __name__ == "__main__":
    main()
