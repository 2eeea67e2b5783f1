"""Initial values: the benchmark's random numbers, two per point, x fastest.

The point with linear index g has real part x[2 g + 1] and imaginary part x[2 g + 2]. The power of ``a`` for a number is
a product of one factor per coordinate, so that points can be computed independently.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..nas_random_numbers import MASK, MULTIPLIER, SEED, powers

Factors = tuple[np.ndarray, np.ndarray, np.ndarray]


def factors(shape: tuple[int, int, int], owned: Sequence[slice]) -> Factors:
    """Return the factors, modulo 2**46, of the random numbers of a block.

    Parameters
    ----------
    shape : tuple of int
        Points of the grid along z, y and x.
    owned : sequence of slice
        Ranges of the block along z, y and x.

    Returns
    -------
    z, y, x : ndarray of uint64
        One factor per plane, one per row, and two per point of a row, for real and imaginary part.

    Examples
    --------
    >>> z, y, x = factors((4, 4, 4), (slice(0, 4),) * 3)
    >>> len(z), len(y), x[:2].tolist()
    (4, 4, [55909509111989, 61155031930969])
    """
    _, rows, columns = shape
    z, y, x = owned
    row, plane = 2 * columns, 2 * columns * rows
    return (
        powers(MULTIPLIER, plane * z.start, z.stop - z.start, plane),
        powers(MULTIPLIER, row * y.start, y.stop - y.start, row),
        powers(MULTIPLIER, 2 * x.start + 1, 2 * (x.stop - x.start), 1) * np.uint64(SEED) & MASK,
    )
