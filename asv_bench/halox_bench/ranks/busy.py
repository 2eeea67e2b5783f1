"""Exchanges while something else holds a share of each GPU: Wu et al. 2016, 5.4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from halox_bench.common.neighbour import Neighbour
from halox_bench.common.rig import Rig
from halox_bench.ranks.clock import RanksClock, Stage, Timing

_BRIEF = Timing(batches=5, batch_s=1e-3)
"""Short: what holds the GPU lets go by itself after two seconds."""

_ROUNDS = 3


def times_us(
    comm: Any, stage: Stage, call: Callable[[], None], shares: Sequence[float]
) -> dict[float, float]:
    """Measure a call of all ranks with a share of each GPU's multiprocessors held completely.

    Parameters
    ----------
    stage : Stage
        With a GPU that no other rank uses.
    call : callable
        Must allocate nothing and wait for nothing but its stream.
    shares : sequence of float
        0 is the GPU alone.

    Returns
    -------
    dict
        Microseconds by share, the least of several rounds.

    Notes
    -----
    Collective.
    """
    neighbour = Neighbour(Rig(stage.device or 0, repeats=3))
    clock = RanksClock(comm, stage, _BRIEF)
    found: dict[float, float] = {}
    for _ in range(_ROUNDS):
        for share in shares:
            comm.Barrier()
            with neighbour.holding(share):
                us = clock.measure({"": call})[""]
            found[share] = min(us, found.get(share, us))
    return found
