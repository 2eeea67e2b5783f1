"""Refusal of collective calls that two threads make at once.

An interpreter with a global lock switches threads between calls and at the ends of loops, not within a test and the
assignment that follows it: so no lock is needed where nothing is called in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from halox.errors import StateError

P = ParamSpec("P")
R = TypeVar("R")


class CallGuard:
    """Mark of the thread that is inside a collective call of an object.

    ``with guard:`` refuses other threads at once, and lets calls made within it pass. What has no time for that sets
    `user` itself, and back to 0 at the end.

    Attributes
    ----------
    user : int
        0 while no thread is inside, negative once the object is closed.
    """

    __slots__ = ("_depth", "_idle", "user")

    def __init__(self) -> None:
        self.user = self._idle = 0
        self._depth = 0

    def __enter__(self) -> None:
        """Go inside.

        Raises
        ------
        StateError
            If another thread is.
        """
        me = get_ident()
        if self.user > 0:
            if self.user != me:
                self.refuse()
            self._depth += 1
        self.user = me

    def __exit__(self, *_: object) -> None:
        """Let others in."""
        if self._depth:
            self._depth -= 1
        else:
            self.user = self._idle

    def shut(self) -> None:
        """Send calls that look at `user` alone the long way, on which they find out that the object is closed."""
        self._idle = -1
        if self.user <= 0:
            self.user = -1

    def refuse(self) -> NoReturn:
        """Raise the error of a thread that comes second."""
        raise StateError(
            "another thread is inside a collective call of this grid, exchange, transpose or allreduce; make its calls "
            "one after the other, in the same order on all ranks, or use a grid for each thread"
        )


class _OnRanks(Protocol):
    _world: Any


S = TypeVar("S", bound=_OnRanks)


def one_thread(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a collective method refuse a second thread; for objects with a ``_world``."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._world.guard:
            return method(self, *args, **kwargs)

    return call


making = CallGuard()
"""Of the making of communicators: two at once are taken for one another, or deadlock, in MPI."""


@contextmanager
def alone_in_making() -> Iterator[None]:
    """Refuse two threads that make grids, exchanges or allreduces at once, on whatever communicators.

    Raises
    ------
    StateError
        If another thread is inside.
    """
    if making.user:
        raise StateError(
            "another thread is making a grid, exchange or allreduce; make them one after the other, in the same order "
            "on all ranks, and use them in threads then"
        )
    making.user = 1
    try:
        yield
    finally:
        making.user = 0
