"""Copies between host memory and packed bytes, by NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import setitem
from typing import Protocol

import numpy as np
import numpy.typing as npt

from halox.datatypes import BlockList
from halox.datatypes.arguments import Int64Array
from halox.packing.blocking import Move, blocked, copy_all
from halox.runtime.arrays import Array

Bytes = npt.NDArray[np.uint8]
"""One-dimensional array of bytes."""

Call = Callable[[], object]

# Words of index kept between calls (32 MiB); longer indices are made piece by piece each time.
_KEPT_INDEX = 1 << 22


class Copier(Protocol):
    """One way to copy between some memory and packed bytes; buffers are checked and of the right size."""

    def packing(self, out: Bytes) -> Call:
        """Return the call that packs into a buffer."""

    def unpacking(self, packed: Bytes) -> Call:
        """Return the call that unpacks a buffer."""


class Strided:
    """Regular blocks: one strided copy, or one a tile where the packed order is another than that in memory."""

    def __init__(self, view: Array) -> None:
        self._view = view

    def packing(self, out: Bytes) -> Call:
        """Return the call that packs into a buffer."""
        return _copying((out.view(self._view.dtype).reshape(self._view.shape), self._view))

    def unpacking(self, packed: Bytes) -> Call:
        """Return the call that unpacks a buffer."""
        return _copying((self._view, packed.view(self._view.dtype).reshape(self._view.shape)))


def _copying(move: Move) -> Call:
    moves = blocked([move])
    if len(moves) == 1:  # `np.copyto` takes 0.15 us longer to begin
        return partial(setitem, moves[0][0], ..., moves[0][1])
    return partial(copy_all, moves)


class Sliced:
    """Long blocks of any kind, or one: one slice copy a block."""

    def __init__(self, memory: Bytes, places: Sequence[tuple[slice, slice]]) -> None:
        self._memory, self._places = memory, places

    @staticmethod
    def places(blocks: BlockList) -> list[tuple[slice, slice]]:
        """Return each block's place in memory, and the one among packed bytes."""
        stops = np.cumsum(blocks.lengths)
        return [
            (slice(start, start + length), slice(stop - length, stop))
            for start, length, stop in zip(
                blocks.offsets.tolist(), blocks.lengths.tolist(), stops.tolist(), strict=True
            )
        ]

    def packing(self, out: Bytes) -> Call:
        """Return the call that packs into a buffer."""
        target, source = out.data, self._memory.data
        return _slicing([(target[packed], source[place]) for place, packed in self._places])

    def unpacking(self, packed: Bytes) -> Call:
        """Return the call that unpacks a buffer."""
        target, source = self._memory.data, packed.data
        return _slicing([(target[place], source[there]) for place, there in self._places])


_WHOLE = slice(None)


def _slicing(moves: Sequence[tuple[memoryview, memoryview]]) -> Call:
    if len(moves) == 1:
        return partial(setitem, moves[0][0], _WHOLE, moves[0][1])
    return partial(_slice_all, moves)


def _slice_all(moves: Sequence[tuple[memoryview, memoryview]]) -> None:
    for target, source in moves:
        target[:] = source


class Gathered:
    """Short blocks of any kind: gather and scatter words through an index."""

    def __init__(self, memory: Bytes, word: int, index: Index) -> None:
        aligned = memory.ctypes.data % word == 0
        # Opaque words have no alignment: NumPy would copy the whole of unaligned memory first.
        self._dtype = np.dtype(f"u{word}" if aligned else f"V{word}")
        self._words = memory[: memory.size // word * word].view(self._dtype)
        self._index = index

    def packing(self, out: Bytes) -> Call:
        """Return the call that packs into a buffer."""
        target, kept = out.view(self._dtype), self._index.kept()
        # Indices are in range by construction; "clip" spares NumPy a checked copy.
        if kept is not None:
            return partial(self._words.take, kept, None, target, "clip")
        return partial(self._pack_parts, target)

    def unpacking(self, packed: Bytes) -> Call:
        """Return the call that unpacks a buffer."""
        source, kept = packed.view(self._dtype), self._index.kept()
        if kept is not None:
            return partial(setitem, self._words, kept, source)
        return partial(self._unpack_parts, source)

    def _pack_parts(self, target: Array) -> None:
        for part, index in self._index.parts():
            self._words.take(index, None, target[part], "clip")

    def _unpack_parts(self, source: Array) -> None:
        for part, index in self._index.parts():
            self._words[index] = source[part]


class Index:
    """Places of a block list's elements, in order, in units of ``step`` bytes."""

    def __init__(self, blocks: BlockList, itemsize: int, step: int) -> None:
        self._stops = np.cumsum(blocks.lengths // itemsize)
        self._begins = self._stops - blocks.lengths // itemsize
        self._starts = blocks.offsets // step
        self._stride = itemsize // step
        self._total = int(self._stops[-1]) if self._stops.size else 0
        self._kept: Int64Array | None = None

    def kept(self) -> Int64Array | None:
        """All places at once, made at the first use; None if they are too many to keep."""
        if self._kept is None and self._total <= _KEPT_INDEX:
            self._kept = self._between(0, self._total)
        return self._kept

    def parts(self) -> Iterator[tuple[slice, Int64Array]]:
        """Slices of the packed elements, each with the places of its elements."""
        kept, total = self.kept(), self._total
        if kept is not None:
            yield slice(0, total), kept
            return
        for begin in range(0, total, _KEPT_INDEX):
            stop = min(begin + _KEPT_INDEX, total)
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
