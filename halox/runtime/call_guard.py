"""Refusal of collective calls that two threads make at once.

An interpreter with a global lock switches threads between calls and at the ends of loops, not within a test and the
assignment that follows it: so no lock is needed where nothing is called in between.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import TYPE_CHECKING, Concatenate, NoReturn, ParamSpec, Protocol, Self, TypeVar

from halox.errors import ExchangeTimeoutError, HaloxError, StateError

if TYPE_CHECKING:
    from halox.runtime.status import CallWatch
    from halox.runtime.world import World

P = ParamSpec("P")
R = TypeVar("R")


class _Guarded(Protocol):
    @property
    def _world(self) -> World: ...


S = TypeVar("S", bound=_Guarded)


class _LateClose:
    """Close of a collected object, called when this is dropped: an error is none of a call, but of a finalizer.

    Not at exit, when MPI and CUDA may be gone.
    """

    def __init__(self, close: Callable[[], object]) -> None:
        self._close = close

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting():
            self._close()


_waiting: deque[tuple[CallGuard, _LateClose]] = deque()
"""Closes put off, with their guards; of the process, since a guard's owner may be collected as well."""


class CallGuard:
    """Mark of the thread that is inside a collective call of an object.

    ``with guard:`` refuses other threads with a `StateError` and admits calls made within it. Hot paths set `user` by
    themselves, and back to 0 at the end; it is negative once the object is closed.

    A call that ends on this rank alone, by a time-out, an interruption or a fault, leaves the ranks apart: the guard
    then ends all calls on the communicator of ``watch``, which is None for a rank alone. ``has_begun`` says that the
    call has been counted; an error before concerns nobody else.
    """

    __slots__ = ("_depth", "_idle", "has_begun", "user", "watch")

    def __init__(self) -> None:
        self.user = self._idle = 0
        self._depth = 0
        self.has_begun = False
        self.watch: CallWatch | None = None

    def __enter__(self) -> None:
        """Mark this thread, or raise `StateError` if another one is inside."""
        me = get_ident()
        if self.user > 0:
            if self.user != me:
                self.refuse()
            self._depth += 1
        else:
            self.has_begun = False
        self.user = me

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Admit others."""
        if self._depth:
            self._depth -= 1
        else:
            if error is not None and self.has_begun:
                self.fail(error)
            self.user = self._idle
            if _waiting:
                close_collected()

    def fail(self, error: BaseException) -> None:
        """End all calls after an error of a collective call, unless the ranks have raised it together."""
        is_common = isinstance(error, HaloxError) and not isinstance(error, ExchangeTimeoutError)
        if self.watch is not None and not is_common:
            self.watch.fail(f"{type(error).__name__}: {error}")
            self.shut()

    def leave(self, error: BaseException) -> None:
        """End a call of a hot path after an error, and all calls where it is this rank's alone."""
        self.fail(error)
        self.user = self._idle

    def spoil(self) -> None:
        """Keep the communicator from later objects, which messages of a failed exchange might reach."""
        if self.watch is not None:
            self.watch.is_spoiled = True

    def outside(self, close: Callable[[], object]) -> None:
        """Close what has been collected: at once, or after the call that is under way, which it may disturb.

        For finalizers, which run in the middle of anything. A call that sets `user` by itself leaves it to the next one
        that does not.
        """
        if self.user > 0:
            _waiting.append((self, _LateClose(close)))
        else:
            close()

    def shut(self) -> None:
        """Make hot paths, which look at `user` alone, take the checked path, where the object is found closed."""
        self._idle = -1
        if self.user <= 0:
            self.user = -1

    def refuse(self) -> NoReturn:
        """Raise the error of a second thread."""
        raise StateError(
            "another thread is inside a collective call of this grid, exchange, transpose or allreduce; make its calls "
            "one after the other, in the same order on all ranks, or use a grid for each thread"
        )


def close_collected() -> None:
    """Close what has been collected in calls that have ended."""
    for _ in range(len(_waiting)):
        try:
            guard, closing = _waiting.popleft()
        except IndexError:  # of another thread, meanwhile
            return
        if guard.user > 0:
            _waiting.append((guard, closing))
        del guard, closing


def one_thread(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a collective method refuse a second thread; for objects with a ``_world``."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._world.guard:
            return method(self, *args, **kwargs)

    return call


class Unique:
    """Object of this process and its ranks: a copy would share what only one can use."""

    def __reduce_ex__(self, _: object) -> NoReturn:
        """Refuse `copy`, `pickle`, and what stands on them."""
        raise StateError(
            f"a {type(self).__name__} belongs to this process and its ranks, and cannot be copied or pickled; make "
            "another one with the same arguments (fields are arrays, which can)"
        )


class Closing(Unique):
    """Context manager that closes itself at its end, unless an error is propagating: other ranks may not take part."""

    def close(self) -> None:
        """Free what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close it after a block without an error."""
        if kind is None:
            self.close()


making = CallGuard()
"""Of the making of communicators: two at once are taken for one another, or deadlock, in MPI."""


@contextmanager
def alone_in_making() -> Iterator[None]:
    """Raise `StateError` if two threads make grids, exchanges or allreduces at once, on any communicators."""
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
