"""What was found out about arrays before, so that a call with the same ones again costs no more than a look."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

Found = TypeVar("Found")

CAPACITY = 512
"""Entries kept at most; the oldest goes first."""


class Seen(Generic[Found]):
    """What belongs to array objects, for as long as all of them live.

    Objects are told apart by their identity alone: neither their contents nor their shapes are looked at again.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[tuple[weakref.ref[Any], ...], Found]] = {}

    def find(self, *key: Any) -> Found | None:
        """Return what was kept under a name and the ids of some arrays, None if nothing was."""
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def keep(self, name: Hashable, arrays: Sequence[Any], found: Found) -> None:
        """Keep something for a name and some arrays or None; not where one of them cannot be watched."""
        key = (name, *map(id, arrays))

        def forget(_: object) -> None:
            self._entries.pop(key, None)

        try:
            watched = tuple(weakref.ref(array, forget) for array in arrays if array is not None)
        except TypeError:
            return
        while len(self._entries) >= CAPACITY:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = watched, found

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
