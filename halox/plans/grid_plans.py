"""Plans of the exchanges of a grid's fields: for calls of `exchange` and `accumulate`, and for callers of `plan`.

`halox.Grid` looks up the arrays of a call in ``cache`` itself, to save time, and calls `GridPlans.add` for new ones.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from halox.decomposition import exchange_regions
from halox.decomposition.normalise import other_axes
from halox.domain import Domain
from halox.errors import FieldError
from halox.paths.base import Operation
from halox.plans.cache import CachedPlan, PlanCache
from halox.plans.draft import Draft
from halox.plans.halo import halo_draft
from halox.plans.making import make_domain_plan
from halox.plans.plan import Plan
from halox.plans.runner import Runner
from halox.runtime.call_guard import single_threaded
from halox.values import check_bool

if TYPE_CHECKING:
    from halox.paths.peer.stores import StoreChannel
    from halox.plans.loops import Check


class GridPlans:
    """Plans of a domain; the methods that make plans are collective."""

    def __init__(self, domain: Domain) -> None:
        self._domain, self._world, self._layouts = domain, domain.world, domain.layouts
        self.cache = PlanCache(self._layouts.key)
        self._layouts.register(self.cache.known)
        self._fixed_axes: dict[Any, tuple[int, ...]] = {}  # by the arguments of earlier calls

    def key(self, key: Hashable, axes: object) -> Hashable:
        """Return the key of a call along some axes; if these are invalid, no plan has the key."""
        try:
            if axes is not True and axes is not False:  # no axes, but as keys they equal 1 and 0
                return key, self._fixed_axes[axes]
        except (KeyError, TypeError):  # new, or unhashable
            pass
        try:
            return key, self._fixed(axes)
        except FieldError:
            return key, None

    def of_call(
        self,
        fields: tuple[object, ...],
        corners: bool | None,
        key: Hashable,
        call: str | None = None,
    ) -> CachedPlan:
        """Return the plan of an exchange of some fields, which is made in the first call with their layouts."""
        known = self.cache.known.find(key, fields) or self.cache.find(key, fields)
        return known or self.add("copy", fields, corners, key, call)

    @single_threaded
    def add(
        self,
        /,
        operation: Operation,
        fields: tuple[object, ...],
        corners: bool | None,
        key: Hashable,
        call: str | None = None,
        **options: Any,
    ) -> CachedPlan:
        """Make the plan of an exchange or accumulation; ``key`` tells apart plans of the same fields.

        ``call`` is the name of the method that was called, by default that of the operation.
        """
        self._world.begin(call or ("exchange" if operation == "copy" else "accumulate"))
        runner = self.make(operation, fields, corners, keep=False, **options)
        return self.cache.add(key, fields, runner)

    @single_threaded
    def persistent(
        self,
        fields: tuple[Any, ...],
        corners: bool | None,
        path: str | None,
        every: int,
        overlap: Literal["auto"] | bool,
        axes: object,
    ) -> Plan:
        """Make the plan of `halox.Grid.plan`."""
        from halox.plans.loops import Loops, check_options, check_same_arrays

        domain = self._domain
        self._world.begin("plan")
        check: Check = partial(check_options, every, overlap)
        runner = self.make("copy", fields, corners, keep=True, path=path, axes=axes, check=check)
        fixed, key = self._fixed(axes), ("plan", domain.plans_made)
        read = [self._layouts.read(field, halo=True) for field in fields]
        is_same: Check = partial(check_same_arrays, read)

        def find(others: tuple[object, ...], operation: Operation = "copy") -> CachedPlan:
            kind = (operation, key)
            known = self.cache.known.find(kind, others) or self.cache.find(kind, others)
            return known or self.add(
                operation, others, corners, kind, path=path, axes=axes, check=is_same
            )

        def stores(*given: object) -> StoreChannel:
            from halox.paths.peer.stores import make_stores

            with_corners = domain.division.corners if corners is None else corners
            regions = exchange_regions(read[0][1], with_corners, fixed)
            return make_stores(domain.context, read, regions, *given)

        report = runner.report
        others = [row for row in report.rows if row.peer != report.rank]
        remote_us = max((row.predicted_us or math.inf for row in others), default=0.0)
        loops = Loops(read, every, overlap, find, fixed, remote_us)
        return Plan(runner, loops, stores)

    def make(
        self,
        operation: Operation,
        fields: tuple[object, ...],
        corners: bool | None,
        *,
        keep: bool,
        path: str | None = None,
        axes: object = None,
        check: Check = lambda *_: 1,
    ) -> Runner:
        """Make a plan; ``check`` checks the fields on each rank, and returns the steps between exchanges."""

        def draft() -> Draft:
            with_corners = (
                self._domain.division.corners
                if corners is None
                else check_bool("corners", corners, FieldError)
            )
            if not fields:
                raise FieldError("no field given; pass one or more arrays of this grid")
            read = [self._layouts.read(field, halo=True) for field in fields]
            every, fixed = check(read, with_corners), self._fixed(axes)
            if every > 1 and fixed:
                raise FieldError(f"every={every} needs whole halos; leave out axes={axes!r}")
            draft = halo_draft(
                fields,
                read,
                operation=operation,
                corners=with_corners,
                fixed=fixed,
                numbers=tuple([self._layouts.number(described) for described, _ in read]),
                relocatable=not keep and not any(map(self._layouts.is_own, fields)),
            )
            if every == 1 and not fixed:
                return draft
            # The plan compares these texts between ranks.
            moved = [name for n, name in enumerate(self._domain.labels.dims) if n not in fixed]
            more = f", axes={tuple(moved)}" if fixed else f", every={every}"
            return replace(draft, specs=tuple(spec + more for spec in draft.specs))

        call = "start of a plan" if keep else "exchange" if operation == "copy" else "accumulate"
        self.cache.sweep()
        runner = make_domain_plan(self._domain, draft, keep=keep, path=path, call=call)
        self._domain.plans_made += 1
        return runner

    def _fixed(self, axes: object) -> tuple[int, ...]:
        """Return the grid axes along which an exchange leaves halos as they are."""
        if axes is None:
            return ()
        fixed = other_axes(axes, self._domain.labels.dims)
        if isinstance(axes, (str, int, tuple)):
            self._fixed_axes[axes] = fixed
        return fixed
