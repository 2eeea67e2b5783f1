"""Times of GPU work: in a stream that is never empty, and in a replayed graph."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.launch import PreparedLaunch
from halox_bench.common.kernels import defines, kernel

Call = Callable[[int, int], None]
"""Enqueues work on a stream, given by its address; the second argument is the number of the turn."""

SAMPLE_US = 200.0
"""Shortest reliable time between two events."""

MOST_CALLS = 100
"""Calls of a sample: the driver queues some thousand launches before the host waits."""

MOST_GRAPH_CALLS = 1024
_BUDGET_S = 0.4
_FEWEST = 3
_LONGEST_DELAY_US = 20_000.0
_SLOW_US = 2_000.0


@dataclass(frozen=True)
class Timed:
    """Median microseconds of a call.

    Attributes
    ----------
    us : float
        In a stream, or on the host's clock for host memory.
    graph_us : float or None
        In a replayed graph, if the call can be captured.
    host_us : float or None
        Host time of one call.
    """

    us: float
    graph_us: float | None = None
    host_us: float | None = None
    note: str = ""


class Clock:
    """Measures calls on one GPU.

    Parameters
    ----------
    device : int
        The GPU; made current.
    repeats : int
        Samples for a median; fewer if they take long.

    Attributes
    ----------
    stream : cupy.cuda.Stream
        Stream of all measurements; independent of the default stream.

    Notes
    -----
    Not collective. Before a sample's first event a kernel keeps the stream busy until the host has
    enqueued all calls: the GPU's time is measured, not the host's launches.
    """

    def __init__(self, device: int, repeats: int = 11) -> None:
        self._cp = cupy()
        self._cp.cuda.Device(device).use()
        self.repeats = repeats
        # The highest priority, as messages should have.
        self.stream = self._cp.cuda.Stream(non_blocking=True, priority=-5)
        settings = defines("bench")
        self._delay_ns = ctypes.c_uint64(0)
        self._delay = PreparedLaunch(
            kernel("bench", "wait", device, settings), 1, 1, (self._delay_ns,), device=device
        )
        self._nothing = PreparedLaunch(
            kernel("bench", "nothing", device, settings), 1, 32, (), device=device
        )

    def empty(self) -> Timed:
        """Measure the launch of an empty kernel: no call that launches can take less."""
        return self.measure(lambda stream, _: self._nothing.launch(stream))

    def measure(self, call: Call, *, turns: int = 1, graph: bool = True, note: str = "") -> Timed:
        """Measure a call.

        Parameters
        ----------
        call : callable
            Called with the stream's address and in turn ``0 .. turns - 1``.
        turns : int
            Number of turns.
        graph : bool
            Whether to measure a replayed graph as well.
        note : str
            Remark for the result.
        """
        turning = _Turns(call, turns)
        for _ in range(2):
            turning(self.stream.ptr)
        self.stream.synchronize()
        once = self._sample(turning, 1, 50)
        host_us = self._host_us(turning, 10 if once < _SLOW_US else 1)
        inner = max(1, min(MOST_CALLS, int(SAMPLE_US / max(once, 1.0)) + 1))
        us = self._median(lambda: self._sample(turning, inner, host_us) / inner, inner * once)
        graph_us = self._graph_us(turning, max(inner, turns), us) if graph else None
        return Timed(us, graph_us, host_us, note)

    def host_us(self, call: Callable[[], Any], calls: int = 20) -> float:
        """Median host time of a call that returns before the GPU is done."""
        return self._host_us(lambda _: call(), calls)

    def _host_us(self, turning: Callable[[int], Any], calls: int = 10) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(calls):
                turning(self.stream.ptr)
            times.append((time.perf_counter() - begin) / calls)
            self.stream.synchronize()
            if times[-1] * calls > _BUDGET_S / 4:
                break
        return median(times) * 1e6

    def _sample(self, turning: Callable[[int], Any], inner: int, host_us: float) -> float:
        """Microseconds between events before and after ``inner`` calls."""

        def calls() -> None:
            for _ in range(inner):
                turning(self.stream.ptr)

        return self._between_events(calls, 1.3 * inner * host_us + 20)

    def _between_events(self, put: Callable[[], None], delay_us: float) -> float:
        """Microseconds of work on the stream, which is kept busy until all work is enqueued."""
        self.keep_busy(delay_us)
        begin, end = self._cp.cuda.Event(), self._cp.cuda.Event()
        begin.record(self.stream)
        put()
        end.record(self.stream)
        end.synchronize()
        return float(self._cp.cuda.get_elapsed_time(begin, end)) * 1e3

    def keep_busy(self, us: float) -> None:
        """Keep the stream busy for some microseconds, with one thread that touches no memory."""
        self._delay_ns.value = int(min(us, _LONGEST_DELAY_US) * 1e3)
        self._delay.launch(self.stream.ptr)

    def _median(self, sample: Callable[[], float], expected_us: float) -> float:
        sample()
        affordable = int(_BUDGET_S * 1e6 / max(expected_us, 1.0))
        return median(sample() for _ in range(max(_FEWEST, min(self.repeats, affordable))))

    def _graph_us(self, turning: _Turns, inner: int, us: float) -> float | None:
        """Microseconds a call of a replayed graph of ``inner`` calls; None if capturing fails."""
        inner = min(inner, MOST_GRAPH_CALLS)
        graph = self._captured(turning, inner)
        if graph is None:
            return None
        graph.launch(self.stream)
        self.stream.synchronize()

        def sample() -> float:
            return self._between_events(lambda: graph.launch(self.stream), 150) / inner

        return self._median(sample, inner * us)

    def _captured(self, turning: _Turns, inner: int) -> Any:
        # A new stream each time: a failed capture leaves its stream unusable.
        stream = self._cp.cuda.Stream(non_blocking=True)
        turning.restart()
        graph = None
        try:
            stream.begin_capture()
            for _ in range(inner):
                turning(stream.ptr)
            graph = stream.end_capture()
        except Exception:
            # Methods that cannot be captured raise many kinds of errors.
            with suppress(Exception):
                stream.end_capture()
        return graph


class _Turns:
    """A call that is given the next turn each time."""

    def __init__(self, call: Call, turns: int) -> None:
        self._call, self._turns, self._next = call, turns, 0

    def restart(self) -> None:
        """Begin again with the first turn."""
        self._next = 0

    def __call__(self, stream: int) -> None:
        turn = self._next
        self._next = turn + 1 if turn + 1 < self._turns else 0
        self._call(stream, turn)
