"""What was found out about arrays before, so that a call with the same ones again costs no more than a look."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

Found = TypeVar("Found")

CAPACITY = 512
"""Entries kept at most; the oldest goes first."""


class Seen(Generic[Found]):
    """What belongs to array objects, for as long as all of them live.

    Objects are told apart by their identity alone: neither their contents nor their shapes are looked at again.

    Attributes
    ----------
    found : dict
        What was kept, by a name and the ids of some arrays, one after the other in a tuple. To look at only.
    """

    def __init__(self) -> None:
        self.found: dict[Hashable, Found] = {}
        self._watched: dict[Hashable, tuple[weakref.ref[object], ...]] = {}
        self._met: dict[int, weakref.ref[object]] = {}

    def keep(self, name: Hashable, arrays: Sequence[object], found: Found) -> None:
        """Keep something for a name and some arrays or None; not where one of them cannot be watched."""
        key = (name, *map(id, arrays))

        def forget(_: object) -> None:
            self._drop(key)

        try:
            watched = tuple(weakref.ref(array, forget) for array in arrays if array is not None)
        except TypeError:
            return
        while len(self.found) >= CAPACITY:
            self._drop(next(iter(self.found)))
        self.found[key], self._watched[key] = found, watched

    def again(self, arrays: Sequence[object]) -> bool:
        """Whether all of some arrays have been asked for before.

        Temporaries never have, even at an address used before: to keep something for them costs more than it saves.
        """
        known = True
        for array in arrays:
            met = self._met.get(id(array))
            if met is not None and met() is array:
                continue
            known = False
            if len(self._met) >= CAPACITY:
                self._met.clear()
            with suppress(TypeError):  # of what cannot be watched
                self._met[id(array)] = weakref.ref(array)
        return known

    def _drop(self, key: Hashable) -> None:
        self.found.pop(key, None)
        self._watched.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self.found.clear()
        self._watched.clear()
        self._met.clear()
