"""Guard against collective calls from two threads at once.

All collective calls on a communicator enter its `CallGuard`. It marks the thread inside the call, refuses other
threads, and disables the communicator once a call has failed on one rank alone. It also defers the closing of collected
objects until the call has ended.

An interpreter with a global lock switches threads only at calls and at the ends of loops. It does not switch between a
test and the assignment that follows it. So this code needs no lock where it makes no call between the two.
"""

from __future__ import annotations

import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from typing import TYPE_CHECKING, Concatenate, NoReturn, ParamSpec, Protocol, Self, TypeVar

from halox.errors import ExchangeTimeoutError, HaloxError, StateError, stripped

if TYPE_CHECKING:
    from halox.runtime.status import CallWatch

_IN_FUNCTION = 1
"""Mark of a user's function: no number of a thread, so that a call of this thread is refused, too."""

P = ParamSpec("P")
R = TypeVar("R")


class _Ranks(Protocol):
    guard: CallGuard


class _Guarded(Protocol):
    @property
    def _world(self) -> _Ranks: ...


S = TypeVar("S", bound=_Guarded)


_deferred: deque[tuple[CallGuard, Callable[[], object]]] = deque()
"""Deferred closes with their guards; one queue per process, since the owner of a guard may be collected too."""


class CallGuard:
    """Mark of the thread that is inside a collective call on a communicator.

    ``with guard:`` raises `StateError` in other threads and admits nested calls of the same thread. Hot paths set
    `user` directly and restore it at the end. `user` is negative once a call has failed.

    A call may end on this rank alone, by a timeout, an interrupt or an unexpected error; the ranks are then out of
    step. The guard then disables all further calls on the communicator of ``watch``. ``watch`` is None on a
    communicator of one rank. An error before `begin` does not affect the other ranks.
    """

    __slots__ = ("_depth", "_has_begun", "_idle", "_in_function", "user", "watch")

    def __init__(self) -> None:
        self.user = self._idle = 0
        self._depth = 0
        self._has_begun = False
        self._in_function = 0  # the thread inside a user's function
        self.watch: CallWatch | None = None

    def __enter__(self) -> None:
        """Mark this thread, or raise `StateError` if another thread is inside."""
        me = get_ident()
        if self.user > 0:
            if self.user != me:
                self.refuse()
            self._depth += 1
        else:
            self._has_begun = False
        self.user = me

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Admit other threads again; disable all calls after an error on this rank alone; shorten its traceback."""
        if self._depth:
            self._depth -= 1
        else:
            if error is not None and self._has_begun:
                self.fail(error)
            if isinstance(error, HaloxError):
                stripped(error)
            self.user = self._idle
            if _deferred:
                close_collected()

    def begin(self) -> None:
        """Note that the call counts on all ranks: from here on, an error on this rank alone disables further calls."""
        self._has_begun = True

    def fail(self, error: BaseException) -> None:
        """Disable all further calls after an error in a collective call, unless all ranks have raised it."""
        is_common = isinstance(error, HaloxError) and not (
            error.of_one_rank or isinstance(error, ExchangeTimeoutError)
        )
        if self.watch is not None and not is_common:
            self.watch.fail(f"{type(error).__name__}: {error}")
            self.shut()

    def check_thread(self) -> None:
        """Raise `StateError` if another thread is inside a call."""
        if self.user > 0 and self.user != get_ident():
            self.refuse()

    def leave(self, error: BaseException, outer: int = 0) -> None:
        """End a call of a hot path after an error; disable all further calls if only this rank has raised it.

        ``outer`` is the thread of the enclosing call, if there is one.
        """
        self.fail(error)
        self.user = outer or self._idle

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a user's function within a collective call of this rank; refuse collective calls that it makes."""
        outer = self.user
        self.user, self._in_function = _IN_FUNCTION, get_ident()
        try:
            function(*arguments)
        except HaloxError as error:
            error.of_one_rank = True
            raise
        finally:
            self.user, self._in_function = outer, 0

    def outside(self, close: Callable[[], object]) -> None:
        """Call ``close`` of a collected object: at once, or after the collective call that is in progress.

        For finalizers, which run at arbitrary points: a close in the middle of a call could disturb the call. Calls on
        hot paths, which set `user` directly, do not run deferred closes; the next call by ``with guard:`` does.
        """
        if self.user > 0:
            _deferred.append((self, close))
        else:
            close()

    def shut(self) -> None:
        """Note a failure: hot paths test only `user`, and then take the slow path, which raises."""
        self._idle = -1
        if self.user <= 0:
            self.user = -1

    def refuse(self) -> NoReturn:
        """Raise `StateError` in a second thread, or in a function that a collective call has called."""
        if self._in_function == get_ident():
            raise StateError(
                "a boundary function has made a collective call, which only ranks at this wall would make; compute "
                "what it needs before the exchange"
            )
        raise StateError(
            "another thread is inside a collective call on the same communicator; make the calls on one communicator "
            "one after the other, in the same order on all ranks, or make the objects of each thread on a duplicate "
            "of the communicator"
        )


def close_collected() -> None:
    """Run the deferred closes of calls that have ended. Their errors are printed, since they are not of this call."""
    for _ in range(len(_deferred)):
        try:
            guard, close = _deferred.popleft()
        except IndexError:  # another thread has taken the last one
            return
        if guard.user > 0:  # a call is in progress
            _deferred.append((guard, close))
            continue
        try:
            close()
        except Exception:
            print("halox: the closing of a collected object has failed:", file=sys.stderr)
            traceback.print_exc()


def single_threaded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a collective method to raise `StateError` in a second thread; for objects with a ``_world``."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._world.guard:
            return method(self, *args, **kwargs)

    return call


def short_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public call outside of any guard, to shorten the tracebacks of its errors; for no hot path."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except HaloxError as error:
            raise stripped(error) from error.__cause__

    return call


class Unique:
    """Object bound to this process and its ranks, which cannot be copied or pickled; `dir` lists its public names."""

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise StateError(
            f"a {type(self).__name__} belongs to this process and its ranks, and cannot be copied or pickled; make "
            "another one with the same arguments (fields are arrays, which can)"
        )


class Closing(Unique):
    """Context manager that closes itself on exit, except after an error, when the other ranks may not close."""

    def close(self) -> None:
        """Free the resources of the object."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()


making = CallGuard()
"""Guard of communicator creation: MPI confuses two concurrent creations, or deadlocks."""


@contextmanager
def alone_in_making() -> Iterator[None]:
    """Raise `StateError` if two threads create grids, exchanges or allreduces at once, on any communicators."""
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
