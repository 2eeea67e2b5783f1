"""Pools lend an object to one user at a time, and create an object only if no object is free."""

from __future__ import annotations

from itertools import count

from halox.runtime.gpu.pools import Pool


def test_one_is_made_where_none_is_free():
    numbers = count()
    pool = Pool(lambda device: (device, next(numbers)))
    first, second = pool.acquire(0), pool.acquire(0)
    assert first != second
    pool.release(0, first)
    assert pool.acquire(1) == (1, 2)
    assert pool.acquire(0) is first
    assert pool.acquire(0) == (0, 3)
