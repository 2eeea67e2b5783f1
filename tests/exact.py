"""Sums by `math.fsum` or by fractions, rounded once, and numbers that are hard to add."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np


def exact_sum(numbers: Iterable[float]) -> float:
    """Return the double nearest to a sum of doubles; +0.0 for a sum of zeros."""
    return _exact_sum(np.array([float(x) for x in numbers]).tobytes())


@lru_cache(50_000)  # tests sum the same numbers on several devices
def _exact_sum(doubles: bytes) -> float:
    values = np.frombuffer(doubles).tolist()
    odd = {x for x in values if not math.isfinite(x)}
    if odd:
        return odd.pop() if len(odd) == 1 else math.nan
    try:
        return math.fsum(values) + 0.0
    except OverflowError:  # of a partial sum
        total = sum(map(Fraction, values))
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def sums(cells: Any) -> Any:
    """Return the sum of real or complex numbers, each part rounded once, as NumPy's float64 or complex128."""
    flat = np.asarray(cells).reshape(-1)
    if flat.dtype.kind == "c":
        return np.complex128(complex(exact_sum(flat.real), exact_sum(flat.imag)))
    return np.float64(exact_sum(flat))


def products(a: Any, b: Any) -> Any:
    """Return the sum of ``conj(a) * b``, of products that are rounded to double."""
    x, y = (np.asarray(each).reshape(-1).astype(_wide(each)) for each in (a, b))
    with np.errstate(all="ignore"):
        if x.dtype.kind != "c" and y.dtype.kind != "c":
            return np.float64(exact_sum(x * y))
        real = np.concatenate([x.real * y.real, x.imag * y.imag])
        imag = np.concatenate([x.real * y.imag, -(x.imag * y.real)])
    return np.complex128(complex(exact_sum(real), exact_sum(imag)))


def norm(cells: Any) -> Any:
    """Return the root of the sum of the squares of all parts, which are rounded to double."""
    with np.errstate(all="ignore"):
        return np.sqrt(np.real(products(cells, cells)))


def _wide(array: Any) -> Any:
    return "c16" if np.asarray(array).dtype.kind == "c" else "f8"


def same_bits(a: Any, b: Any) -> bool:
    """Whether two numbers have the same dtype and bits; NaNs are equal."""
    x, y = np.asarray(a), np.asarray(b)
    nan = np.isnan(x.reshape(1).view("f8")) & np.isnan(y.reshape(1).view("f8"))
    parts = [each.reshape(1).view("u8") for each in (x, y)]
    return x.dtype == y.dtype and bool(((parts[0] == parts[1]) | nan).all())


TIES = [
    [low, tie, *more]
    for low in (1.0, 1 + 2.0**-52, 2.0**40, 2.0**-1022, 1.5 * 2.0**1000)
    for tie in (math.ulp(low) / 2,)
    for more in ([0.0], [tie / 8], [-tie / 8], [2.0**-700], [-(2.0**-700)], [tie, -tie, 2.0**-1074])
]
"""Numbers whose sum is half-way between two doubles, or nearly so."""

KINDS = (
    "normal",
    "wide",
    "all exponents",
    "cancelling",
    "subnormal",
    "huge",
    "zeros",
    "ties",
    "odd",
)


def hard(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """Return ``n`` doubles."""
    x = rng.standard_normal(n)
    if kind == "wide":
        return x * np.exp(-40 * np.abs(rng.standard_normal(n)))
    if kind == "all exponents":
        return np.ldexp(x / 8, rng.integers(-1080, 1024, n))
    if kind == "cancelling":
        x = np.ldexp(x, rng.integers(-300, 300, n))
        half = x[: n // 2]
        x[n - n // 2 :] = -half
        if n % 2 == 0 and n:
            x[-1] = np.ldexp(x[0], -200) - x[0]
        return rng.permutation(x)
    if kind == "subnormal":
        return rng.integers(-(2**52), 2**52, n) * 2.0**-1074
    if kind == "huge":
        return (rng.choice([-1, 1], n) * rng.uniform(0.3, 1.79, n)) * 1e308
    if kind == "zeros":
        return rng.choice([0.0, -0.0, 1e-320, 1.0], n, p=[0.6, 0.3, 0.05, 0.05])
    if kind == "ties":  # sums of bits that are at the place of rounding, or far below
        return rng.choice([1, -1], n) * 2.0 ** rng.choice([0, -53, -54, -106, -600], n)
    if kind == "odd":
        x[rng.integers(0, max(n, 1))] = rng.choice([np.nan, np.inf, -np.inf])
        if rng.random() < 0.5:
            x[rng.integers(0, max(n, 1))] = rng.choice([np.nan, np.inf, -np.inf])
    return x
