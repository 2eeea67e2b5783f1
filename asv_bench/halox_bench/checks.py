"""Contents of arrays and memory that follow from places, for comparison by equality."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

_CHUNK_CELLS = 1 << 22
_MODULI = {1: 113, 2: 2039}
"""By the bytes of a real number; larger ones have the modulus 1,000,003."""


def modulus_of(dtype: Any) -> int:
    """Return a bound of whole numbers that a dtype, or the parts of a complex one, hold exactly."""
    dtype = np.dtype(dtype)
    nbytes = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    return _MODULI.get(nbytes, 1_000_003)


def as_values(numbers: Any, dtype: Any) -> Any:
    """Return whole numbers as values of a dtype; complex ones have an imaginary part too."""
    dtype = np.dtype(dtype)
    values = numbers.astype(dtype)
    return values * dtype.type(1 - 2j) if dtype.kind == "c" else values


def chunks(shape: Sequence[int]) -> Iterator[slice]:
    """Yield slices of the first axis of an array, each of some million cells."""
    planes = max(1, _CHUNK_CELLS // prod(shape[1:]))
    for start in range(0, shape[0], planes):
        yield slice(start, min(start + planes, shape[0]))


def outer_sum(along: Sequence[Any], at: slice) -> Any:
    """Return the sum of arrays along an axis each as an array of all axes; of the first axis a slice."""
    total: Any = 0
    for axis, values in enumerate(along):
        part = values[at] if axis == 0 else values
        total = total + part.reshape((-1,) + (1,) * (len(along) - 1 - axis))
    return total


def filled(nbytes: int, xp: Any = np) -> Any:
    """Return so many bytes of memory whose every eight-byte word is a mixture of its place."""
    words = xp.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    return words.view(np.uint8)[:nbytes]
