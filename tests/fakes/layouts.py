"""Selected bytes of an array, as a datatype of halox and as the offsets that NumPy lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from halox import datatypes as dt
from halox.datatypes import Datatype


@dataclass(frozen=True)
class Layout:
    """Selected bytes of an array: by a datatype, and as the byte offsets that NumPy lists in packed order."""

    datatype: Datatype
    bytes: np.ndarray
    span: int
    offset: int = 0
    """Distance of the array's address from a multiple of 256."""


def box(
    shape: Sequence[int], subsizes: Sequence[int], starts: Sequence[int], itemsize: int = 8
) -> Layout:
    """Lay out a box in an array, in C order."""
    dtype = np.dtype(f"V{itemsize}") if itemsize not in (1, 2, 4, 8) else np.dtype(f"u{itemsize}")
    slices = tuple(slice(a, a + n) for a, n in zip(starts, subsizes, strict=True))
    nbytes = prod(shape) * itemsize
    named = np.arange(nbytes).reshape(*shape, itemsize)[slices].ravel()
    return Layout(dt.subarray(shape, subsizes, starts, dtype), named, nbytes)


def rows(counts: Sequence[int], strides: Sequence[int], block: int, offset: int = 0) -> Layout:
    """Lay out nested strided blocks of bytes; the last count is the innermost."""
    named, datatype = np.arange(block), dt.contiguous(block, "u1")
    for n, stride in zip(reversed(counts), reversed(strides), strict=True):
        named = (np.arange(n)[:, None] * stride + named).ravel()
        datatype = dt.hvector(n, 1, stride, datatype)
    return Layout(datatype, named, int(named.max()) + 1, offset)


def scattered(lengths: Sequence[int], starts: Sequence[int]) -> Layout:
    """Lay out blocks of bytes of given lengths at given offsets."""
    named = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    return Layout(dt.hindexed(lengths, starts, "u1"), named, int(named.max()) + 1)
