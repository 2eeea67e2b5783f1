"""Random numbers of the NAS Parallel Benchmarks: ``x[k] = a x[k-1] mod 2**46``, ``a = 5**13``, ``x[0] = 314159265``.

The benchmarks use ``x[k] 2**-46`` as a value between 0 and 1, from x[1] on. A jump by n numbers is a product with
``a**n``, exact in 64-bit integers that wrap around.
"""

from __future__ import annotations

import numpy as np

SEED = 314159265
MULTIPLIER = 5**13
MODULUS = 1 << 46
MASK = np.uint64(MODULUS - 1)


def powers(base: int, start: int, count: int, step: int) -> np.ndarray:
    """Return ``base**(start + i step) mod 2**46`` for i from 0 to ``count - 1``, uint64.

    Examples
    --------
    >>> powers(5, 1, 3, 2).tolist()
    [5, 125, 3125]
    """
    found = np.empty(count, np.uint64)
    found[:1] = pow(base, start, MODULUS)
    known = 1
    while known < count:
        # 64-bit products wrap around at a multiple of 2**46, so their low 46 bits are correct.
        more = min(known, count - known)
        jump = np.uint64(pow(base, step * known, MODULUS))
        found[known : known + more] = (found[:more] * jump) & MASK
        known += more
    return found


def numbers(first: int, count: int) -> np.ndarray:
    """Return ``count`` random numbers as integers below 2**46, from x[first] on.

    Examples
    --------
    >>> numbers(1, 2).tolist()
    [55909509111989, 61155031930969]
    """
    return (powers(MULTIPLIER, first, count, 1) * np.uint64(SEED)) & MASK
