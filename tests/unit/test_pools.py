"""Pools lend an object to one user at a time, and create an object only if no object is free."""

from __future__ import annotations

from itertools import count

from halox.runtime.gpu.pools import Pool


def test_one_is_made_where_none_is_free():
    numbers = count()
    pool = Pool(lambda device: (device, next(numbers)))
    first, second = pool.take(0), pool.take(0)
    assert first != second
    pool.release(0, first)
    assert pool.take(1) == (1, 2)
    assert pool.take(0) is first
    assert pool.take(0) == (0, 3)
