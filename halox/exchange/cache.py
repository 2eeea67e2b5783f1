"""Plan cache keyed by array identity, by field and by layout.

A plan of arrays that do not belong to the grid also serves other arrays of the same layouts: the layouts alone decide
which copies the plan makes, and the addresses decide only the places. Such a plan takes no path that needs an
agreement of the ranks on addresses. A new array therefore costs no communication: either the plan works on it for one
call, or the plan makes new views of it. The plan stays in the cache while it is among the last plans, whichever arrays
are alive. Garbage collection, which differs between ranks, has no influence on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np

from halox.errors import HaloxError
from halox.exchange.plan import Bound, Plan
from halox.runtime.arrays import Described, DType, owner
from halox.runtime.recurring import RecurringArrays

CAPACITY = 512
"""Most plans in the cache: the last ones that were added."""

_ndarray = np.ndarray

Shared: TypeAlias = tuple[Hashable, Sequence[Described]]
"""Key of a plan that serves all arrays of some layouts, and the descriptions of the arrays of this call."""


Found: TypeAlias = tuple[Plan, Bound | None]
"""A plan and its argument: None for the plan's own arrays, otherwise views of other arrays, or those arrays."""


class _Entry:
    """A plan, kept while its arrays are alive and it is among the last plans."""

    __slots__ = ("__weakref__", "number", "plan", "watched")

    def __init__(self, number: int, plan: Plan | None) -> None:
        self.number = number
        self.plan = plan
        self.watched: tuple[weakref.ref[object], ...] = ()


class _Nodes(dict[int, "_Node"]):
    """Arrays of earlier calls by identity; for an unknown array, a node that fits no array, cheaper than a KeyError."""

    __slots__ = ("__weakref__",)

    def __missing__(self, key: int) -> _Node:
        return _NO_NODE


class _Calls(dict[Hashable, _Nodes]):
    """First arrays of earlier calls, by the kind of call."""

    def __missing__(self, key: Hashable) -> _Nodes:
        return _NOTHING


class _Node:
    """An array object as the next argument of an earlier call.

    The node keeps the array's shape, its dtype and whether it is writable, since all three can be set later; of an
    array that is not NumPy's only the shape. (Strides can be set, too, but NumPy advises against it, and a comparison
    would cost time in every call.) ``entry`` has the plan of the arrays up to this one. ``found`` has that plan, with
    its views of these arrays if the plan serves other arrays, too. ``after`` has the arrays that followed this one in
    earlier calls.
    """

    __slots__ = ("after", "dtype", "entry", "found", "is_numpy", "shape", "watch", "writable")

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
        self.found: Found | None = None
        self.after = _NOTHING
        self.watch = weakref.ref(array, forget)

    def fits(self, array: object) -> bool:
        """Whether the array is unchanged; `PlanCache.find` repeats this code inline, to save the call."""
        return getattr(array, "shape", None) == self.shape and (
            not isinstance(array, np.ndarray)
            or (array.dtype is self.dtype and array.flags.writeable is self.writable)
        )


_NOTHING, _NEVER = _Nodes(), _Entry(0, None)
_NO_NODE = _Node(_NEVER, _NOTHING)
_NO_NODE.shape = _NEVER


