"""Plan cache keyed by array identity, by field and by layout.

A plan of arrays that are not the grid's own serves other arrays of their layout, too: which copies it makes follows
from the layout, and only where it makes them from the addresses. Such a plan takes no path on which the ranks would
have to agree on addresses, so that a new array costs new views and no word between ranks. It lives as long as it is
among the last, whichever arrays live: garbage collection, which differs between ranks, has no part in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from halox.errors import HaloxError
from halox.exchange.plan import Bound, Plan
from halox.exchange.report import Report
from halox.runtime.arrays import Described, owner

CAPACITY = 512
"""Plans kept at most: those that were added last."""


Shared = tuple[Hashable, Sequence[Described]]


class Moved:
    """A plan as it is called for some of the arrays that it serves."""

    __slots__ = ("_bound", "_plan")

    def __init__(self, plan: Plan, bound: Bound) -> None:
        self._plan, self._bound = plan, bound

    def __call__(self) -> None:
        """Run one exchange of these arrays."""
        self._plan.__call__(self._bound)

    def explain(self) -> Report:
        """Return the plan's report."""
        return self._plan.explain()


class _Entry:
    """A plan, for as long as its arrays live and it is among the last."""

    __slots__ = ("number", "plan", "watched")

    def __init__(self, number: int, plan: Plan) -> None:
        self.number = number
        self.plan: Plan | None = plan
        self.watched: tuple[weakref.ref[object], ...] = ()


class _Nodes(dict[int, "_Seen"]):
    """Arrays seen, by their identity."""

    __slots__ = ("__weakref__",)


class _Seen:
    """An array object seen as the next argument of a call, and as what.

    Attributes
    ----------
    shape, dtype, writable
        Of the array then, since they can be set; only the shape if it is none of NumPy's. (So can strides, but NumPy
        advises against it: nobody pays for looking at them in every call.)
    entry : _Entry or None
        Of the plan of the arrays up to this one.
    moved : Moved or None
        The plan with its views of these arrays, if it serves others, too.
    after : _Nodes
        What was seen behind it.
    """

    __slots__ = ("after", "dtype", "entry", "is_numpy", "moved", "shape", "watch", "writable")

    def __init__(self, array: Any, nodes: _Nodes) -> None:
        key, place = id(array), weakref.ref(nodes)

        def forget(gone: object) -> None:
            known = place()
            if known is not None and key in known and known[key].watch is gone:
                del known[key]

        self.is_numpy = isinstance(array, np.ndarray)
        self.shape: Any = getattr(array, "shape", None)
        self.dtype: Any = array.dtype if self.is_numpy else None
        self.writable: Any = array.flags.writeable if self.is_numpy else None
        self.entry: _Entry | None = None
        self.moved: Moved | None = None
        self.after = _NOTHING
        self.watch = weakref.ref(array, forget)

    def is_as_seen(self, array: Any) -> bool:
        """Whether the array still is what it was; `PlanCache.find` has the same in line."""
        if not self.is_numpy:
            return bool(getattr(array, "shape", None) == self.shape)
        return (
            array.shape == self.shape
            and array.dtype is self.dtype
            and array.flags.writeable is self.writable
        )


_NOTHING = _Nodes()


