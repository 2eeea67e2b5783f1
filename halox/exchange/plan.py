"""The persistent plan of an exchange: started and finished every step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from halox.engine.arrays import owner
from halox.errors import ClosedError, StateError
from halox.exchange.measuring import Stopwatch
from halox.exchange.report import Report
from halox.messages import Message
from halox.transports.base import Channel

_READY, _STARTED, _FAILED = range(3)
_MOST_NAMES = 4


class LetGo(Protocol):
    """Takes over what other ranks reach of a plan that is closed: channels to free, and arrays to keep."""

    def __call__(self, channels: Sequence[Channel], arrays: Sequence[Any]) -> None:
        """Take them over."""


class _Life:
    """The state of a plan, and the arrays that must live as long as it is under way; the finalizer's share of it."""

    __slots__ = ("arrays", "state", "watched")

    def __init__(self) -> None:
        self.state = _READY
        self.arrays: tuple[Any, ...] = ()
        self.watched: tuple[weakref.ref[Any], ...] = ()

    def fail(self) -> None:
        """Keep the arrays alive, since peers may still come to them."""
        if not self.arrays:
            self.arrays = tuple(found for ref in self.watched if (found := ref()) is not None)


class Plan:
    """An exchange ready to run: ``plan()``, or ``plan.start()`` ... ``plan.finish()`` around other work.

    Made by `Grid.plan`, `Transpose.plan` and `Exchange`. Between `start` and `finish` the cells that are sent must not
    be written and the halos must not be touched.

    Attributes
    ----------
    bytes_sent, messages_sent : int
        What this rank sends to other ranks in one exchange.

    Notes
    -----
    Every rank that made the plan must call it. The plan keeps its arrays alive.

    Several plans may be under way at once; every rank may start and finish them in an order of its own. But `finish`
    may wait for the neighbours' `finish` as well, where they read this rank's cells in place (``explain`` says
    "direct"): between `start` and `finish` a rank must not wait for what a neighbour does only after its `finish`, such
    as a reduction or a message of the caller's own.

    A plan that is closed or dropped between `start` and `finish`, or after an exchange has failed, ends on this rank
    alone: messages on their way come to memory that is kept for them, and neighbours can finish theirs.

    On a GPU an exchange comes after what CuPy's current stream holds at the call, and what is put on that stream
    later comes after the exchange. Calls on changing streams run one after the other; nothing else orders streams.
    On the peer and local paths a call returns at once, and can be captured in a CUDA graph and replayed: make the
    plan before the capture, make as many exchanges on all ranks, and never replay on two streams at once. On the
    other paths the host takes part, and a capture is refused before anything is put on the stream.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        report: Report,
        messages: Sequence[Message],
        check_open: Callable[[], None],
        let_go: LetGo,
        stopwatch: Stopwatch | None = None,
        tick: Callable[[], None] | None = None,
    ) -> None:
        self._channels = tuple(channels)
        self._life = _Life()
        # What a plan holds is given back with it; not at exit, when MPI and CUDA may be gone.
        self._release = weakref.finalize(self, _close, self._channels, self._life, let_go)
        self._release.atexit = False
        self._checks = tuple(c.check for c in channels if type(c).check is not Channel.check)
        counted = () if tick is None else (tick,)
        self._starts = (*counted, *(channel.start for channel in channels))
        self._starts_at_once = (*counted, *(channel.start_at_once for channel in channels))
        self._finishes = tuple(channel.finish for channel in channels)
        self._report = report
        self._stopwatch = stopwatch
        self._check_open = check_open
        self.arrays: tuple[Any, ...] = ()
        sent = [m for m in messages if m.direction == "send" and m.peer != report.rank]
        self.bytes_sent = sum(m.nbytes for m in sent)
        self.messages_sent = len(sent)

    def __call__(self) -> None:
        """Run one exchange, on a GPU on the current stream; errors as of `start` and `finish`."""
        life = self._enter(_READY, "called between start() and finish(); call finish() first")
        try:
            for start in self._starts_at_once:
                start()
            for finish in self._finishes:
                finish()
        except BaseException:
            life.arrays = self.arrays
            life.fail()
            raise
        life.state = _READY

    def hold(self, arrays: Sequence[Any], *, alive: bool) -> None:
        """Keep the plan's arrays alive: always, or only from a failure on."""
        if alive:
            self.arrays = tuple(arrays)
        watched = []
        for array in arrays:
            with suppress(
                TypeError
            ):  # what is no array of NumPy's or CuPy's may not let itself be watched
                watched.append(weakref.ref(owner(array)))
        self._life.watched = tuple(watched)

    def start(self) -> None:
        """Begin an exchange.

        Raises
        ------
        StateError
            If the last one was not finished, or has failed; if the current stream is being captured, and a path
            of the plan cannot be.
        ClosedError
            If the plan, the grid or the exchange was closed.
        ExchangeTimeoutError
            If a neighbour does not come within ``HALOX_TIMEOUT`` seconds; on the peer path, if one did not come to
            an earlier exchange. What was received in that and since is not valid.

        Notes
        -----
        On the peer path the exchange runs on a stream of its own, of high priority, beside what is put on the
        current stream until `finish`. On the other paths of a GPU the packing goes to the current stream.
        """
        life = self._enter(_READY, "start() was called twice; call finish() between two starts")
        life.arrays = self.arrays
        for start in self._starts:
            start()
        life.state = _STARTED

    def finish(self) -> None:
        """End the exchange: the halos hold the neighbours' values, on a GPU for what is put on the current stream now.

        Raises
        ------
        StateError
            If it was not started, or has failed; if the current stream is being captured, and a path of the plan
            cannot be.
        ClosedError
            If the plan, the grid or the exchange was closed.
        ExchangeTimeoutError
            If a neighbour does not come within ``HALOX_TIMEOUT`` seconds.
        """
        life = self._enter(_STARTED, "finish() was called without start(); call start() first")
        for finish in self._finishes:
            finish()
        life.arrays = ()
        life.state = _READY

    def _enter(self, expected: int, misuse: str) -> _Life:
        """Check that a call is in order; what it does counts as failed until it has come to its end."""
        self._check_open()
        life = self._life
        if life.state != expected:
            if life.state == _FAILED:
                misuse = "an exchange of this plan has failed on the way; make a new grid to go on"
            raise StateError(misuse)
        for check in self._checks:
            check()
        life.state = _FAILED
        return life

    def explain(self) -> Report:
        """Return, for each message, its bytes, runs, path, the reason for it, and microseconds.

        Notes
        -----
        Not collective. Predicted times are there for arrays on a GPU, measured ones after `measure`.
        """
        return self._report

    def measure(self, repeats: int = 20) -> Report:
        """Measure how long exchanges take, path by path, and return the report with the times in it.

        Parameters
        ----------
        repeats : int
            Exchanges in a row between two looks at the clock; the same on all ranks.

        Returns
        -------
        Report
            As of `explain`, here and from now on. A message's measured time is that of all messages which go its
            path together, both ways, on the slowest rank.

        Raises
        ------
        HaloxError
            On all ranks, if ``repeats`` is no number of exchanges, or differs between ranks.
        StateError
            If the last exchange was not finished, or has failed.
        ClosedError
            If the plan, the grid or the exchange was closed.
        ExchangeTimeoutError
            If a neighbour does not come within ``HALOX_TIMEOUT`` seconds.

        Notes
        -----
        Collective. Waits for the current stream, so that it cannot be captured. The arrays' contents are exchanged
        as in normal calls, some hundred times: cells that are received and sent on travel on each time.
        """
        self._check_open()
        if self._stopwatch is None:
            raise StateError("this plan was made without a stopwatch; make it with grid.plan()")
        repeats = self._stopwatch.check(repeats)
        life = self._enter(
            _READY, "measure() was called between start() and finish(); call finish() first"
        )
        found = self._stopwatch.measure(self._channels, repeats)
        self._report = self._report.measured(found)
        life.state = _READY
        return self._report

    def close(self) -> None:
        """Give back buffers and requests; local, and harmless when repeated.

        What other ranks may still reach is given back when they have closed the plan too.
        """
        self._release()
        self._channels = self._checks = self._starts = self._starts_at_once = self._finishes = ()
        self._check_open = _raise_closed

    def __repr__(self) -> str:
        """Return what it moves, and its state."""
        return f"<halox.Plan of {self._summary()}>"

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        return self._report._repr_html_()

    def _summary(self) -> str:
        state = {_READY: "", _STARTED: ", started", _FAILED: ", failed"}[self._life.state]
        report, more = self._report, len(self._report.arrays) - _MOST_NAMES
        names = ", ".join(report.arrays[:_MOST_NAMES]) or "nothing"
        names += f" and {more} more" if more > 0 else ""
        return (
            f"rank {report.rank}: {report.operation} of {names}, {self.messages_sent} message(s) of "
            f"{self.bytes_sent} bytes to other ranks{', closed' if self._is_closed else state}"
        )

    @property
    def _is_closed(self) -> bool:
        return self._check_open is _raise_closed


def _close(channels: Sequence[Channel], life: _Life, let_go: LetGo) -> None:
    # What was made first is what the others stand on.
    backwards = channels[::-1]
    for channel in backwards:
        channel.close()
    if life.state != _READY or any(channel.has_failed for channel in channels):
        life.fail()
    let_go(backwards, life.arrays)


def _raise_closed() -> None:
    raise ClosedError("the plan is closed; make a new one")
