"""Times of calls that all ranks make: the slowest rank's, in batches, several calls in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from halox.runtime.world import load_mpi

BATCHES = 9
BATCH_S = 4e-3
MOST_CALLS = 400
_WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """Length of a measurement.

    Attributes
    ----------
    batches : int
        Batches of each call, for a median.
    batch_s : float
        Least time of a batch, unless `MOST_CALLS` calls are shorter.
    """

    batches: int = BATCHES
    batch_s: float = BATCH_S


class Stage:
    """Processor of a benchmark's calls: this process's CPU, or one GPU with a stream for them.

    Parameters
    ----------
    device : int or None
        The GPU, None for NumPy arrays.
    urgent : bool
        Whether the stream is of the highest priority; else of the usual one of users' kernels.

    Attributes
    ----------
    xp : module
        ``numpy`` or ``cupy``.
    stream : cupy.cuda.Stream or None
        Independent of the default stream.
    """

    def __init__(self, device: int | None = None, *, urgent: bool = True) -> None:
        self.device = device
        self.xp: Any = np
        self.stream: Any = None
        if device is not None:
            from halox.runtime.gpu.cuda import cupy

            self.xp = cupy()
            self.xp.cuda.Device(device).use()
            self.stream = self.xp.cuda.Stream(non_blocking=True, priority=-5 if urgent else 0)

    def current(self) -> Any:
        """Return a context manager that makes the stage's stream CuPy's current one."""
        return nullcontext() if self.stream is None else self.stream

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def settle(self) -> None:
        """Wait for everything on the device."""
        if self.device is not None:
            self.xp.cuda.Device(self.device).synchronize()

    def captured(self, call: Callable[[], None], calls: int) -> Callable[[], None]:
        """Capture calls into a graph; return a function that replays it on the stream.

        Raises
        ------
        Exception
            The call's error if it cannot be captured.
        """
        # A new stream each time: a failed capture leaves its stream unusable. A captured call cannot wait
        # for other streams, which must therefore be idle.
        self.settle()
        stream = self.xp.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            try:
                for _ in range(calls):
                    call()
            except BaseException:
                with suppress(Exception):
                    stream.end_capture()
                raise
            graph = stream.end_capture()

        def replay() -> None:
            graph.launch(self.stream)

        return replay


class RanksClock:
    """Measures calls that all ranks of a communicator make.

    Notes
    -----
    A figure is wall time: all ranks begin together, make a batch of calls back to back, and wait for their streams at
    its end. It is the median over batches of the slowest rank's time.
    """

    def __init__(self, comm: Any, stage: Stage, timing: Timing | None = None) -> None:
        self._comm, self._stage, self._timing = comm, stage, timing or Timing()
        self._max = load_mpi().MAX

    def measure(self, calls: Mapping[str, Callable[[], None]]) -> dict[str, float]:
        """Return microseconds a call of each, the same on all ranks; collective.

        The calls take turns in batches: the machine's other work affects all equally, and ranks that share a GPU do
        not synchronise with its time slices.
        """
        if not calls:
            return {}
        with self._stage.current():
            counts = {name: self._count(call) for name, call in calls.items()}
            times = np.array(
                [
                    [self._batch(call, counts[name]) for name, call in calls.items()]
                    for _ in range(self._timing.batches)
                ]
            )
        slowest = np.empty_like(times)
        self._comm.Allreduce(times, slowest, self._max)
        return dict(zip(calls, (np.median(slowest, axis=0) * 1e6).tolist(), strict=True))

    def _count(self, call: Callable[[], None]) -> int:
        """Return the number of calls of a batch, the same on all ranks."""
        self._batch(call, _WARM_UP)
        once = self._comm.allreduce(self._batch(call, _WARM_UP), self._max)
        return max(1, min(MOST_CALLS, int(self._timing.batch_s / max(once, 1e-9)) + 1))

    def _batch(self, call: Callable[[], None], calls: int) -> float:
        call()
        self._stage.synchronize()
        self._comm.Barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        self._stage.synchronize()
        return (time.perf_counter() - begin) / calls
