"""Reductions cached by signature, and launches cached by the identity of the arrays of a call.

A reduction of fields, or of arrays on GPUs, first looks for a cached launch. If it was called with the same arrays
before, it only has to run the launch::

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
"""A prepared call: takes the arrays of the call, and returns the result. It must not hold references to the arrays."""

Signature = tuple[object, ...]
"""Key of a reduction, the same on all ranks: a name, dtypes, a shape or layout."""

MOST_ARRAYS = 32
"""Most array allreduces that a grid keeps."""


class Reduction(Protocol):
    """A reduction for calls of one signature."""

    def refuse(self, error: Exception) -> None:
        """Raise this rank's reason not to take part in a call, on all ranks if the host takes part."""

    def close(self) -> None:
        """Free memory and communicators; collective."""


R = TypeVar("R", bound=Reduction)


class PreparedReductions(Generic[R]):
    """Cache of reductions by signature, oldest first, with their launches in ``known``.

    With a ``capacity``, adding one more reduction closes the oldest.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self.reductions: dict[Signature, R] = {}
        self.known: KnownArrays[Launch] = KnownArrays()

    def add(self, signature: Signature, reduction: R) -> R:
        """Add a reduction to the cache, and return it; collective if the cache has a capacity."""
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
        """Cache the launch that ``bind`` returns for a call that has just been made, unless its arrays are temporaries.

        ``bind`` returns None if the reduction has no launch for these arrays.
        """
        if out is None and not self.known.passed_before(arrays):
            return
        launch = bind()
        if launch is not None:
            with suppress(TypeError):  # an object that does not support weak references
                self.known.keep(name, arrays if out is None else (*arrays, out), launch)

    def refuse(self, error: Exception, *name: object) -> bool:
        """Refuse a call by the only reduction whose signature begins with ``name``.

        Returns whether there are any such reductions. If there are several, none of them refuses: this rank cannot tell
        which one the other ranks call.
        """
        matching = [
            reduction
            for signature, reduction in self.reductions.items()
            if signature[: len(name)] == name
        ]
        if len(matching) == 1:
            matching[0].refuse(error)
        return bool(matching)

    def close(self) -> None:
        """Close all reductions; collective."""
        self.known.forget()
        for reduction in self.reductions.values():
            reduction.close()
        self.reductions.clear()
