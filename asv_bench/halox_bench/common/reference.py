"""Fill of a benchmark's memory, and the packed bytes that follow from it.

Every eight-byte word of memory holds a mixture of its own place, so that the block list alone
determines the packed bytes: no copy of the array is needed to check them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.datatypes import BlockList

Bytes = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# bench.cu mixes with the same numbers.
MULTIPLIER = 0x9E3779B97F4A7C15
SHIFT = 29

_AT_ONCE = 1 << 22


def mixed(places: npt.NDArray[Any]) -> Words:
    """Value of the eight-byte words with the given numbers.

    Examples
    --------
    >>> [hex(value) for value in mixed(np.arange(2)).tolist()]
    ['0x0', '0x9e3779bd8ef1b1de']
    """
    words = places.astype(np.uint64) * np.uint64(MULTIPLIER)
    words ^= words >> np.uint64(SHIFT)
    return words


def filled(nbytes: int) -> Bytes:
    """Memory of that many bytes, filled."""
    return mixed(np.arange(-(-nbytes // 8))).view(np.uint8)[:nbytes]


def word_of(blocks: BlockList) -> int:
    """Widest word of 1, 2, 4 or 8 bytes that all blocks are made of."""
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
    """Bytes that packing filled memory gives.

    Parameters
    ----------
    blocks : BlockList
        Offsets count from the memory's first byte.
    """
    word = word_of(blocks)
    dtype = np.dtype(f"u{word}")
    found = [np.empty(0, dtype)]
    for places in word_places(blocks, word):
        bits = 8 * word * (places % (8 // word))
        values = mixed(places // (8 // word)) >> bits.astype(np.uint64)
        found.append(values.astype(dtype))
    return np.concatenate(found).view(np.uint8)
