"""Blocks of an array that fit a core's cache, for sums, statistics, gathering and files."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

BLOCK = 1 << 14
"""Most cells of a block: with 64 or 128 bits per cell they stay in a core's cache."""


def blocks(shape: tuple[int, ...], most: int = BLOCK) -> Iterator[tuple[slice | int, ...]]:
    """Yield the indices of blocks of at most ``most`` cells (1 or more), in order; short rows are not divided.

    Examples
    --------
    >>> list(blocks((5, 4), most=8))
    [(slice(0, 2, None),), (slice(2, 4, None),), (slice(4, 6, None),)]
    >>> list(blocks((2, 3), most=2))[:2]
    [(0, slice(0, 2, None)), (0, slice(2, 4, None))]
    """
    inner = prod(shape[1:])
    if not shape or inner == 0:
        yield ()
    elif inner <= most:
        rows = most // inner
        for start in range(0, shape[0], rows):
            yield (slice(start, start + rows),)
    else:
        for row in range(shape[0]):
            for index in blocks(shape[1:], most):
                yield (row, *index)
