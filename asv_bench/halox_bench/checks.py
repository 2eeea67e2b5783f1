"""Contents of memory that follow from its places, for comparison by equality; prime factors."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.datatypes import BlockList
from halox.errors import HaloxError

Bytes = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

MULTIPLIER, SHIFT = 0x9E3779B97F4A7C15, 29
"""bench.cu mixes with the same numbers."""

_AT_ONCE = 1 << 22
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


def need_numbers(dtype: str) -> None:
    """Raise `HaloxError` unless a dtype is one of numbers."""
    try:
        is_number = np.dtype(dtype).kind in "iufc"
    except TypeError:
        is_number = False
    if not is_number:
        raise HaloxError(f"dtype {dtype!r} is not one of numbers, such as f4, f8, c16, i4")


def prime_factors(n: int) -> list[int]:
    """Return the prime factors, the largest first."""
    found, factor = [], 2
    while n > 1:
        while n % factor == 0:
            found.append(factor)
            n //= factor
        factor += 1
    return found[::-1]


def mixed(places: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return the value of the eight-byte words with these numbers."""
    words = places.astype(np.uint64) * np.uint64(MULTIPLIER)
    words ^= words >> np.uint64(SHIFT)
    return words


def filled(nbytes: int) -> Bytes:
    """Return so many bytes of memory, filled."""
    return mixed(np.arange(-(-nbytes // 8))).view(np.uint8)[:nbytes]


def word_of(blocks: BlockList) -> int:
    """Return the widest word of 1, 2, 4 or 8 bytes that all blocks are made of."""
    if not blocks.n_blocks:
        return 8
    return gcd(8, int(np.gcd.reduce(blocks.offsets)), int(np.gcd.reduce(blocks.lengths)))


def word_places(blocks: BlockList, word: int) -> Iterator[Int64Array]:
    """Yield the numbers of the words that blocks are made of, in order, some millions at a time."""
    lengths = blocks.lengths // word
    stops = np.cumsum(lengths)
    total = int(stops[-1]) if stops.size else 0
    starts = blocks.offsets // word - (stops - lengths)
    for begin in range(0, total, _AT_ONCE):
        places = np.arange(begin, min(begin + _AT_ONCE, total), dtype=np.int64)
        first, last = np.searchsorted(stops, (places[0], places[-1]), side="right")
        edges = np.clip(stops[first : last + 1], None, begin + places.size)
        repeats = np.diff(edges, prepend=begin)
        yield places + np.repeat(starts[first : last + 1], repeats)


def expected(blocks: BlockList) -> Bytes:
    """Return the bytes that packing filled memory gives; offsets count from the memory's first byte."""
    word = word_of(blocks)
    dtype = np.dtype(f"u{word}")
    found = [np.empty(0, dtype)]
    for places in word_places(blocks, word):
        bits = 8 * word * (places % (8 // word))
        values = mixed(places // (8 // word)) >> bits.astype(np.uint64)
        found.append(values.astype(dtype))
    return np.concatenate(found).view(np.uint8)
