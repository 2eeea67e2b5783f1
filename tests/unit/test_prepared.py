"""Cached launches are found by the identity of arrays and dropped with them; the oldest reductions are evicted."""

from __future__ import annotations

from typing import Any

import numpy as np

from halox.collectives import prepared
from halox.collectives.prepared import PreparedReductions


class Reduction:
    def __init__(self) -> None:
        self.refused: list[Exception] = []
        self.is_closed = False

    def refuse(self, error: Exception) -> None:
        self.refused.append(error)

    def close(self) -> None:
        self.is_closed = True


def launch() -> None: ...


def prepare(found: PreparedReductions[Reduction], *arrays: Any, out: Any = None) -> None:
    found.prepare("sum", arrays, out, lambda: launch)


def test_found_again_by_identity_alone():
    found: PreparedReductions[Reduction] = PreparedReductions()
    a, b = np.zeros(3), np.zeros((3, 2))
    prepare(found, a, out=b)
    prepare(found, a, None, out=a)
    assert found.launches["sum", id(a), id(b)] == (launch, (3,))
    assert found.launches["sum", id(a), id(None), id(a)] == (launch, (3,))
    assert ("sum", id(b), id(a)) not in found.launches
    assert ("max", id(a), id(b)) not in found.launches
    found.forget()
    assert not found.launches


def test_all_are_kept_up_to_the_most(monkeypatch):
    monkeypatch.setattr(prepared, "MOST_LAUNCHES", 20)
    found: PreparedReductions[Reduction] = PreparedReductions()
    arrays, out = [np.zeros(3) for _ in range(25)], np.zeros(())
    for number, array in enumerate(arrays, 1):
        prepare(found, array, out=out)
        assert len(found.launches) == min(number, 20)
    assert [key[1] for key in found.launches] == [id(array) for array in arrays[5:]]


def test_gone_with_any_of_its_arrays():
    found: PreparedReductions[Reduction] = PreparedReductions()
    a, b = np.zeros(3), np.zeros(3)
    prepare(found, a, out=b)
    del b
    assert not found.launches


def test_what_cannot_be_watched_is_not_kept():
    found: PreparedReductions[Reduction] = PreparedReductions()
    array, memory = np.zeros(3), memoryview(b"123")
    for _ in range(3):
        prepare(found, 5)
        prepare(found, array, out=5)
        prepare(found, memory, out=[1])
    assert not found.launches


def test_a_call_that_is_more_than_a_launch_is_not_kept():
    found: PreparedReductions[Reduction] = PreparedReductions()
    array = np.zeros(3)
    found.prepare("sum", (array,), array, lambda: None)
    assert not found.launches


def test_without_out_only_when_met_again(monkeypatch):
    monkeypatch.setattr(prepared, "MOST_LAUNCHES", 3)
    found: PreparedReductions[Reduction] = PreparedReductions()
    a, b = np.zeros(3), np.zeros(3)
    prepare(found, a)
    assert not found.launches
    prepare(found, a)
    assert list(found.launches) == [("sum", id(a), id(None))]
    prepare(found, a, b)
    assert len(found.launches) == 1
    prepare(found, b, a)
    assert len(found.launches) == 2
    for _ in range(9):
        prepare(found, np.zeros(3))
    assert len(found.launches) == 2, "most of them at one address"
    prepare(found, a)
    found.forget()
    prepare(found, a)
    assert not found.launches


def test_the_oldest_launch_goes_first(monkeypatch):
    monkeypatch.setattr(prepared, "MOST_LAUNCHES", 2)
    found: PreparedReductions[Reduction] = PreparedReductions()
    arrays = [np.zeros(1) for _ in range(3)]
    for array in arrays:
        prepare(found, array, out=array)
    assert [("sum", id(array), id(array)) in found.launches for array in arrays] == [
        False,
        True,
        True,
    ]


def test_the_oldest_reduction_is_closed_first():
    found: PreparedReductions[Reduction] = PreparedReductions(2)
    made = [found.add(("sum", n), Reduction()) for n in range(3)]
    assert [one.is_closed for one in made] == [True, False, False]
    assert list(found.reductions) == [("sum", 1), ("sum", 2)]
    assert found.reductions["sum", 2] is made[2]
    found.close()
    assert all(one.is_closed for one in made) and not found.reductions


def test_refused_where_it_is_clear_what_others_call():
    found: PreparedReductions[Reduction] = PreparedReductions()
    error = ValueError()
    assert not found.refuse(error, "sum")
    first = found.add(("sum", "f8"), Reduction())
    found.add(("max", "f8"), Reduction())
    assert found.refuse(error, "sum") and first.refused == [error]
    second = found.add(("sum", "f4"), Reduction())
    assert found.refuse(error, "sum")
    assert first.refused == [error] and not second.refused
