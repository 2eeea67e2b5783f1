"""Host packing of DDTBench's patterns with its target: as fast as MPI_Pack, whatever the layout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from halox_bench.common.targets import Figure, Progress, figure, measured
from halox_bench.ddtbench.baselines import HaloxPacked, MpiPacked, host_buffers
from halox_bench.ddtbench.cases import DdtCase

OF_MPI_PACK = 0.95
"""Least speed, as a share of MPI_Pack's."""

BUDGET_S = 90.0
_ROUNDS = 40
_ROUND_S = 2e-4
_MOST_CALLS = 300


def measure(
    comm: Any,
    cases: Sequence[DdtCase],
    *,
    budget_s: float = BUDGET_S,
    progress: Progress = lambda what, done, total: None,
) -> list[Figure]:
    """Measure packing and unpacking of cases by halox and by MPI_Pack, on every rank; see `measured`.

    Rank 0's figures are returned on all.
    """
    found = measured(
        {case.name: partial(_figures, comm, case) for case in cases}, budget_s, progress, comm
    )
    figures: list[Figure] = comm.bcast(found)
    return figures


def _figures(comm: Any, case: DdtCase) -> Iterator[Figure]:
    slab = np.zeros(case.slab_bytes, np.uint8)
    buffers = host_buffers(case)  # the same for both: addresses decide on conflicts in caches
    ours = HaloxPacked(comm, case, slab, None, buffers)
    theirs = MpiPacked(comm, case, slab, buffers)
    calls = {"halox": ours.phases(), "mpi": theirs.phases()}
    for phase in ("pack", "unpack"):
        us = least_us({name: phases[phase] for name, phases in calls.items()})
        yield figure(
            f"{case.name}, {phase}: speed over MPI_Pack's",
            us["mpi"] / us["halox"],
            "x",
            OF_MPI_PACK,
            us["mpi"],
            "us of MPI",
            us=round(us["halox"], 3),
        )
    theirs.close()


def least_us(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the microseconds of each call, the least of many short rounds in turns."""
    numbers, found = {}, dict.fromkeys(calls, np.inf)
    for name, call in calls.items():
        call()
        numbers[name] = max(1, min(_MOST_CALLS, int(_ROUND_S / max(_seconds(call, 1), 1e-7))))
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            found[name] = min(found[name], _seconds(call, numbers[name]) * 1e6)
    return found


def _seconds(call: Callable[[], Any], number: int) -> float:
    begin = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - begin) / number
