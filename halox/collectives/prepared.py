"""Reductions cached by signature, and launches cached by the identity of the arrays of a call.

A reduction of fields, or of arrays on GPUs, first looks for a cached launch. If it was called with the same arrays
before, the launch is all the work that remains::

    name, array, out            ->  launch        while these arrays live and do not change
    (name, dtype, shape, ...)   ->  reduction     made collectively at the first call

A launch without ``out`` returns a new result. It is prepared in the second call with the same arrays, since for
temporaries the preparation would cost more than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from halox.runtime.known_arrays import KnownArrays

Launch = Callable[[Sequence[Any]], object]
"""A prepared call, with the arrays for which it is kept; returns the result. It must hold none of them."""

Signature = tuple[object, ...]
"""Key of a reduction: a name, dtypes, a shape or layout; the same on all ranks."""

MOST_ARRAYS = 32
"""Most array allreduces that a grid keeps."""


class Reduction(Protocol):
    """A reduction that the ranks have made together for calls of one signature."""

    def refuse(self, error: Exception) -> None:
        """Raise this rank's reason not to take part in a call, on all ranks if the host takes part."""

    def close(self) -> None:
        """Free memory and communicators; collective."""


R = TypeVar("R", bound=Reduction)


class PreparedReductions(Generic[R]):
    """Reductions by signature, oldest first; ``known`` has the launches, which return ``out`` or a new result."""

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self.reductions: dict[Signature, R] = {}
        self.known: KnownArrays[Launch] = KnownArrays()

    def add(self, signature: Signature, reduction: R) -> R:
        """Keep a reduction; collective if it closes an old one because of the capacity."""
        self.reductions[signature] = reduction
        if self._capacity is not None and len(self.reductions) > self._capacity:
            self.known.forget()
            self.reductions.pop(next(iter(self.reductions))).close()
        return reduction

    def prepare(
        self,
        name: Hashable,
        arrays: tuple[object, ...],
        out: object,
        bind: Callable[[], Launch | None],
    ) -> None:
        """Keep the launch of a call that has just been made, unless its arrays are temporaries."""
        if out is None and not self.known.passed_before(arrays):
            return
        launch = bind()
        if launch is not None:
            with suppress(TypeError):  # an object that does not support weak references
                self.known.keep(name, arrays if out is None else (*arrays, out), launch)

    def refuse(self, error: Exception, *name: str) -> bool:
        """Let the reduction of a name refuse a call if there is exactly one; return whether any has the name."""
        known = [one for of, one in self.reductions.items() if of[: len(name)] == name]
        if len(known) == 1:
            known[0].refuse(error)
        return bool(known)

    def close(self) -> None:
        """Close all reductions; collective."""
        self.known.forget()
        for reduction in self.reductions.values():
            reduction.close()
        self.reductions.clear()
