"""Adds up the time of many short intervals, on the host's clock or in a GPU's stream."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


class Stopwatch:
    """Sums the intervals between `start` and `stop`.

    Parameters
    ----------
    xp : module
        The module of the arrays worked on: NumPy's intervals are taken on the host's clock, CuPy's
        with events in the current stream, so that nothing waits.
    """

    def __init__(self, xp: Any = np) -> None:
        self._xp = xp
        self._on_host = xp is np
        self._seconds = 0.0
        self._begin = 0.0
        self._events: list[Any] = []

    def start(self) -> None:
        """Begin an interval."""
        if self._on_host:
            self._begin = time.perf_counter()
        else:
            self._record()

    def stop(self) -> None:
        """End the interval."""
        if self._on_host:
            self._seconds += time.perf_counter() - self._begin
        else:
            self._record()

    def seconds(self) -> float:
        """Return the sum; on a device, wait for the last interval."""
        if self._on_host or not self._events:
            return self._seconds
        self._events[-1].synchronize()
        pairs = zip(self._events[::2], self._events[1::2], strict=True)
        elapsed_ms = self._xp.cuda.get_elapsed_time
        return sum(float(elapsed_ms(begin, end)) for begin, end in pairs) / 1e3

    def _record(self) -> None:
        event = self._xp.cuda.Event()
        event.record()
        self._events.append(event)
