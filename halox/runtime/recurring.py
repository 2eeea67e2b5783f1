"""Arrays that calls have been given before."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

_MOST = 512


class RecurringArrays:
    """Arrays of earlier calls by identity: what is prepared for temporaries would cost more than it saves."""

    __slots__ = ("_met",)

    def __init__(self) -> None:
        self._met: dict[int, weakref.ref[object]] = {}

    def meet(self, arrays: Sequence[object]) -> bool:
        """Whether all arrays were met before; temporaries never were, even at an address used before."""
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
                except TypeError:  # of what cannot be watched
                    continue
        return known

    def forget(self) -> None:
        """Meet all arrays anew."""
        self._met.clear()
