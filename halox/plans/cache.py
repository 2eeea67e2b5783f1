"""A grid's cache of plans: calls with the same arrays, fields or layouts use the same plan.

A plan of arrays that do not belong to the grid is shared: it also serves other arrays of the same layouts. The layouts
determine the copies of a plan, and the addresses only their places. A shared plan takes no path for which the ranks
would have to agree on addresses. A new array therefore costs no communication: the plan makes new views of it. A shared
plan stays in the cache while it is among the last plans, whichever arrays are alive. Garbage collection, which differs
between ranks, has no influence on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

from halox.errors import HaloxError
from halox.plans.runner import Bound, Runner
from halox.runtime.arrays import Described, owner
from halox.runtime.known_arrays import KnownArrays

CAPACITY = 512
"""Most plans in the cache: the last ones that were added."""

Key: TypeAlias = tuple[Hashable, Sequence[Described] | None]
"""Key of some arrays' plan, and the arrays' descriptions if it may be shared with other arrays."""

CachedPlan: TypeAlias = tuple[Runner, Bound | None]
"""A plan and its argument: None for the plan's own arrays, otherwise views of other arrays."""


class _Entry:
    """A plan with the number of its addition; it is removed when one of the ``watched`` arrays dies."""

    __slots__ = ("__weakref__", "number", "plan", "watched")

    def __init__(self, number: int, plan: Runner | None) -> None:
        self.number = number
        self.plan = plan
        self.watched: tuple[weakref.ref[object], ...] = ()


class PlanCache:
    """Plans by the arrays that they move.

    ``known`` has the plans of array objects of earlier calls. A caller looks there first. Then it calls `find`, which
    recognises arrays by their memory or by their layouts: for example, a new view of known memory, such as ``state[i]``
    in each step. The cache never looks at the contents of arrays.

    The entry of a plan that is not shared ends with its arrays (or with their owners). So an array that reuses an
    address cannot be mistaken for the old one. Every entry ends when `CAPACITY` plans have been added after it. Adding
    is collective; all ranks therefore have the same plans for a call with the same arrays, however long each rank keeps
    other arrays.

    ``key_of`` returns the key of some arrays: their layouts if they may share a plan with other arrays, otherwise also
    their memory. It may raise a `HaloxError`. The ``kind`` of a call has its operation and all its options.
    """

    def __init__(self, key_of: Callable[[tuple[object, ...]], Key]) -> None:
        self._key_of = key_of
        self.known: KnownArrays[CachedPlan] = KnownArrays()
        # Whether any entry has arrays that could share a plan on this rank, but not on all ranks or not on its paths.
        self._has_unshared = False
        self._entries: dict[Hashable, _Entry] = {}
        self._added = 0
        self._to_close: list[Runner] = []

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, kind: Hashable, arrays: tuple[object, ...]) -> CachedPlan | None:
        """Return the plan of these arrays or of their layouts, None if there is no such plan yet.

        The result is also None for objects that are not arrays, and for an unhashable ``kind``: the caller then makes a
        plan, which fails on all ranks together.
        """
        try:
            key, shared = self._key_of(arrays)
            entry = None
            if shared is not None and self._has_unshared:
                entry = self._entries.get((kind, key, _places(arrays, shared)))
            if entry is not None:
                shared = None
            else:
                entry = self._entries.get((kind, key))
        except (HaloxError, TypeError):
            return None
        if entry is None or entry.plan is None:
            return None
        plan, bound = entry.plan, None
        if shared is not None:
            bound = plan.views(shared)
            if bound is None:
                return None
        if self.known.passed_before(arrays):
            self.known.keep(kind, arrays, (plan, bound))
        return plan, bound

    def add(self, kind: Hashable, arrays: tuple[object, ...], plan: Runner) -> CachedPlan:
        """Add a plan, and return it for these arrays; collective, so that all ranks have the same number of plans."""
        self.sweep()
        self._added += 1
        for oldest, entry in self._entries.copy().items():  # arrays may be collected meanwhile
            if entry.number > self._added - CAPACITY:
                break
            self._evict(oldest)
        of_arrays, shared = self._key_of(arrays)
        key: tuple[Hashable, ...] = (kind, of_arrays)
        if shared is not None and plan.relocatable:
            self._evict(key)
            self._entries[key] = _Entry(self._added, plan)
            self.known.passed_before(arrays)
            return plan, plan.views(shared)
        if shared is not None:
            self._has_unshared = True
            key = (*key, _places(arrays, shared))
        place = weakref.ref(self)

        def forget(reference: object) -> None:
            cache = place()
            current = None if cache is None else cache._entries.get(key)
            if cache is not None and current is not None and reference in current.watched:
                cache._drop(key)

        entry = self._entries[key] = _Entry(self._added, plan)
        entry.watched = tuple(weakref.ref(owner(array), forget) for array in arrays)
        self.known.keep(kind, arrays, (plan, None))
        return plan, None

    def sweep(self) -> None:
        """Close the plans that have been dropped; local."""
        while self._to_close:
            self._to_close.pop().close()

    def clear(self) -> None:
        for key in list(self._entries):
            self._drop(key)
        self.known.forget()
        self.sweep()

    def _evict(self, key: Hashable) -> None:
        """Remove an entry whose arrays may be alive."""
        if key in self._entries:
            self.known.forget()
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        """Remove an entry. Garbage collection may call this at any point of any code, so `sweep` closes the plan."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.plan is not None:
            self._to_close.append(entry.plan)
            entry.plan, entry.watched = None, ()


def _places(arrays: Sequence[object], described: Sequence[Described]) -> Hashable:
    pairs = zip(arrays, described, strict=True)
    return tuple([(id(owner(array)), one.pointer) for array, one in pairs])
