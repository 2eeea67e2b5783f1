"""What is borrowed is lent to one at a time, and made only where none is left."""

from __future__ import annotations

from itertools import count

from halox.runtime.gpu.pools import Spares


def test_one_is_made_where_none_is_free():
    numbers = count()
    spares = Spares(lambda device: (device, next(numbers)))
    first, second = spares.take(0), spares.take(0)
    assert first != second
    spares.give_back(0, first)
    assert spares.take(1) == (1, 2)
    assert spares.take(0) is first
    assert spares.take(0) == (0, 3)
