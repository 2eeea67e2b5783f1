"""The guard of collective calls: one thread at a time, which may nest calls, and no permanent lockout."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from halox.runtime.call_guard import CallGuard


def in_another_thread(call):
    with ThreadPoolExecutor(1) as other:
        return other.submit(call).result()


def enter(guard):
    with guard:
        return guard.user


def test_an_error_lets_others_in():
    guard = CallGuard()
    with pytest.raises(ValueError, match="any"), guard, guard:
        raise ValueError("any")
    assert in_another_thread(lambda: enter(guard))


def test_a_guard_that_is_shut_is_seen_by_those_that_look_at_it_alone():
    guard = CallGuard()
    with guard:
        guard.shut()
    assert guard.user < 0
    assert enter(guard) > 0 and guard.user < 0
    other = CallGuard()
    other.shut()
    assert other.user < 0