class PlanCache:
    """Plans by the arrays they move.

    An array object of an earlier call is recognised by its identity if its shape, dtype and permission to be written
    are unchanged. A new view of known memory, such as ``state[i]`` taken anew each step, is recognised by its field.
    The cache never looks at the contents of arrays.

    An entry of a field ends with its arrays (or with their owners), so that reuse of an address cannot be mistaken for
    the same field. Every entry ends when `CAPACITY` plans have been added after it. Adding is collective; all ranks
    therefore keep the same plans for a call with the same arrays, however long each rank keeps other arrays.

    ``key_of`` returns the cache key of some arrays: their memory, form and layout. It may raise a `HaloxError`.
    ``shared_key_of`` returns the key of a plan that serves other arrays, too, with the descriptions of the arrays; None
    if no such plan can serve the arrays. ``owners`` has the identities of arrays whose memory contains fields with
    separate plans, or fields whose layouts do not follow from their shapes.
    """

    def __init__(
        self,
        key_of: Callable[[tuple[object, ...]], Hashable],
        shared_key_of: Callable[[tuple[object, ...]], Shared | None] = lambda _: None,
        owners: Collection[int] = (),
    ) -> None:
        self._key_of, self._shared_key_of, self._owners = key_of, shared_key_of, owners
        self._has_shared = False
        # Whether some entry of a field has arrays that a shared plan would serve if other ranks' arrays allowed it.
        self._has_strangers = False
        self._calls = _Calls()
        # By the form of new arrays: the entry of a plan that works on the arrays themselves, or `_NEVER`.
        self._forms: dict[Hashable, _Entry] = {}
        self._met = RecurringArrays()
        self._entries: dict[Hashable, _Entry] = {}
        self._added = 0
        self._doomed: list[Plan] = []

    def __len__(self) -> int:
        """Return the number of plans in the cache."""
        return len(self._entries)

    def find(self, kind: Hashable, arrays: tuple[object, ...]) -> Found | None:
        """Return the plan of these arrays, None if there is no such plan yet.

        The result is also None for objects that are not arrays and for an unhashable kind of call: making a plan then
        fails on all ranks together.
        """
        form = None
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
                        return node.found
            if self._has_shared and not self._has_strangers:
                form = self._form(kind, arrays)
                entry = self._forms.get(form)
                if entry is not None and entry.plan is not None and not self._met.meet(arrays):
                    return entry.plan, arrays
        except (TypeError, AttributeError):  # unhashable kinds, and objects that are not arrays
            pass
        return self._find_field(kind, arrays, form)

    def add(self, kind: Hashable, arrays: tuple[object, ...], plan: Plan) -> None:
        """Keep a plan; collective, so that the count of plans is the same on all ranks."""
        self.sweep()
        self._added += 1
        for oldest, entry in self._entries.copy().items():  # arrays may be collected meanwhile
            if entry.number > self._added - CAPACITY:
                break
            self._drop(oldest)
        shared = self._shared_key_of(arrays)
        if shared is not None and plan.relocatable:
            # `find` makes views of these arrays, too.
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
        self._remember(kind, arrays, entry, (plan, None))

    def sweep(self) -> None:
        """Close the plans that have been dropped; local."""
        while self._doomed:
            self._doomed.pop().close()

    def forget(self) -> None:
        """Forget the identities of all arrays, so that the next calls look at the arrays again; local."""
        self._calls.clear()
        self._forms.clear()
        self._met.forget()

    def clear(self) -> None:
        """Close all plans; local."""
        for key in list(self._entries):
            self._drop(key)
        self.forget()
        self.sweep()

    def _form(self, kind: Hashable, arrays: tuple[object, ...]) -> Hashable:
        """Return an address-independent key of NumPy arrays; None for other arrays, or where addresses may matter.

        Addresses do not matter in memory that NumPy has allocated and that contains no known field.
        """
        form: tuple[Hashable, ...] = (kind,)
        for array in arrays:
            if type(array) is not _ndarray:
                return None
            flags, root = array.flags, array.base
            if not flags.writeable:
                return None
            if root is None:
                root = array
            elif type(root) is _ndarray:
                flags = root.flags
            else:
                return None
            if not flags.owndata or id(root) in self._owners:
                return None
            form = (*form, array.shape, array.strides, array.dtype)
        return form

    def _find_field(
        self, kind: Hashable, arrays: tuple[object, ...], form: Hashable
    ) -> Found | None:
        """Find the plan of these fields, or the plan of their layouts."""
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
        plan, bound = entry.plan, None
        if shared is not None:
            bound = plan.views(shared[1])
            if bound is None:
                return None
            if form is not None and self._forms.get(form) not in (entry, _NEVER):
                if len(self._forms) >= CAPACITY:
                    self._forms.clear()
                self._forms[form] = entry if plan.accepts(arrays) else _NEVER
        if self._met.meet(arrays):  # `find` recognises these objects from now on
            self._remember(kind, arrays, entry, (plan, bound))
        return plan, bound

    def _remember(
        self, kind: Hashable, arrays: tuple[object, ...], entry: _Entry, found: Found
    ) -> None:
        nodes, node = self._calls.setdefault(kind, _Nodes()), None
        for array in arrays:
            if node is not None:
                if node.after is _NOTHING:
                    node.after = _Nodes()
                nodes = node.after
            node = nodes.get(id(array))
            if node is None or not node.fits(array):
                # A new node also forgets the arrays that followed this one before it changed.
                node = nodes[id(array)] = _Node(array, nodes)
        if node is not None:
            node.entry, node.found = entry, found

    def _drop(self, key: Hashable) -> None:
        """Remove an entry. This may run at any point of any code, so that `sweep` closes the plan later."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.plan is not None:
            self._doomed.append(entry.plan)
            entry.plan, entry.watched = None, ()
