"""Waits in tests: short time limits for an absent rank, after a setup under a long limit, and waits asleep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from halox.runtime import waiting
from halox.runtime.waiting import Waiter

SHORT_S = 0.7
"""Time limit, long enough for a rank to publish its wait and to look again at the calls of the other ranks."""


@contextmanager
def sleeping_waits() -> Iterator[None]:
    """Make a waiting rank sleep early: in many tests a rank waits for long while others need its core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "_BUSY_S", 0.02)
        yield


@contextmanager
def short_waits(seconds: float = SHORT_S) -> Iterator[None]:
    """Limit waits that this rank begins in the context to ``seconds``, whatever HALOX_TIMEOUT was."""
    wait_long = Waiter._wait_long

    def wait(self: Waiter, *arguments: Any) -> None:
        limit_s, self.limit_s = self.limit_s, seconds
        try:
            wait_long(self, *arguments)
        finally:
            self.limit_s = limit_s

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Waiter, "_wait_long", wait)
        yield
