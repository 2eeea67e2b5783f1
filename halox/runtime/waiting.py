"""Waits for other ranks, with a limit: ``HALOX_TIMEOUT``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from halox.errors import ExchangeTimeoutError, HaloxError
from halox.runtime.status import CallWatch

DEFAULT_TIMEOUT_S = 300.0
"""Seconds to wait for another rank where ``HALOX_TIMEOUT`` is not set."""

_MOST_S = 1e9
SPINS = 200
"""Looks at a flag before a wait is made of it, where ranks have cores of their own."""

_SPINS_BEFORE_YIELD = 200
_YIELDS_BEFORE_CLOCK = 200
_LOOK_EVERY_S = 0.25
_BUSY_S = 1.0
_NAP_S = 0.0005

Ranks = Callable[[], Sequence[int]]
"""Returns the ranks that are waited for."""


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


UNDER_WAY: dict[object, Callable[[], object]] = {}
"""Exchanges between ``start`` and ``finish`` whose neighbours may wait for a step of this rank; empty in most programs.

An exchange that reads the neighbours' arrays in place ends when they have read this rank's cells too. Were that
done in ``finish`` alone, two plans finished in another order on each rank would deadlock::

    A: p.start | q.start | p.finish: waits for B to read ............ | q.finish
    B: p.start | q.start | q.finish: waits for A to read ............ | p.finish

So a waiting rank takes the steps of the other exchanges that it has started, as soon as they can be taken. Each has
here the function that takes its step, if that can be taken, and does not wait.
"""


class Waiter:
    """Wait for a condition: busily at first, then yielding to other ranks on the core.

    ``limit_s`` seconds at most, 0 for no limit; ``crowded`` ranks share cores, so that spinning would only delay the
    others; ``watch`` observes long waits.
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

        Raises `ExchangeTimeoutError` after the limit, or as soon as a rank that is waited for has ended, and
        `MismatchError` if another rank has made another call.
        """
        for _ in range(self.spins):
            if ready():
                return
        give_way = os.sched_yield
        for _ in range(_YIELDS_BEFORE_CLOCK):
            if ready():
                return
            give_way()
        self._wait_long(ready, what, ranks)

    def _wait_long(self, ready: Callable[[], bool], what: Callable[[], str], ranks: Ranks) -> None:
        start = time.monotonic()
        next_look = start + _LOOK_EVERY_S
        watch, is_published = self.watch, False
        try:
            while not ready():
                for step in list(UNDER_WAY.values()):
                    step()
                now = time.monotonic()
                if now - start > _BUSY_S:
                    time.sleep(_NAP_S)
                else:
                    os.sched_yield()
                is_late = bool(self.limit_s) and now - start > self.limit_s
                if now < next_look and not is_late:
                    continue
                next_look = now + _LOOK_EVERY_S
                try:
                    if is_late:
                        raise self._timeout(what, ranks)
                    if watch is not None and is_published:
                        watch.look(ranks(), now - start)
                except HaloxError:
                    if ready():  # since the last look
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
