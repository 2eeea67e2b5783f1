"""Calls that a cached reduction refuses."""

from __future__ import annotations

from halox.reductions.prepared import PreparedReductions


class Reduction:
    def __init__(self) -> None:
        self.refused: list[Exception] = []

    def refuse(self, error: Exception) -> None:
        self.refused.append(error)

    def close(self) -> None: ...


def test_refused_where_it_is_clear_what_others_call() -> None:
    found: PreparedReductions[Reduction] = PreparedReductions()
    error = ValueError()
    assert not found.refuse(error, "sum")
    first = found.add(("sum", "f8"), Reduction())
    found.add(("max", "f8"), Reduction())
    assert found.refuse(error, "sum") and first.refused == [error]
    second = found.add(("sum", "f4"), Reduction())
    assert found.refuse(error, "sum")
    assert first.refused == [error] and not second.refused
