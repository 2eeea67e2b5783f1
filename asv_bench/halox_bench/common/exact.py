"""Numbers that every dtype of the benchmarks holds exactly, for comparison by equality; prime factors."""

from __future__ import annotations

from typing import Any

import numpy as np

from halox.errors import HaloxError

_MODULI = {1: 113, 2: 2039}
"""By the bytes of a real number; larger types have `_MODULUS`."""

_MODULUS = 1_000_003


def need_numbers(dtype: str) -> None:
    """Raise `HaloxError` unless a dtype is one of numbers."""
    try:
        is_number = np.dtype(dtype).kind in "iufc"
    except TypeError:
        is_number = False
    if not is_number:
        raise HaloxError(f"dtype {dtype!r} is not one of numbers, such as f4, f8, c16, i4")


def modulus_of(dtype: Any) -> int:
    """Return a bound of whole numbers that a dtype, or the parts of a complex one, hold exactly.

    Examples
    --------
    >>> modulus_of("i1"), modulus_of("f2"), modulus_of("c8")
    (113, 2039, 1000003)
    """
    dtype = np.dtype(dtype)
    nbytes = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    return _MODULI.get(nbytes, _MODULUS)


def as_values(numbers: Any, dtype: Any) -> Any:
    """Return whole numbers as values of a dtype; complex ones have an imaginary part too."""
    dtype = np.dtype(dtype)
    values = numbers.astype(dtype)
    return values * dtype.type(1 - 2j) if dtype.kind == "c" else values


def prime_factors(n: int) -> list[int]:
    """Return the prime factors, the largest first."""
    found, factor = [], 2
    while n > 1:
        while n % factor == 0:
            found.append(factor)
            n //= factor
        factor += 1
    return found[::-1]
