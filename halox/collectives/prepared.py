"""Reductions cached by signature, and launches cached by the identity of the arrays of a call.

A reduction of fields, or of arrays on GPUs, first looks for a cached launch. If it was called with the same arrays
before, the launch is all the work that remains::

    (name, id(array), id(out))  ->  launch        while these arrays live
    (name, dtype, shape, ...)   ->  reduction     made collectively at the first call

A launch without ``out`` returns a new result. It is prepared in the second call with the same arrays, since for
temporaries the preparation would cost more than it saves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple

from halox.runtime.recurring import RecurringArrays

Launch = Callable[[], object]
"""A prepared call; returns the result."""

Shape = tuple[int, ...]

Signature = tuple[object, ...]
"""Key of a reduction: a name, dtypes, a shape or layout; the same on all ranks."""

MOST_LAUNCHES = 512
"""Most launches in the cache; the oldest is dropped first."""

MOST_ARRAYS = 32
"""Most array allreduces that a grid keeps."""


class Reduction(Protocol):
    """A reduction that the ranks have made together for calls of one signature."""

    def refuse(self, error: Exception) -> None:
        """Raise this rank's reason not to take part in a call, also on the remaining ranks."""

    def close(self) -> None:
        """Free memory and communicators; collective."""


R = TypeVar("R", bound=Reduction)
Arguments = TypeVarTuple("Arguments")


class PreparedReductions(Generic[R]):
    """Reductions by signature, oldest first, and launches by array identity.

    ``launches`` has the launches, each with the shape that its arrays must have. The keys are tuples of a name, the ids
    of the arrays and the id of ``out``. Callers must not modify it.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self.reductions: dict[Signature, R] = {}
        self.launches: dict[Hashable, tuple[Launch, Shape]] = {}
        self._watched: dict[Hashable, list[weakref.ref[object]]] = {}
        self._met = RecurringArrays()

    def add(self, signature: Signature, reduction: R) -> R:
        """Keep a reduction; collective if it closes an old one because of the capacity."""
        self.reductions[signature] = reduction
        if self._capacity is not None and len(self.reductions) > self._capacity:
            self.forget()
            self.reductions.pop(next(iter(self.reductions))).close()
        return reduction

    def prepare(
        self,
        name: Hashable,
        arrays: Sequence[object],
        out: object,
        bind: Callable[[], Launch | None],
    ) -> None:
        """Keep the launch of a call that has just been made, unless its arrays are temporaries."""
        if out is None and not self._met.meet(arrays):
            return
        launch = bind()
        if launch is None or not hasattr(arrays[0], "shape"):
            return
        key = (name, *map(id, arrays), id(out))

        def forget(_: object) -> None:
            self._drop(key)

        try:
            watched = [weakref.ref(one, forget) for one in (*arrays, out) if one is not None]
        except TypeError:  # an object that does not support weak references
            return
        kept = tuple(self.launches)
        for oldest in kept[: max(len(kept) - MOST_LAUNCHES + 1, 0)]:
            self._drop(oldest)
        self.launches[key], self._watched[key] = (launch, arrays[0].shape), watched

    def _drop(self, key: Hashable) -> None:
        self.launches.pop(key, None)
        self._watched.pop(key, None)

    def refuse(self, error: Exception, *name: str) -> bool:
        """Raise an error on all ranks if exactly one reduction has this name; return whether any has it."""
        known = [one for of, one in self.reductions.items() if of[: len(name)] == name]
        if len(known) == 1:
            known[0].refuse(error)
        return bool(known)

    def forget(self) -> None:
        """Forget all launches, since properties of their arrays have changed; local."""
        self.launches.clear()
        self._watched.clear()
        self._met.forget()

    def close(self) -> None:
        """Close all reductions; collective."""
        self.forget()
        for reduction in self.reductions.values():
            reduction.close()
        self.reductions.clear()


def weak_call(method: Callable[[*Arguments], object]) -> Callable[[*Arguments], object]:
    """Return a function that calls a method without keeping the method's object alive."""
    find = weakref.WeakMethod(method)

    def call(*given: *Arguments) -> object:
        found: Any = find()
        return found(*given)

    return call
