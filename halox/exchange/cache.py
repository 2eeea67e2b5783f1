"""Finds the plan of the arrays of a call again, and forgets it when one of them is gone."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

from halox.engine.arrays import describe, owner
from halox.errors import FieldError
from halox.exchange.plan import Plan

CAPACITY = 512
"""Plans kept at most; the oldest goes first."""


class PlanCache:
    """Plans by the arrays they move.

    An array object seen before is recognised by its identity. A new view of memory seen before, such as ``state[i]``
    taken anew each step, is recognised by its owner, address, shape, strides and dtype. Neither looks at contents.
    An entry dies with its arrays (or their owners), so that an address that is used again is not mistaken.
    """

    def __init__(self) -> None:
        self._by_identity: dict[Hashable, tuple[tuple[weakref.ref[Any], ...], Plan]] = {}
        self._by_layout: dict[Hashable, tuple[tuple[weakref.ref[Any], ...], Plan]] = {}
        self._doomed: list[Plan] = []

    def find(self, kind: Hashable, arrays: tuple[Any, ...]) -> Plan | None:
        """Return the plan of these arrays, None if there is none yet.

        None as well for what is no array, and for a kind that cannot be one: making a plan of it fails on all ranks
        together.
        """
        try:
            entry = self._by_identity.get((kind, *map(id, arrays)))
            if entry is not None:
                return entry[1]
            entry = self._by_layout.get((kind, *map(_layout, arrays)))
        except (FieldError, TypeError):
            return None
        if entry is None:
            return None
        # The next call with the same view object is found at once.
        self._enter(self._by_identity, (kind, *map(id, arrays)), arrays, entry[1])
        return entry[1]

    def add(self, kind: Hashable, arrays: tuple[Any, ...], plan: Plan) -> None:
        """Keep a plan."""
        self.sweep()
        while len(self._by_layout) >= CAPACITY:
            self._drop(self._by_layout, next(iter(self._by_layout)))
        owners = tuple(map(owner, arrays))
        self._enter(self._by_layout, (kind, *map(_layout, arrays)), owners, plan)
        self._enter(self._by_identity, (kind, *map(id, arrays)), arrays, plan)

    def sweep(self) -> None:
        """Close the plans whose arrays are gone; local."""
        while self._doomed:
            self._doomed.pop().close()

    def clear(self) -> None:
        """Close all plans; local."""
        for key in list(self._by_layout):
            self._drop(self._by_layout, key)
        self.sweep()

    def _enter(
        self,
        table: dict[Hashable, tuple[tuple[weakref.ref[Any], ...], Plan]],
        key: Hashable,
        watched: tuple[Any, ...],
        plan: Plan,
    ) -> None:
        def forget(_: object) -> None:
            self._drop(table, key)

        table[key] = (tuple(weakref.ref(array, forget) for array in watched), plan)

    def _drop(
        self, table: dict[Hashable, tuple[tuple[weakref.ref[Any], ...], Plan]], key: Hashable
    ) -> None:
        """Take an entry out. May run in the middle of anything, so that closing waits for `sweep`."""
        entry = table.pop(key, None)
        if entry is None or table is not self._by_layout:
            return
        plan = entry[1]
        for other in [k for k, (_, p) in self._by_identity.items() if p is plan]:
            del self._by_identity[other]
        self._doomed.append(plan)


def _layout(array: Any) -> Hashable:
    found = describe(array)
    return id(owner(array)), found.pointer, found.shape, found.strides, found.dtype.str
