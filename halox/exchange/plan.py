"""The persistent plan of an exchange: started and finished every step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from halox.errors import ClosedError, StateError
from halox.exchange.report import Report
from halox.messages import Message
from halox.transports.base import Channel

_READY, _STARTED, _FAILED = range(3)


class Plan:
    """An exchange ready to run: ``plan()``, or ``plan.start()`` ... ``plan.finish()`` around other work.

    Made by `Grid.plan` and `Exchange`. Between `start` and `finish` the cells that are sent must not be written
    and the halos must not be touched. On a GPU the work goes to CuPy's current stream at each call.

    Attributes
    ----------
    bytes_sent, messages_sent : int
        What this rank sends to other ranks in one exchange.

    Notes
    -----
    Every rank that made the plan must call it. The plan keeps its arrays alive.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        report: Report,
        messages: Sequence[Message],
        check_open: Callable[[], None],
    ) -> None:
        self._channels = tuple(channels)
        # What a plan holds is given back with it; not at exit, when MPI and CUDA may be gone.
        self._release = weakref.finalize(self, _close, self._channels)
        self._release.atexit = False
        self._starts = tuple(channel.start for channel in channels)
        self._finishes = tuple(channel.finish for channel in channels)
        self._report = report
        self._check_open = check_open
        self._state = _READY
        self.arrays: tuple[Any, ...] = ()
        sent = [m for m in messages if m.direction == "send" and m.peer != report.rank]
        self.bytes_sent = sum(m.nbytes for m in sent)
        self.messages_sent = len(sent)

    def __call__(self) -> None:
        """Run one exchange; errors as of `start` and `finish`."""
        self._enter(_READY, "called between start() and finish(); call finish() first")
        for start in self._starts:
            start()
        for finish in self._finishes:
            finish()
        self._state = _READY

    def start(self) -> None:
        """Begin an exchange.

        Raises
        ------
        StateError
            If the last one was not finished, or has failed.
        ClosedError
            If the plan, the grid or the exchange was closed.
        ExchangeTimeoutError
            If a neighbour does not come within ``HALOX_TIMEOUT`` seconds.
        """
        self._enter(_READY, "start() was called twice; call finish() between two starts")
        for start in self._starts:
            start()
        self._state = _STARTED

    def finish(self) -> None:
        """End the exchange: the halos hold the neighbours' values.

        Raises
        ------
        StateError
            If it was not started, or has failed.
        ClosedError
            If the plan, the grid or the exchange was closed.
        ExchangeTimeoutError
            If a neighbour does not come within ``HALOX_TIMEOUT`` seconds.
        """
        self._enter(_STARTED, "finish() was called without start(); call start() first")
        for finish in self._finishes:
            finish()
        self._state = _READY

    def _enter(self, expected: int, misuse: str) -> None:
        """Check that a call is in order; what it does counts as failed until it has come to its end."""
        self._check_open()
        if self._state != expected:
            if self._state == _FAILED:
                misuse = "an exchange of this plan has failed on the way; make a new grid to go on"
            raise StateError(misuse)
        self._state = _FAILED

    def explain(self) -> Report:
        """Return, for each message, its bytes, runs, path and the reason for it."""
        return self._report

    def close(self) -> None:
        """Give back buffers and requests; local, and harmless when repeated."""
        self._release()
        self._channels = self._starts = self._finishes = ()
        self._check_open = _raise_closed

    def __repr__(self) -> str:
        """Return a short description."""
        return (
            f"<halox.Plan: {self.messages_sent} messages, {self.bytes_sent} bytes to other ranks>"
        )


def _close(channels: Sequence[Channel]) -> None:
    # What was made first is what the others stand on.
    for channel in reversed(channels):
        channel.close()


def _raise_closed() -> None:
    raise ClosedError("the plan is closed; make a new one")
