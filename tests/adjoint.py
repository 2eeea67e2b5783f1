"""The test that an accumulation is the adjoint of an exchange, on CPUs and GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

import halox
from halox.runtime.gpu.devices import to_host


def accumulates_the_adjoint(
    grid: halox.Grid, x: Any, y: Any, mine: np.random.Generator, comm: MPI.Intracomm
) -> bool:
    """Whether <E x, y> = <x, E' y> over all ranks, exactly, for two fields of one layout.

    Both get small integers from ``mine``, a generator of this rank: ``x`` in its own cells, ``y`` in its halo, too.
    """
    x[...] = 0
    before = mine.integers(-9, 10, grid.interior(x).shape).astype(x.dtype)
    grid.interior(x)[...] = grid.xp.asarray(before)
    y[...] = grid.xp.asarray(mine.integers(-9, 10, y.shape).astype(y.dtype))
    grid.exchange(x)
    left = comm.allreduce(complex(np.vdot(to_host(x), to_host(y))))
    grid.accumulate(y)
    right = comm.allreduce(complex(np.vdot(before, to_host(grid.interior(y)))))
    return bool(left == right)
