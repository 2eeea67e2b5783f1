"""Two nodes joined by a link of known rate and delay: bytes that cross the link, and least times.

tests/test_nodes.py starts the ranks. ``HALOX_TEST_LINK`` gives the rate in Mbit/s and the delay in ms. The node's only
device besides the loopback device is the end of the link; its counter includes the headers of Ethernet, IP, TCP and
Open MPI, and TCP's acknowledgements.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import halox
from tests.netns import BURST_BYTES

MBIT_PER_S, DELAY_MS = map(int, os.environ["HALOX_TEST_LINK"].split(","))
STEPS = 5
OVERHEAD = 1.15
"""Most bytes on the link per byte of data, in messages of 64 KiB or more."""


def sent_bytes() -> int:
    """Return the bytes that this node has sent over the link so far."""
    (end,) = (path for path in Path("/sys/class/net").iterdir() if path.name != "lo")
    return int((end / "statistics" / "tx_bytes").read_text())


def run_steps(comm: MPI.Intracomm, step: Callable[[], object]) -> tuple[float, float]:
    """Return the bytes that this node sends over the link per step, and the time of a step on the slowest rank in s."""
    step()
    comm.Barrier()
    before, start = sent_bytes(), time.perf_counter()
    for _ in range(STEPS):
        step()
    elapsed_s = comm.allreduce(time.perf_counter() - start, MPI.MAX)
    return (sent_bytes() - before) / STEPS, elapsed_s / STEPS


def least_s(nbytes: int) -> float:
    """Return the least time of a step in which the nodes send each other ``nbytes``.

    The first bytes of the first step are free. So is the first crossing, if one of the nodes has begun earlier.
    """
    sending_s = (nbytes - BURST_BYTES / STEPS) / (MBIT_PER_S * 1e6 / 8)
    return max(sending_s, DELAY_MS * 1e-3 * (STEPS - 1) / STEPS)


@pytest.mark.parametrize("n", [1 << 14, 1 << 17])
def test_exchanges_take_the_time_of_the_link(n: int, comm: MPI.Intracomm) -> None:
    """Only ranks 1 and 2 are neighbours on different nodes: each sends a row to the other."""
    shape, procs = (4 * comm.size, n), (comm.size, 1)
    with halox.Grid(shape, halo=(1, 0), proc_shape=procs, comm=comm, device="cpu") as grid:
        u = grid.full(comm.rank, "f8")
        crossed, step_s = run_steps(comm, partial(grid.exchange, u))
        nbytes = 8 * n
        assert nbytes <= crossed < OVERHEAD * nbytes
        assert step_s >= least_s(nbytes)
        if comm.rank == 1:
            assert np.all(u[-1] == 2)


@pytest.mark.parametrize("elements", [1 << 13, 1 << 17])
def test_a_hierarchical_allreduce_crosses_the_link_once(elements: int, comm: MPI.Intracomm) -> None:
    """A node sends one array, however many ranks it has; with "host" each rank exchanges parts with all others."""
    values = np.arange(elements, dtype="f8")
    out = np.empty_like(values)
    nbytes = values.nbytes
    for algorithm, arrays in (("hierarchical", 1), ("host", comm.size // 2)):
        out[...] = 0
        with halox.Allreduce(comm, elements, "f8", algorithm=algorithm, device="cpu") as reduction:
            crossed, step_s = run_steps(comm, partial(reduction, values, out))
        assert np.array_equal(out, comm.size * values)
        assert nbytes * arrays <= crossed < OVERHEAD * nbytes * arrays
        assert step_s >= least_s(nbytes * arrays)
