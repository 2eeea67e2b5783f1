"""Calls whose launches are not kept, and calls that a cached reduction refuses."""

from __future__ import annotations

from typing import Any

import numpy as np

from halox.collectives.prepared import PreparedReductions


class Reduction:
    def __init__(self) -> None:
        self.refused: list[Exception] = []

    def refuse(self, error: Exception) -> None:
        self.refused.append(error)

    def close(self) -> None: ...


def launch() -> None: ...


def prepare(found: PreparedReductions[Reduction], *arrays: Any, out: Any = None) -> None:
    found.prepare("sum", arrays, out, lambda: launch)


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
