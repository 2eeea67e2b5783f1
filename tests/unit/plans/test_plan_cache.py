"""The plan cache: lookup by object and by field, while the arrays exist and the plan is among the most recent."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np

from halox.plans.cache import PlanCache
from halox.runtime.arrays import describe, owner


def found(cache: PlanCache, kind: Any, arrays: Any) -> Any:
    """Return the cached plan, or None."""
    plan = cache.known.find(kind, arrays) or cache.find(kind, arrays)
    return plan and plan[0]


def key_of(arrays: tuple[Any, ...]) -> Any:
    found = [(id(owner(array)), describe(array)) for array in arrays]
    return tuple((i, d.pointer, d.shape, d.strides, d.dtype, d.writable) for i, d in found), None


class Runner(SimpleNamespace):
    is_closed = False
    relocatable, bound = False, None

    def close(self) -> None:
        self.is_closed = True


def test_found_by_object_and_by_field():
    cache, u, v = PlanCache(key_of), np.zeros((2, 3)), np.zeros(4)
    one, two = Runner(), Runner()
    assert found(cache, "exchange", (u,)) is None
    cache.add("exchange", (u,), one)
    cache.add("exchange", (u, v), two)
    for _ in range(2):
        assert found(cache, "exchange", (u,)) is found(cache, "exchange", (u[:],)) is one
        assert found(cache, "exchange", (u, v)) is found(cache, "exchange", (u[:], v)) is two
        assert found(cache, "exchange", (v,)) is found(cache, "exchange", (v, u)) is None
        assert found(cache, "add", (u,)) is found(cache, "exchange", ()) is None
        assert (
            found(cache, "exchange", (u[:1],)) is found(cache, "exchange", (u.view("i8"),)) is None
        )
    assert len(cache) == 2


def test_an_entry_ends_with_its_arrays_and_holds_none():
    cache, u, v = PlanCache(key_of), np.zeros(3), np.zeros(4)
    plans = [Runner() for _ in range(3)]
    for arrays, plan in zip([(u,), (u, v), (v,)], plans, strict=True):
        cache.add("exchange", arrays, plan)
    views = [u[:] for _ in range(5)]
    assert {id(found(cache, "exchange", (view,))) for view in views} == {id(plans[0])}
    gone = weakref.ref(u)
    del u, views
    assert gone() is None, "without a collection"
    assert len(cache) == 1 and found(cache, "exchange", (v,)) is plans[2]
    cache.sweep()
    assert [plan.is_closed for plan in plans] == [True, True, False]


def test_a_cache_that_is_dropped_goes_without_a_collection():
    gc.disable()
    try:
        cache, u, v = PlanCache(key_of), np.zeros(3), np.zeros(4)
        plan = Runner()
        gone = weakref.ref(plan)
        cache.add("exchange", (u, v), plan)
        del cache, plan
        assert gone() is None
    finally:
        gc.enable()
