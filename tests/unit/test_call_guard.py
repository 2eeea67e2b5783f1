"""The guard of collective calls: one thread at a time, which may nest calls, and no permanent lockout."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from halox.errors import StateError
from halox.runtime.call_guard import CallGuard, alone_in_making, single_threaded


def in_another_thread(call):
    with ThreadPoolExecutor(1) as other:
        return other.submit(call).result()


def enter(guard):
    with guard:
        return guard.user


def test_a_second_thread_is_refused_while_the_first_is_inside():
    guard = CallGuard()
    with guard, guard:
        with guard:
            pass
        with pytest.raises(StateError, match="another thread is inside"):
            in_another_thread(lambda: enter(guard))
    assert guard.user == 0 and in_another_thread(lambda: enter(guard)) > 0
    guard.user = 1  # hot paths set `user` directly
    with pytest.raises(StateError, match="another thread"):
        enter(guard)


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


def test_a_method_for_one_thread():
    class Grid:
        _world = SimpleNamespace(guard=CallGuard())

        @single_threaded
        def sum(self, a, *, b):
            """Add."""
            if b is None:
                return in_another_thread(lambda: self.sum(a, b=1))
            return a + b

    assert Grid().sum(1, b=2) == 3 and Grid.sum.__doc__ == "Add."
    with pytest.raises(StateError):
        Grid().sum(1, b=None)


def test_the_making_of_communicators():
    def make():
        with alone_in_making():
            return True

    with alone_in_making(), pytest.raises(StateError, match="another thread is making"):
        in_another_thread(make)
    assert in_another_thread(make)
