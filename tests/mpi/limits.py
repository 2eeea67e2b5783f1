"""Short limits on waits for ranks that do not come, after everything has been made under a long one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from halox.runtime.waiting import Waiter

SHORT_S = 0.7
"""Long enough for a wait to be published, and for another look at the ranks that are waited for."""


@contextmanager
def short_waits(seconds: float = SHORT_S) -> Iterator[None]:
    """Let waits of this rank that begin inside give up after ``seconds``, whatever HALOX_TIMEOUT was."""
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
