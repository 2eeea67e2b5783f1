"""Where the time goes: the seconds of every step, on the host's clock or by a GPU's events."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from .cycle import Step


class Stopwatch:
    """Adds up the seconds of steps, by part and by level.

    Parameters
    ----------
    xp : module
        NumPy's steps are timed on the host's clock; CuPy's by events in the current stream, so that
        nothing waits in between.
    """

    def __init__(self, xp: Any = np) -> None:
        self._xp = xp
        self._on_host = xp is np
        self._marks: list[tuple[Step, Any, Any]] = []

    def run(self, steps: Iterable[Step]) -> None:
        """Do the steps in order."""
        end = self._mark()
        for step in steps:
            begin = end
            step.call()
            end = self._mark()
            self._marks.append((step, begin, end))

    def seconds(self) -> list[tuple[Step, float]]:
        """Return the steps done and the time of each; on a device, wait for the last."""
        if self._on_host:
            return [(step, end - begin) for step, begin, end in self._marks]
        if self._marks:
            self._marks[-1][2].synchronize()
        elapsed_ms = self._xp.cuda.get_elapsed_time
        return [(step, float(elapsed_ms(begin, end)) / 1e3) for step, begin, end in self._marks]

    def _mark(self) -> Any:
        if self._on_host:
            return time.perf_counter()
        event = self._xp.cuda.Event()
        event.record()
        return event
