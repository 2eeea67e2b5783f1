"""NumPy's result of a reduction over ranks, and random input values."""

from __future__ import annotations

from functools import reduce

import numpy as np

NUMPY = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
}


def sample(dtype, op, shape, seed=0):
    """Return random values, including extremes, NaN and infinities, which naive code mishandles."""
    dtype, rng = np.dtype(dtype), np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        found = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        found[rng.random(shape) < 0.3] = 0
        return found
    if dtype.kind == "c":
        # Products of small whole numbers are exact, in any order of summation.
        found = rng.integers(-9, 9, shape) + 1j * rng.integers(-9, 9, shape)
        return found.astype(dtype) if op == "prod" else (found / 7).astype(dtype)
    found = rng.normal(size=shape).astype(dtype)
    for value in (np.nan, np.inf, -np.inf):
        found[rng.random(shape) < 0.1] = value
    return found


def expected(op, values):
    """Reduce the ranks' values with NumPy, in rank order."""
    values = list(values)
    with np.errstate(all="ignore"):
        if op.startswith("logical"):
            truth = [value != 0 for value in values]
            return reduce(NUMPY[op], truth).astype(values[0].dtype)
        return reduce(NUMPY[op], values)


def same(found, wanted):
    """Whether two arrays have the same bits, ignoring the sign and the payload of NaNs."""
    plain = np.isnan(wanted) if wanted.dtype.kind in "fc" else np.zeros(wanted.shape, bool)
    if wanted.dtype.kind in "fc" and not np.array_equal(np.isnan(found), plain):
        return False
    return found[~plain].tobytes() == wanted[~plain].tobytes()
