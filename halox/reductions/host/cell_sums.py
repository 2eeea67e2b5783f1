"""Rank-local reductions on the host, blocked to avoid temporaries.

The blocks depend only on the shape, and NumPy sums each block, so that every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halox.decomposition.blocks import BLOCK, blocks
from halox.reductions.operations import wide_dtype
from halox.runtime.arrays import Array, DType


def total(cells: Array) -> object:
    """Return the sum, computed in 64 bits for each real or imaginary part."""
    return np.add.reduce(cells, None, wide_dtype(cells.dtype))


def sum_of_squares(cells: Array) -> object:
    """Return the sum of the squares of the absolute values, in float64."""
    scratch = np.empty(min(BLOCK, cells.size), "f8")

    def square(block: Array) -> object:
        into = scratch[: block.size].reshape(block.shape)
        if block.dtype.kind != "c":
            return np.add.reduce(np.square(block, out=into, dtype="f8"), None)
        both = np.square(block.real, out=into, dtype="f8").sum()
        return both + np.square(block.imag, out=into, dtype="f8").sum()

    return _summed(cells, np.dtype("f8"), lambda index: square(cells[index]))


def dot(cells: Array, others: Array) -> object:
    """Return the sum of ``conj(cells) * others``, computed in 64 bits for each real or imaginary part."""
    wide = wide_dtype(np.result_type(cells.dtype, others.dtype))
    scratch = np.empty(min(BLOCK, cells.size), wide)

    def multiply(index: tuple[slice | int, ...]) -> object:
        block = cells[index]
        into = scratch[: block.size].reshape(block.shape)
        if block.dtype.kind == "c":
            np.conjugate(block, out=into, dtype=wide)
            return np.multiply(into, others[index], out=into).sum(dtype=wide)
        return np.add.reduce(np.multiply(block, others[index], out=into, dtype=wide), None)

    return _summed(cells, wide, multiply)


@np.errstate(all="ignore")
def _summed(
    cells: Array, dtype: DType, number: Callable[[tuple[slice | int, ...]], object]
) -> object:
    if 0 < cells.size <= BLOCK:  # one block
        return number(())
    partials = [number(index) for index in blocks(cells.shape)]
    return np.array(partials, dtype).sum(dtype=dtype)


@np.errstate(all="ignore")
def moments(numbers: Array) -> tuple[Any, ...]:
    """Return mean and variance of real numbers in float64, the mean as a sum of two; reads each block once.

    A block whose mean is far from 0, compared with its deviation, subtracts the mean first, and so do later blocks;
    also a block whose squares overflow.
    """
    scratch, pivot = np.empty(min(BLOCK, numbers.size), "f8"), 0.0
    groups, counts = [], []
    for index in blocks(numbers.shape):
        block = numbers[index]
        away = scratch[: block.size]
        away.reshape(block.shape)[...] = block
        if pivot:
            away -= pivot
        mean, square = _means(away)
        if not mean * mean <= 16 * (square - mean * mean):  # also if this is not a number
            before, pivot = pivot, pivot + mean
            away -= pivot - before
            mean, square = _means(away)
        variance = square - mean * mean if square < np.inf else square
        groups.append((pivot, mean, max(variance, 0.0)))  # NaN stays
        counts.append(block.size)
    return merged(counts, groups)


def _means(block: Array) -> tuple[float, float]:
    """Return means of numbers and squares; BLAS would use several threads for more than 10 000 numbers at once."""
    count = block.size
    mean = float(np.add.reduce(block)) / count
    low, high = block[: count // 2], block[count // 2 :]
    return mean, (float(low.dot(low)) + float(high.dot(high))) / count


@np.errstate(all="ignore")
def merged(counts: Sequence[int], groups: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return mean and variance of all numbers, given the sizes and the `moments` of groups of them.

    References
    ----------
    T. F. Chan, G. H. Golub, R. J. LeVeque: Algorithms for computing the sample variance, The American Statistician 37
    (1983): the formula for two groups, here for any number.

    Examples
    --------
    >>> merged([1, 3], [(1.0, 0.0, 0.0), (3.5, 0.5, 3.0)])
    (np.float64(1.0), np.float64(2.25), np.float64(3.9375))
    """
    if len(groups) == 1:
        return tuple(groups[0])
    weights = np.array(counts) / np.sum(counts)
    pivots, shifts, variances = np.array(groups).T
    away = pivots - pivots[0] + shifts
    shift = (weights * away).sum()
    variance = (weights * (variances + (away - shift) ** 2)).sum()
    return pivots[0], shift, variance


def ends(numbers: Array) -> tuple[Any, Any]:
    """Return the smallest and the largest number."""
    return numbers.min(), numbers.max()


def place(name: str, numbers: Array) -> tuple[int, Any]:
    """Return the number of the cell that "argmin" or "argmax" of NumPy finds, in the order of the array, and its value.

    Blocks are searched in one pass; NumPy would first copy a whole strided array.
    """
    starts, values, start = [], [], 0
    for index in blocks(numbers.shape):
        block = numbers[index]
        at = int(getattr(block, name)())
        starts.append(start + at)
        values.append(block.flat[at])
        start += block.size
    best = int(getattr(np, name)(values))
    return starts[best], values[best]
