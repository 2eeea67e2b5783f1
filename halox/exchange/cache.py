"""Plan cache keyed by array identity, by field and by layout.

A plan of arrays that are not the grid's own serves other arrays of their layout, too: the layout alone decides which
copies it makes, addresses decide only where. Such a plan takes no path on which the ranks would have to agree on
addresses, so that a new array costs new views and no communication. It lives as long as it is among the last,
whichever arrays live: garbage collection, which differs between ranks, does not matter to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np

from halox.errors import HaloxError
from halox.exchange.plan import Bound, Plan
from halox.exchange.report import Report
from halox.runtime.arrays import Described, DType, owner
from halox.runtime.recurring import RecurringArrays

CAPACITY = 512
"""Plans kept at most: those that were added last."""

Shared: TypeAlias = tuple[Hashable, Sequence[Described]]
"""Key of a plan that serves all arrays of some layouts, and arrays of them described."""


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


class _Nodes(dict[int, "_Node"]):
    """Arrays of earlier calls, by their identity."""

    __slots__ = ("__weakref__",)


class _Node:
    """An array object as the next argument of an earlier call.

    Its shape, dtype and whether it may be written are kept, since they can be set; only the shape if it is none of
    NumPy's. (So can strides, but NumPy advises against it: no call pays for a look at them.) ``entry`` is that of the
    plan of the arrays up to this one, ``moved`` the plan with its views of these arrays if it serves others, too;
    ``after`` has the arrays of earlier calls behind it.
    """

    __slots__ = ("after", "dtype", "entry", "is_numpy", "moved", "shape", "watch", "writable")

    def __init__(self, array: object, nodes: _Nodes) -> None:
        key, place = id(array), weakref.ref(nodes)

        def forget(gone: object) -> None:
            known = place()
            if known is not None and key in known and known[key].watch is gone:
                del known[key]

        self.is_numpy = isinstance(array, np.ndarray)
        self.shape: object = getattr(array, "shape", None)
        self.dtype: DType | None = None
        self.writable: bool | None = None
        if isinstance(array, np.ndarray):
            self.dtype, self.writable = array.dtype, array.flags.writeable
        self.entry: _Entry | None = None
        self.moved: Moved | None = None
        self.after = _NOTHING
        self.watch = weakref.ref(array, forget)

    def fits(self, array: object) -> bool:
        """Whether the array is as it was; `PlanCache.find` has the same in line, without the call."""
        return getattr(array, "shape", None) == self.shape and (
            not isinstance(array, np.ndarray)
            or (array.dtype is self.dtype and array.flags.writeable is self.writable)
        )


_NOTHING = _Nodes()


class PlanCache:
    """Plans by the arrays they move.

    An array object of an earlier call is recognised by its identity, if its shape, its dtype and whether it may be
    written are as they were. A new view of known memory, such as ``state[i]`` taken anew each step, is recognised by
    its field. Neither looks at contents.

    An entry of a field ends with its arrays (or their owners), so that an address that is used again is not mistaken.
    Every entry ends when `CAPACITY` plans have been added after it. Plans are added collectively, so that those left
    at a call with the same arrays are the same on all ranks, however long each keeps other arrays.

    ``key_of`` returns what tells apart all that a plan of some arrays depends on: memory, form and layout; it may raise
    a `HaloxError`. ``shared_key_of`` returns the same of a plan that serves other arrays, too, and the arrays
    described; None where it cannot.
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
        self._calls: dict[Hashable, _Nodes] = {}
        self._met = RecurringArrays()
        self._entries: dict[Hashable, _Entry] = {}
        self._added = 0
        self._doomed: list[Plan] = []

    def __len__(self) -> int:
        """Return how many plans are kept."""
        return len(self._entries)

    def find(self, kind: Hashable, arrays: tuple[object, ...]) -> Plan | Moved | None:
        """Return the plan of these arrays, None if there is none yet.

        None as well for what is no array, and for what cannot be a kind: making a plan of it fails on all ranks
        together.
        """
        try:
            nodes, node = self._calls[kind], None
            array: Any
            for array in arrays:
                node = nodes[id(array)]
                if node.is_numpy:
                    if (
                        array.shape != node.shape
                        or array.dtype is not node.dtype
                        or array.flags.writeable is not node.writable
                    ):
                        break
                elif getattr(array, "shape", None) != node.shape:
                    break
                nodes = node.after
            else:
                if node is not None:
                    entry = node.entry
                    if entry is not None and entry.plan is not None:
                        return node.moved or entry.plan
        except (KeyError, TypeError):
            pass
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
            self._met.meet(arrays)
            return
        self._has_strangers |= shared is not None
        key, place = (kind, self._key_of(arrays)), weakref.ref(self)

        def forget(gone: object) -> None:
            cache = place()
            known = None if cache is None else cache._entries.get(key)
            if cache is not None and known is not None and gone in known.watched:
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
        self._calls.clear()
        self._met.forget()

    def clear(self) -> None:
        """Close all plans; local."""
        for key in list(self._entries):
            self._drop(key)
        self.forget()
        self.sweep()

    def _find_field(self, kind: Hashable, arrays: tuple[object, ...]) -> Plan | Moved | None:
        """Find the plan of the fields that the arrays are, or that of their layouts."""
        try:
            shared = self._shared_key_of(arrays) if self._has_shared else None
            entry = None
            if shared is None or self._has_strangers:
                entry = self._entries.get((kind, self._key_of(arrays)))
            if entry is not None:
                shared = None
            elif shared is not None:
                entry = self._entries.get((kind, shared[0]))
        except (HaloxError, TypeError):
            return None
        if entry is None or entry.plan is None:
            return None
        moved = None
        if shared is not None:
            bound = entry.plan.views(shared[1])
            if bound is None:
                return None
            moved = Moved(entry.plan, bound)
        if self._met.meet(arrays):  # from now on found at once
            self._remember(kind, arrays, entry, moved)
        return entry.plan if moved is None else moved

    def _remember(
        self, kind: Hashable, arrays: tuple[object, ...], entry: _Entry, moved: Moved | None
    ) -> None:
        nodes, node = self._calls.setdefault(kind, _Nodes()), None
        for array in arrays:
            if node is not None:
                if node.after is _NOTHING:
                    node.after = _Nodes()
                nodes = node.after
            node = nodes.get(id(array))
            if node is None or not node.fits(array):
                # And nothing is known of calls in which others come after it as it is now.
                node = nodes[id(array)] = _Node(array, nodes)
        if node is not None:
            node.entry, node.moved = entry, moved

    def _drop(self, key: Hashable) -> None:
        """Take an entry out. May run in the middle of anything, so that closing waits for `sweep`."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.plan is not None:
            self._doomed.append(entry.plan)
            entry.plan, entry.watched = None, ()
