"""Arrays known by identity: a value ends with its arrays, and does not hold for a changed array."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from halox.runtime import known_arrays
from halox.runtime.known_arrays import KnownArrays


class Foreign:
    """An array of another library."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def test_found_by_identity_order_and_kind() -> None:
    table: KnownArrays[int] = KnownArrays()
    u, v = np.zeros(3), np.zeros((3, 2))
    table.keep("sum", (u,), 1)
    table.keep("sum", (u, v), 2)
    table.keep("max", (v,), 3)
    found = [table.find("sum", arrays) for arrays in ((u,), (u, v), (v,), (v, u))]
    assert found == [1, 2, None, None]
    assert table.find("max", (v,)) == 3 and table.find("max", (u,)) is None
    assert table.find("sum", (u[:],)) is None and table.find("sum", ()) is None
    table.keep("sum", (u,), 4)
    assert table.find("sum", (u,)) == 4 and len(table) == 3
    table.forget()
    assert table.find("sum", (u,)) is None and not len(table)


CHANGES: dict[str, Callable[[Any], object]] = {
    "shape": lambda u: setattr(u, "shape", (3, 2)),
    "axes": lambda u: setattr(u, "shape", (6,)),
    "dtype": lambda u: setattr(u, "dtype", "i8"),
    "writable": lambda u: u.setflags(write=False),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_array_is_unknown_with_all_that_followed_it(change: Any) -> None:
    table: KnownArrays[int] = KnownArrays()
    u, v = np.zeros((2, 3)), np.zeros(4)
    table.keep(0, (u,), 1)
    table.keep(0, (u, v), 2)
    assert table.find(0, (u,)) == 1
    change(u)
    assert table.find(0, (u,)) is table.find(0, (u, v)) is None
    table.keep(0, (u,), 3)
    assert table.find(0, (u,)) == 3 and table.find(0, (u, v)) is None


def test_other_libraries_arrays_change_by_their_shape() -> None:
    table: KnownArrays[int] = KnownArrays()
    u = Foreign((2, 3))
    table.keep(0, (u,), 1)
    assert table.find(0, (u,)) == 1
    u.shape = (3, 2)
    assert table.find(0, (u,)) is None


@pytest.mark.parametrize("number", [0, 1])
def test_a_value_ends_with_any_of_its_arrays_and_holds_none(number: int) -> None:
    table: KnownArrays[int] = KnownArrays()
    arrays = [np.zeros(3), np.zeros(4)]
    table.keep(0, arrays, 1)
    gone = weakref.ref(arrays.pop(number))
    assert gone() is None and not len(table), "without a collection"


def test_objects_that_are_never_found() -> None:
    table: KnownArrays[int] = KnownArrays()
    for thing in (None, 1.5, [0.0], "u", memoryview(b"123")):
        assert table.find(0, (thing,)) is None and not table.passed_before((thing,))
    with pytest.raises(TypeError, match="weak reference"):
        table.keep(0, (np.zeros(3), 5), 1)


def test_arrays_that_were_passed_before() -> None:
    table: KnownArrays[int] = KnownArrays()
    u, v = np.zeros(3), np.zeros(3)
    found = [table.passed_before(arrays) for arrays in ((u,), (u,), (u, v), (v, u))]
    assert found == [False, True, False, True]
    # Temporaries, most of them at one address, are always new; the oldest arrays are forgotten for them.
    assert not any(table.passed_before((np.zeros(3),)) for _ in range(9))
    many = [np.zeros(1) for _ in range(2 * known_arrays._MOST_PASSED)]
    assert not any(table.passed_before((one,)) for one in many) and not table.passed_before((u,))
    assert table.passed_before((many[-1],))
    table.forget()
    assert not table.passed_before((many[-1],))


def test_a_dropped_table_needs_no_collection() -> None:
    gc.disable()
    try:
        table: KnownArrays[Any] = KnownArrays()
        value, u, v = Foreign(()), np.zeros(3), np.zeros(4)
        gone = weakref.ref(value)
        table.keep(0, (u, v), value)
        del table, value
        assert gone() is None
    finally:
        gc.enable()
