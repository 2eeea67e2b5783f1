"""A line on the terminal that shows how far a long run has come."""

from __future__ import annotations

import os
import sys
import time

_TERMINAL = "HALOX_TERMINAL"
_MIN_INTERVAL_S = 0.2


def announce_terminal() -> None:
    """Tell ranks started from here that a person watches: their own stderr is a pipe."""
    if sys.stderr.isatty():
        os.environ[_TERMINAL] = "1"


class TerminalProgress:
    """Writes ``what done/total`` over and over into one line of stderr.

    Parameters
    ----------
    rank : int
        Only rank 0 writes.

    Notes
    -----
    Not collective. Silent unless stderr is a terminal, here or where ``halox run`` was typed.
    """

    def __init__(self, rank: int) -> None:
        self._shown = rank == 0 and (sys.stderr.isatty() or os.environ.get(_TERMINAL) == "1")
        self._last = 0.0
        self._width = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show ``what`` as ``done`` of ``total``; calls that come too soon are left out."""
        now = time.monotonic()
        if not self._shown or now - self._last < _MIN_INTERVAL_S:
            return
        self._last = now
        self._write(f"{what}: {done} of {total}")

    def clear(self) -> None:
        """Wipe the line, so that results do not stand behind it."""
        if self._width:
            self._write("")

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._width) + ("" if text else "\r"))
        sys.stderr.flush()
        self._width = len(text)
