"""What is kept for arrays is found by identity, and gone with them."""

from __future__ import annotations

import numpy as np

from halox.runtime import array_cache as seen
from halox.runtime.array_cache import Seen


def test_found_again_by_identity_alone():
    kept: Seen[str] = Seen()
    a, b = np.zeros(3), np.zeros(3)
    kept.keep("sum", (a, b), "both")
    kept.keep("sum", (a, None), "one")
    assert kept.found["sum", id(a), id(b)] == "both"
    assert kept.found["sum", id(a), id(None)] == "one"
    assert ("sum", id(b), id(a)) not in kept.found
    assert ("max", id(a), id(b)) not in kept.found
    kept.clear()
    assert not kept.found


def test_gone_with_any_of_its_arrays():
    kept: Seen[str] = Seen()
    a, b = np.zeros(3), np.zeros(3)
    kept.keep("sum", (a, b), "both")
    del b
    assert not kept.found


def test_what_cannot_be_watched_is_not_kept():
    kept: Seen[str] = Seen()
    kept.keep("sum", (5,), "a number")
    assert not kept.found


def test_met_before_only_while_it_lives(monkeypatch):
    monkeypatch.setattr(seen, "CAPACITY", 3)
    kept: Seen[str] = Seen()
    a, b = np.zeros(3), np.zeros(3)
    assert not kept.again((a,)) and kept.again((a,))
    assert not kept.again((a, b)) and kept.again((b, a))
    assert not any(kept.again((np.zeros(3),)) for _ in range(9)), "most of them at one address"
    assert not kept.again((5,)) and not kept.again((5,)), "cannot be watched"
    kept.again((a,))
    kept.clear()
    assert not kept.again((a,))


def test_the_oldest_goes_first(monkeypatch):
    monkeypatch.setattr(seen, "CAPACITY", 2)
    kept: Seen[int] = Seen()
    arrays = [np.zeros(1) for _ in range(3)]
    for number, array in enumerate(arrays):
        kept.keep("sum", (array,), number)
    assert [kept.found.get(("sum", id(array))) for array in arrays] == [None, 1, 2]
