"""Waits for other ranks, with a limit: ``HALOX_TIMEOUT``.

All waits of the host go through `Waiter.until`. During long waits it checks the progress of the other ranks, and raises
an error if they can no longer make the call that this rank waits for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from halox.errors import ExchangeTimeoutError, HaloxError
from halox.runtime.status import CallWatch

DEFAULT_TIMEOUT_S = 300.0
"""Default time limit of a wait in seconds, if ``HALOX_TIMEOUT`` is not set."""

_MOST_S = 1e9  # a larger limit means no limit
SPINS = 200
"""Number of polls of a flag before a `Waiter` is used, if the ranks do not share cores."""

_SPINS_BEFORE_YIELD = 200
_YIELDS_BEFORE_CLOCK = 200
_CHECK_EVERY_S = 0.25  # the progress of the other ranks
_BUSY_S = 1.0  # afterwards, sleep between two polls
_NAP_S = 0.0005

Ranks = Callable[[], Sequence[int]]
"""Function that returns the ranks that are waited for."""


def timeout_s() -> float:
    """Return ``HALOX_TIMEOUT`` in seconds, 0 for no limit; raise `HaloxError` for other texts."""
    text = os.environ.get("HALOX_TIMEOUT", "")
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise HaloxError(
            f"HALOX_TIMEOUT={text!r}: expected a number of seconds >= 0, 0 for no limit"
        )
    return seconds if seconds < _MOST_S else 0.0


STARTED_STEPS: dict[object, Callable[[], object]] = {}
"""Step functions of exchanges between ``start`` and ``finish`` for which neighbours may wait; usually empty.

On some paths an exchange reads the neighbours' arrays in place. The exchange ends when the neighbours have also read
this rank's cells. If each rank did its reads only in ``finish``, two plans that are finished in a different order on
each rank would deadlock::

    A: p.start | q.start | p.finish: waits for B to read ............ | q.finish
    B: p.start | q.start | q.finish: waits for A to read ............ | p.finish

So a waiting rank also performs the steps of the other exchanges that it has started. The step function of an exchange
performs the exchange's step if it is possible now, and does not block.
"""


class Waiter:
    """Wait for a condition: first by busy polling, then yielding to other ranks on the core, then sleeping.

    A wait lasts at most ``limit_s`` seconds; 0 means no limit. ``crowded`` ranks share cores and do not spin, since
    spinning would delay the other ranks. ``watch`` checks the ranks' progress during long waits.
    """

    __slots__ = ("limit_s", "spins", "watch")

    def __init__(self, limit_s: float, crowded: bool, watch: CallWatch | None = None) -> None:
        self.limit_s = limit_s
        self.spins = 0 if crowded else _SPINS_BEFORE_YIELD
        self.watch = watch

    def until(
        self,
        ready: Callable[[], bool],
        what: Callable[[], str],
        ranks: Ranks = tuple,
    ) -> None:
        """Return once ``ready()`` is true; ``what`` describes the wait in the text of a timeout.

        Raises `ExchangeTimeoutError` after the limit, or once the process of an awaited rank has ended. Raises
        `MismatchError` if another rank has made a different call.
        """
        for _ in range(self.spins):
            if ready():
                return
        yield_core = os.sched_yield
        for _ in range(_YIELDS_BEFORE_CLOCK):
            if ready():
                return
            yield_core()
        self._wait_long(ready, what, ranks)

    def _wait_long(self, ready: Callable[[], bool], what: Callable[[], str], ranks: Ranks) -> None:
        start = time.monotonic()
        next_check = start + _CHECK_EVERY_S
        watch, is_published = self.watch, False
        try:
            while not ready():
                for step in list(STARTED_STEPS.values()):
                    step()
                now = time.monotonic()
                if now - start > _BUSY_S:
                    time.sleep(_NAP_S)
                else:
                    os.sched_yield()
                is_late = bool(self.limit_s) and now - start > self.limit_s
                if now < next_check and not is_late:
                    continue
                next_check = now + _CHECK_EVERY_S
                try:
                    if is_late:
                        raise self._timeout(what, ranks)
                    if watch is not None and is_published:
                        watch.look(ranks(), now - start)
                except HaloxError:
                    if ready():  # became true since the last poll
                        return
                    raise
                if watch is not None and not is_published:
                    is_published = True
                    watch.publish(waits=True)
        finally:
            if is_published and watch is not None:
                watch.publish(waits=False)

    def _timeout(self, what: Callable[[], str], ranks: Ranks) -> ExchangeTimeoutError:
        report = "" if self.watch is None else self.watch.report(ranks())
        return ExchangeTimeoutError(
            f"{what()} for {self.limit_s:g} s (HALOX_TIMEOUT){report}; a rank has failed, is far "
            "behind, or has made another sequence of calls"
        )
