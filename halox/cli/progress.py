"""A progress line on the terminal, for mini-apps and ``halox tune``."""

from __future__ import annotations

import os
import sys
import time

_TERMINAL = "HALOX_TERMINAL"
_MIN_INTERVAL_S = 0.2


def announce_terminal() -> None:
    """Tell ranks started by this process that stderr is a terminal; for the ranks stderr is a pipe."""
    if os.isatty(2):
        os.environ[_TERMINAL] = "1"


class TerminalProgress:
    """Progress line on rank 0's stderr; silent unless stderr is a terminal."""

    def __init__(self, rank: int) -> None:
        self._is_shown = rank == 0 and (os.isatty(2) or os.environ.get(_TERMINAL) == "1")
        self._last = 0.0
        self._width = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show a title with ``done`` of ``total``; skip calls that follow too soon."""
        now = time.monotonic()
        if not self._is_shown or now - self._last < _MIN_INTERVAL_S:
            return
        self._last = now
        self._write(f"{what}: {done} of {total}")

    def clear(self) -> None:
        """Clear the line before results are printed."""
        if self._width:
            self._write("")

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._width) + ("" if text else "\r"))
        sys.stderr.flush()
        self._width = len(text)
