"""Copies between host memory and packed bytes, with NumPy: a `Copier` for each form of a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def gathered(
    index: Callable[[], Int64Array],
    itemsize: int,
    step: int,
    memory: Bytes,
    packed: Bytes,
    unpack: bool,
) -> Call:
    """Return a call that copies short blocks at any displacements, as words or equal blocks, through an index.

    ``index`` returns each element's place in memory, in units of ``step`` bytes; elements have ``itemsize`` bytes.
    """
    places = index()
    if itemsize > step:  # a block may begin at any word: view overlapping elements, one word apart
        count = (memory.size - itemsize) // step + 1
        words = np.ndarray((count,), f"V{itemsize}", memory.data, strides=(step,))
    else:
        whole = memory[: memory.size // step * step]
        words = whole.view(f"u{step}")
        if not words.flags.aligned:
            # NumPy would first copy all of an unaligned array. Words of a void dtype need no alignment.
            words = whole.view(f"V{step}")
    buffer = packed.view(words.dtype)
    if unpack:
        return partial(setitem, words, places, buffer)
    if itemsize > step:
        return partial(_pack_blocks, words, places, buffer)
    # Indices are in range by construction; "clip" avoids NumPy's buffered copy for checks.
    return partial(words.take, places, None, buffer, "clip")


def _pack_blocks(blocks: Array, places: Int64Array, target: Array) -> None:
    target[...] = blocks[places]  # `take` would first copy all of an array with overlaps
