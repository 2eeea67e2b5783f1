"""Exchanges beside other work on the GPUs: a kernel on a share of them (Wu et al. 2016, 5.4), or on all."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

from halox.runtime.gpu.cuda import cupy, multiprocessors
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.world import load_mpi
from halox_bench.common.kernels import defines, kernel
from halox_bench.common.neighbour import Neighbour
from halox_bench.common.rig import Rig
from halox_bench.ranks.clock import RanksClock, Stage, Timing

_BRIEF = Timing(batches=5, batch_s=1e-3)
"""Short: the kernel that holds the GPU ends after two seconds."""

_ROUNDS = 3

_THREADS = 1024
_ARITHMETIC = 8  # some 75 us a block on an H200
_WAVES = 100
_LAUNCH_S = 3e-4  # until a kernel runs
_SAMPLES = 5


def times_us(
    comm: Any,
    stage: Stage,
    call: Callable[[], None],
    shares: Sequence[float],
    *,
    shared: bool = False,
) -> dict[float, float]:
    """Measure a call of all ranks with a share of each GPU's multiprocessors held completely.

    Parameters
    ----------
    stage : Stage
        With a GPU.
    call : callable
        Must not allocate, and must wait only for its stream.
    shares : sequence of float
        0 is the GPU alone.
    shared : bool
        Whether the ranks use one GPU, held by the first rank.

    Returns
    -------
    dict
        Least microseconds of several rounds, by share; ``inf`` if calls did not end in time.

    Notes
    -----
    Collective.
    """
    neighbour = None
    if comm.rank == 0 or not shared:
        neighbour = _neighbour(stage.device or 0)
    clock = RanksClock(comm, stage, _BRIEF)
    found = dict.fromkeys(shares, float("inf"))
    for _ in range(_ROUNDS):
        for share in shares:
            comm.Barrier()
            with nullcontext() if neighbour is None else neighbour.holding(share):
                comm.Barrier()
                us = clock.measure({"": call})[""]
                if share and neighbour is not None and not neighbour.busy:
                    us = float("inf")
            found[share] = min(comm.allreduce(us, load_mpi().MAX), found[share])
    return found


@cache
def _neighbour(device: int) -> Neighbour:
    return Neighbour(Rig(device, repeats=3))


class Work:
    """A kernel that fills the GPU: short blocks of arithmetic in many waves, the same work in each launch."""

    def __init__(self, device: int) -> None:
        cuda = cupy().cuda
        self.stream = cuda.Stream(non_blocking=True)
        self._begin, self._end = cuda.Event(), cuda.Event()
        self._sink = cupy().zeros(1, "f4")
        sink = ctypes.c_void_p(int(self._sink.data.ptr))
        blocks = 2 * multiprocessors(device) * _WAVES
        arguments = (sink, ctypes.c_uint(_ARITHMETIC))
        self._launch = PreparedLaunch(
            kernel("bench", "work", device, defines("bench")),
            blocks,
            _THREADS,
            arguments,
            device=device,
        )
        cuda.Device(device).synchronize()
        self.launch()
        self.us()

    def launch(self) -> None:
        self._begin.record(self.stream)
        self._launch.launch(self.stream.ptr)
        self._end.record(self.stream)

    @property
    def has_ended(self) -> bool:
        return bool(self._end.done)

    def us(self) -> float:
        """Wait for its end, and return its time."""
        self._end.synchronize()
        return float(cupy().cuda.get_elapsed_time(self._begin, self._end)) * 1e3


@dataclass(frozen=True)
class Beside:
    """A call, and work that fills the GPU, each alone and both at once; microseconds, the slowest rank's.

    Attributes
    ----------
    is_covered : bool
        Whether the work outlasted all timed calls; if not, their time is a lower bound.
    """

    call_us: float
    call_beside_us: float
    work_us: float
    work_beside_us: float
    is_covered: bool

    @property
    def loss(self) -> float:
        """Relative slow-down of the work beside continuous calls."""
        return self.work_beside_us / self.work_us - 1


def beside_work(
    comm: Any, stage: Stage, clock: RanksClock, call: Callable[[], None], *, shared: bool = False
) -> Beside:
    """Measure calls of all ranks beside work that fills each GPU; on a shared GPU the first rank launches the work.

    Notes
    -----
    Collective. ``call`` must not allocate, and must wait only for its stream.
    """
    most = load_mpi().MAX
    work = Work(stage.device or 0) if comm.rank == 0 or not shared else None
    alone_us = clock.measure({"": call})[""]

    def once(calls: int) -> tuple[float, float, bool]:
        """Return microseconds of the work and of a call, and whether the work outlasted the calls."""
        comm.Barrier()
        if work is not None:
            work.launch()
        time.sleep(_LAUNCH_S)
        comm.Barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        stage.synchronize()
        us = (time.perf_counter() - begin) / max(calls, 1) * 1e6
        is_covered = work is None or not work.has_ended
        work_us = 0.0 if work is None else work.us()
        return (
            comm.allreduce(work_us, most),
            comm.allreduce(us, most),
            not comm.allreduce(not is_covered, most),
        )

    def several(calls: int) -> tuple[float, float, float, bool]:
        """Return medians of work alone, of work and of a call together; and whether the work covered the calls."""
        alone, both = [], []
        for _ in range(_SAMPLES):
            alone.append(once(0)[0])
            both.append(once(calls))
        times = [median(one[k] for one in both) for k in (0, 1)]
        return median(alone), times[0], times[1], all(one[2] for one in both)

    with stage.current():
        work_us = once(0)[0]
        calls = max(1, int(0.5 * work_us / alone_us))
        while True:
            _, _, beside_us, is_covered = several(calls)
            if is_covered or calls == 1:
                break
            calls = max(1, calls // 4)
        all_along = max(1, round(1.2 * work_us / beside_us))
        work_us, work_beside_us, _, _ = several(all_along)
    return Beside(alone_us, beside_us, work_us, work_beside_us, is_covered)
