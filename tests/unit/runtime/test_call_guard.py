"""The guard of collective calls: a thread may nest calls, and an error does not lock others out for good."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from halox.errors import StateError
from halox.runtime.call_guard import CallGuard


def test_one_thread_at_a_time_and_none_after_an_error():
    guard = CallGuard()

    def enter() -> bool:
        with guard:
            return True

    with ThreadPoolExecutor(1) as other:
        with guard, guard, pytest.raises(StateError):
            other.submit(enter).result()
        with pytest.raises(ValueError, match="any"), guard, guard:
            raise ValueError("any")
        assert other.submit(enter).result()
