"""Times of calls: of all ranks by the wall clock, the slowest rank's; of one GPU by CUDA events."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from halox_bench.kernels import cupy, prepared

Call = Callable[[], Any]

MOST_CALLS = 400
_WARM_UP = 3


class Timing(NamedTuple):
    """Batches of each call for a median, and the least seconds of a batch, unless `MOST_CALLS` calls are shorter."""

    batches: int = 9
    batch_s: float = 4e-3


class Stage:
    """Processor of a benchmark's calls: this process's CPU, or a GPU and a stream on it.

    The stream is independent of the default stream, and of the highest priority unless ``urgent`` is false.
    """

    def __init__(self, device: int | None = None, *, urgent: bool = True) -> None:
        self.device = device
        self.xp: Any = np
        self.stream: Any = None
        if device is not None:
            self.xp = cupy()
            self.xp.cuda.Device(device).use()
            self.stream = self.xp.cuda.Stream(non_blocking=True, priority=-5 if urgent else 0)

    def current(self) -> Any:
        return nullcontext() if self.stream is None else self.stream

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def settle(self) -> None:
        if self.device is not None:
            self.xp.cuda.Device(self.device).synchronize()

    def captured(self, call: Call, calls: int) -> Call:
        """Capture calls into a graph, and return its replay on the stream; the call's error if that is impossible."""
        # A captured call cannot wait for other streams, which must therefore be idle. A failed capture leaves its
        # stream unusable: each has a new one.
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
        return lambda: graph.launch(self.stream)


class Clock:
    """Measures calls that all ranks of a communicator make together.

    A figure is wall time: the ranks begin together, make a batch of calls back to back, and wait for their streams at
    its end; the median over the batches of the slowest rank's time.
    """

    def __init__(self, comm: Any, stage: Stage, timing: Timing) -> None:
        from mpi4py import MPI

        self._comm, self._stage, self.timing = comm, stage, timing
        self._max = MPI.MAX

    def measure(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """Return the microseconds of each call, the same on all ranks; collective.

        The calls take turns batch by batch, so that other work on the machine affects all of them.
        """
        if not calls:
            return {}
        with self._stage.current():
            counts = {name: self._count(call) for name, call in calls.items()}
            times = np.array(
                [
                    [self._batch(call, counts[name]) for name, call in calls.items()]
                    for _ in range(self.timing.batches)
                ]
            )
        slowest = np.empty_like(times)
        self._comm.Allreduce(times, slowest, self._max)
        return dict(zip(calls, (np.median(slowest, axis=0) * 1e6).tolist(), strict=True))

    def _count(self, call: Call) -> int:
        """Return the number of calls of a batch, the same on all ranks."""
        self._batch(call, _WARM_UP)
        once = self._comm.allreduce(self._batch(call, _WARM_UP), self._max)
        return max(1, min(MOST_CALLS, int(self.timing.batch_s / max(once, 1e-9)) + 1))

    def _batch(self, call: Call, calls: int) -> float:
        call()
        self._stage.synchronize()
        self._comm.Barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        self._stage.synchronize()
        return (time.perf_counter() - begin) / calls


MOST_GRAPH_CALLS = 1024
_SAMPLE_US = 200.0
_MOST_QUEUED = 100
_BUDGET_S = 0.4
_SLOW_US = 2_000.0


class EventClock:
    """Measures calls on one GPU between CUDA events.

    Before the first event of a sample a kernel keeps the stream busy until the host has enqueued all calls: the time is
    the GPU's, not the host's. Samples take at least 200 us, or 100 calls.
    """

    def __init__(self, stage: Stage, repeats: int = 9) -> None:
        self._stage, self._repeats = stage, repeats
        self._delay_ns = ctypes.c_uint64(0)
        self._delay = prepared("bench", "wait", 1, 1, (self._delay_ns,), stage.device or 0)

    def measure(
        self, call: Call, *, least: int = 1, graph: bool = True
    ) -> tuple[float, float | None]:
        """Return the microseconds of a call in a stream, and in a replayed graph or None if it cannot be captured.

        Calls enqueue work on CuPy's current stream. The graph has at least so many of them.
        """
        with self._stage.current():
            for _ in range(2):
                call()
            self._stage.synchronize()
            once = self._between(call, 1, 50)
            host = self._host_us(call, 10 if once < _SLOW_US else 1)
            inner = max(1, min(_MOST_QUEUED, int(_SAMPLE_US / max(once, 1.0)) + 1))
            us = self._median(call, inner, 1.3 * inner * host + 20, inner * once) / inner
            inner = min(max(inner, least), MOST_GRAPH_CALLS)
            try:
                replay = self._stage.captured(call, inner) if graph else None
            except Exception:  # methods that cannot be captured raise many kinds of errors
                replay = None
            if replay is None:
                return us, None
            replay()
            self._stage.synchronize()
            return us, self._median(replay, 1, 150, inner * us) / inner

    def _host_us(self, call: Call, calls: int) -> float:
        """Return the median host time of a call that returns before the GPU is done."""
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - begin) / calls)
            self._stage.synchronize()
            if times[-1] * calls > _BUDGET_S / 4:
                break
        return median(times) * 1e6

    def _between(self, call: Call, calls: int, delay_us: float) -> float:
        """Return the microseconds of calls on the stream, which is kept busy until all are enqueued."""
        stream, events = self._stage.stream, self._stage.xp.cuda
        self._delay_ns.value = int(min(delay_us, 20_000) * 1e3)
        self._delay.launch(stream.ptr)
        begin, end = events.Event(), events.Event()
        begin.record(stream)
        for _ in range(calls):
            call()
        end.record(stream)
        end.synchronize()
        return float(events.get_elapsed_time(begin, end)) * 1e3

    def _median(self, call: Call, calls: int, delay_us: float, expected_us: float) -> float:
        self._between(call, calls, delay_us)
        affordable = int(_BUDGET_S * 1e6 / max(expected_us, 1.0))
        samples = range(max(3, min(self._repeats, affordable)))
        return median(self._between(call, calls, delay_us) for _ in samples)
