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
    """Whether <E x, y> = <x, E' y> over all cells of all ranks, exactly, for two fields of one layout.

    Both get small integers from ``mine``, a generator of this rank, in all cells: the exchange must keep the cells of
    the halo that it does not fill, and the accumulation, too.
    """
    before, other = (mine.integers(-9, 10, u.shape).astype(u.dtype) for u in (x, y))
    x[...], y[...] = grid.xp.asarray(before), grid.xp.asarray(other)
    grid.exchange(x)
    left = comm.allreduce(complex(np.vdot(to_host(x), to_host(y))))
    grid.accumulate(y)
    right = comm.allreduce(complex(np.vdot(before, to_host(y))))
    return bool(left == right)
