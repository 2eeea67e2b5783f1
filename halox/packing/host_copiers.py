"""Copies between host memory and packed bytes, with NumPy: a `Copier` for each form of a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import setitem

import numpy as np
import numpy.typing as npt

from halox.datatypes import BlockList
from halox.datatypes.arguments import Int64Array
from halox.packing.blocking import blocked, copy_all
from halox.packing.host_views import View
from halox.runtime.arrays import Array

Bytes = npt.NDArray[np.uint8]
"""One-dimensional array of bytes."""

Call = Callable[[], object]
"""A prepared copy."""

# Largest index that is cached between calls, in entries (32 MiB); each call builds a longer index piece by piece.
_CACHED_INDEX = 1 << 22


Copier = Callable[[Bytes, Bytes, bool], Call]
"""Function of memory, packed bytes and a flag. It returns a call that packs memory, or with True unpacks to memory.

The arguments have been checked, and ``packed`` has the right size.
"""

Pair = tuple[View, View]
"""Views of equal shape and dtype: of memory, and of packed bytes."""


def strided(pairs: Sequence[Pair], memory: Bytes, packed: Bytes, unpack: bool) -> Call:
    """Return a call that copies regular parts, one by one, or tile by tile if the order of the axes changes."""
    views = [(mine.of(memory), other.of(packed)) for mine, other in pairs]
    moves = blocked(views if unpack else [(other, mine) for mine, other in views])
    if len(moves) == 1:  # `np.copyto` takes 0.15 us longer to start
        return partial(setitem, moves[0][0], ..., moves[0][1])
    return partial(copy_all, moves)


def places_of(blocks: BlockList) -> list[tuple[slice, slice]]:
    """Return each block's slice of the memory and its slice of the packed bytes."""
    stops = np.cumsum(blocks.lengths)
    return [
        (slice(start, start + length), slice(stop - length, stop))
        for start, length, stop in zip(
            blocks.offsets.tolist(), blocks.lengths.tolist(), stops.tolist(), strict=True
        )
    ]


_WHOLE = slice(None)


def sliced(
    places: Sequence[tuple[slice, slice]], memory: Bytes, packed: Bytes, unpack: bool
) -> Call:
    """Return a call that copies long blocks at any displacements, or a single block, by one slice copy per block."""
    mine, other = memory.data, packed.data
    moves = [
        (mine[place], other[there]) if unpack else (other[there], mine[place])
        for place, there in places
    ]
    if len(moves) == 1:
        return partial(setitem, moves[0][0], _WHOLE, moves[0][1])
    return partial(_slice_all, moves)


def _slice_all(moves: Sequence[tuple[memoryview, memoryview]]) -> None:
    for target, source in moves:
        target[:] = source


def gathered(index: Index, memory: Bytes, packed: Bytes, unpack: bool) -> Call:
    """Return a call that copies short blocks at any displacements, as words or equal blocks, through an index."""
    step, size = index.step, index.itemsize
    if size > step:  # a block may begin at any word: view overlapping elements, one word apart
        places = (memory.size - size) // step + 1
        blocks = np.ndarray((places,), f"V{size}", memory.data, strides=(step,))
        return partial(
            _unpack_parts if unpack else _pack_blocks, blocks, index, packed.view(blocks.dtype)
        )
    whole = memory[: memory.size // step * step]
    words = whole.view(f"u{step}")
    if not words.flags.aligned:
        # NumPy would first copy all of an unaligned array. Words of a void dtype need no alignment.
        words = whole.view(f"V{step}")
    buffer, cached = packed.view(words.dtype), index.cached()
    if cached is None:
        return partial(_unpack_parts if unpack else _pack_parts, words, index, buffer)
    if unpack:
        return partial(setitem, words, cached, buffer)
    # Indices are in range by construction; "clip" avoids NumPy's buffered copy for checks.
    return partial(words.take, cached, None, buffer, "clip")


def _pack_blocks(blocks: Array, index: Index, target: Array) -> None:
    for part, places in index.parts():
        target[part] = blocks[places]  # `take` would first copy all of an array with overlaps


def _pack_parts(words: Array, index: Index, target: Array) -> None:
    for part, places in index.parts():
        words.take(places, None, target[part], "clip")


def _unpack_parts(words: Array, index: Index, source: Array) -> None:
    for part, places in index.parts():
        words[places] = source[part]


class Index:
    """Places of a block list's elements, in order, in units of ``step`` bytes."""

    def __init__(self, blocks: BlockList, itemsize: int, step: int) -> None:
        self._stops = np.cumsum(blocks.lengths // itemsize)
        self._begins = self._stops - blocks.lengths // itemsize
        self._starts = blocks.offsets // step
        self.itemsize, self.step = itemsize, step
        self._stride = itemsize // step
        self._total = int(self._stops[-1]) if self._stops.size else 0
        self._cached: Int64Array | None = None

    def cached(self) -> Int64Array | None:
        """Return all places, which the first call computes and caches; None if there are too many."""
        if self._cached is None and self._total <= _CACHED_INDEX:
            self._cached = self._between(0, self._total)
        return self._cached

    def parts(self) -> Iterator[tuple[slice, Int64Array]]:
        """Yield slices of the packed elements, each with the places of its elements in memory."""
        cached, total = self.cached(), self._total
        if cached is not None:
            yield slice(0, total), cached
            return
        for begin in range(0, total, _CACHED_INDEX):
            stop = min(begin + _CACHED_INDEX, total)
            yield slice(begin, stop), self._between(begin, stop)

    def _between(self, begin: int, stop: int) -> Int64Array:
        blocks = slice(
            int(np.searchsorted(self._stops, begin, side="right")),
            int(np.searchsorted(self._begins, stop, side="left")),
        )
        begins, stops = self._begins[blocks], self._stops[blocks]
        counts = np.minimum(stops, stop) - np.maximum(begins, begin)
        origin = np.repeat(self._starts[blocks] - begins * self._stride, counts)
        places: Int64Array = origin + np.arange(begin, stop, dtype=np.int64) * self._stride
        return places
