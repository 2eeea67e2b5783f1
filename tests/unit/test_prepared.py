"""Cached launches are found in the known arrays; the oldest reductions are evicted."""

from __future__ import annotations

from typing import Any

import numpy as np

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


def test_prepared_for_the_next_call() -> None:
    found: PreparedReductions[Reduction] = PreparedReductions()
    a, b = np.zeros(3), np.zeros((3, 2))
    prepare(found, a, out=b)
    prepare(found, a, out=a)
    for arrays in ((a, b), (a, a)):
        assert found.known.find("sum", arrays) is launch
        assert found.known.find("max", arrays) is None


def test_what_cannot_be_watched_is_not_kept():
    found: PreparedReductions[Reduction] = PreparedReductions()
    array, memory = np.zeros(3), memoryview(b"123")
    for _ in range(3):
        prepare(found, 5)
        prepare(found, array, out=5)
        prepare(found, memory, out=[1])
    assert not len(found.known)


def test_a_call_that_is_more_than_a_launch_is_not_kept():
    found: PreparedReductions[Reduction] = PreparedReductions()
    array = np.zeros(3)
    found.prepare("sum", (array,), array, lambda: None)
    assert not len(found.known)


def test_without_out_only_when_passed_again() -> None:
    found: PreparedReductions[Reduction] = PreparedReductions()
    a, b = np.zeros(3), np.zeros(3)
    prepare(found, a)
    assert not len(found.known)
    prepare(found, a)
    assert found.known.find("sum", (a,)) is launch
    prepare(found, a, b)
    assert len(found.known) == 1
    prepare(found, b, a)
    assert len(found.known) == 2


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
