"""Rank-local reductions on the host, blocked to avoid temporaries.

The blocks depend only on the shape, and NumPy sums each block, so that every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

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
