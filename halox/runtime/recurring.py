"""Recognition of arrays that were passed to earlier calls."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

_MOST = 512


class RecurringArrays:
    """Arrays of earlier calls, by identity. Preparing a call for temporary arrays would cost more than it saves."""

    __slots__ = ("_met",)

    def __init__(self) -> None:
        self._met: dict[int, weakref.ref[object]] = {}

    def meet(self, arrays: Sequence[object]) -> bool:
        """Return whether all arrays were passed before, and remember them; a new array at an old address is unknown."""
        met, known = self._met, True
        for array in arrays:
            if array is None:
                continue
            key = id(array)
            before = met.get(key)
            if before is None or before() is not array:
                known = False
                if len(met) >= _MOST:
                    met.clear()
                try:
                    met[key] = weakref.ref(array)
                except TypeError:  # the type does not support weak references
                    continue
        return known

    def forget(self) -> None:
        """Forget all arrays."""
        self._met.clear()