class PlanCache:
    """Plans by the arrays they move.

    An array object seen before is recognised by its identity, if its shape, its dtype and whether it may be written
    are as they were. A new view of memory seen before, such as ``state[i]`` taken anew each step, is recognised by
    its field. Neither looks at contents.

    An entry of a field ends with its arrays (or their owners), so that an address that is used again is not mistaken.
    Any ends when `CAPACITY` plans have been added after it. Plans are added collectively, so that what is left at a
    call with the same arrays is the same on all ranks, however long each keeps other arrays.

    Parameters
    ----------
    key_of : callable
        Returns what tells apart all that a plan of some arrays depends on: memory, form and layout. May raise a
        `HaloxError`.
    shared_key_of : callable, optional
        Returns the same of a plan that serves other arrays, too, and the arrays described; None where it cannot.
    """

    def __init__(
        self,
        key_of: Callable[[tuple[object, ...]], Hashable],
        shared_key_of: Callable[[tuple[object, ...]], Shared | None] = lambda _: None,
    ) -> None:
        self._key_of, self._shared_key_of = key_of, shared_key_of
        self._has_shared = False
        # Whether some entry of a field is of arrays that a shared plan would take, but for other ranks'.
        self._has_strangers = False
        self._seen: dict[Hashable, _Nodes] = {}
        self._entries: dict[Hashable, _Entry] = {}
        self._added = 0
        self._doomed: list[Plan] = []

    def __len__(self) -> int:
        """Return how many plans are kept."""
        return len(self._entries)

    def find(self, kind: Hashable, arrays: tuple[Any, ...]) -> Plan | Moved | None:
        """Return the plan of these arrays, None if there is none yet.

        None as well for what is no array, and for what cannot be a kind: making a plan of it fails on all ranks
        together.
        """
        try:
            nodes = self._seen.get(kind)
        except TypeError:
            return None
        seen = None
        if nodes is not None:
            for array in arrays:
                seen = nodes.get(id(array))
                if seen is None:
                    break
                if seen.is_numpy:
                    if (
                        array.shape != seen.shape
                        or array.dtype is not seen.dtype
                        or array.flags.writeable is not seen.writable
                    ):
                        seen = None
                        break
                elif getattr(array, "shape", None) != seen.shape:
                    seen = None
                    break
                nodes = seen.after
        if seen is not None:
            entry = seen.entry
            if entry is not None and entry.plan is not None:
                return entry.plan if seen.moved is None else seen.moved
        return self._find_field(kind, arrays)

    def add(self, kind: Hashable, arrays: tuple[object, ...], plan: Plan) -> None:
        """Keep a plan; collective, so that all ranks count alike."""
        self.sweep()
        self._added += 1
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest].number > self._added - CAPACITY:
                break
            self._drop(oldest)
        shared = self._shared_key_of(arrays)
        if shared is not None and plan.floats:
            # `find` views these arrays as any others.
            self._has_shared = True
            self._drop((kind, shared[0]))
            self._entries[kind, shared[0]] = _Entry(self._added, plan)
            return
        self._has_strangers |= shared is not None
        key, place = (kind, self._key_of(arrays)), weakref.ref(self)

        def forget(gone: object) -> None:
            cache = place()
            entry = None if cache is None else cache._entries.get(key)
            if cache is not None and entry is not None and any(w is gone for w in entry.watched):
                cache._drop(key)

        entry = self._entries[key] = _Entry(self._added, plan)
        entry.watched = tuple(weakref.ref(owner(array), forget) for array in arrays)
        self._remember(kind, arrays, entry, None)

    def sweep(self) -> None:
        """Close the plans that have been dropped; local."""
        while self._doomed:
            self._doomed.pop().close()

    def forget(self) -> None:
        """Look at all arrays again at their next calls; local."""
        self._seen.clear()

    def clear(self) -> None:
        """Close all plans; local."""
        for key in list(self._entries):
            self._drop(key)
        self.forget()
        self.sweep()

    def _find_field(self, kind: Hashable, arrays: tuple[object, ...]) -> Plan | Moved | None:
        """Find the plan of what the arrays describe now, or that of their layouts."""
        try:
            shared = self._shared_key_of(arrays) if self._has_shared else None
            entry = None
            if shared is None or self._has_strangers:
                entry = self._entries.get((kind, self._key_of(arrays)))
            if entry is None and shared is not None:
                key, described = shared
                entry = self._entries.get((kind, key))
            elif shared is not None:
                shared = None
        except (HaloxError, TypeError):
            return None
        if entry is None or entry.plan is None:
            return None
        moved = None
        if shared is not None:
            bound = entry.plan.views(described)
            if bound is None:
                return None
            moved = Moved(entry.plan, bound)
        # The next call with the same objects is found at once.
        self._remember(kind, arrays, entry, moved)
        return entry.plan if moved is None else moved

    def _remember(
        self, kind: Hashable, arrays: tuple[object, ...], entry: _Entry, moved: Moved | None
    ) -> None:
        nodes, seen = self._seen.setdefault(kind, _Nodes()), None
        for array in arrays:
            if seen is not None:
                if seen.after is _NOTHING:
                    seen.after = _Nodes()
                nodes = seen.after
            seen = nodes.get(id(array))
            if seen is None or not seen.is_as_seen(array):
                # And nothing is known of calls in which others come after it as it is now.
                seen = nodes[id(array)] = _Seen(array, nodes)
        if seen is not None:
            seen.entry, seen.moved = entry, moved

    def _drop(self, key: Hashable) -> None:
        """Take an entry out. May run in the middle of anything, so that closing waits for `sweep`."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.plan is not None:
            self._doomed.append(entry.plan)
            entry.plan, entry.watched = None, ()
