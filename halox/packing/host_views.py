"""Regular blocks as strided views of host memory, with which NumPy copies or adds all blocks in one call."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from halox.datatypes import StridedBlocks
from halox.packing.refine import Copy, Side, single_piece
from halox.runtime.arrays import Array, DType

# With one NumPy element per block there is no inner loop. The view often has a single axis, and NumPy then does not
# search for overlaps.
_LARGEST_ELEMENT = 1 << 16
# NumPy copies 16 bytes from one strided view to another three times as fast as bytes ("S") than as "V" or as complex.
_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)} | {16: np.dtype("S16")}


class View(NamedTuple):
    """Arguments of `numpy.ndarray` for a strided view; the offset is relative to an array's first element."""

    shape: tuple[int, ...]
    dtype: DType
    offset: int
    strides: tuple[int, ...]

    def of(self, memory: npt.NDArray[np.uint8]) -> Array:
        """View some memory that begins at the array's first element."""
        return np.ndarray(self.shape, self.dtype, memory.data, self.offset, self.strides)


def block_view(blocks: StridedBlocks) -> View:
    """View regular blocks with one element per block; long blocks are viewed as words.

    If the blocks of two rows interleave, NumPy copies a view with several axes through a buffer. It copies a view with
    one axis directly.
    """
    block = blocks.block_bytes
    if block in _WORDS:
        word = _WORDS[block]
    elif 0 < block <= _LARGEST_ELEMENT:
        word = np.dtype(f"V{block}")
    else:
        word = _WORDS[gcd(block, 8)]
    view = element_view(blocks, word)
    if blocks.counts and word.itemsize == block:
        return View(view.shape[:-1], word, view.offset, view.strides[:-1])
    return view


def element_view(blocks: StridedBlocks, dtype: DType) -> View:
    """View regular blocks as elements of a dtype; the dtype's size must divide the block size."""
    size = dtype.itemsize
    shape, strides = (*blocks.counts, blocks.block_bytes // size), (*blocks.strides, size)
    return View(shape, dtype, blocks.offset, strides)


def common_views(target: StridedBlocks, source: StridedBlocks) -> tuple[View, View] | None:
    """View regular blocks of two layouts with the same shape and dtype.

    None if there are no such views with all bytes in order: the block lengths do not match, the layouts have no bytes,
    or one layout has more bytes.
    """
    if target.nbytes != source.nbytes:
        return None
    piece = single_piece(Copy(Side(0, source), Side(0, target)))
    if piece is None:
        return None
    *levels, run = piece.levels
    counts, from_strides, to_strides = zip(*levels, strict=True) if levels else ((), (), ())
    return (
        block_view(StridedBlocks(piece.target, counts, to_strides, run.steps)),
        block_view(StridedBlocks(piece.source, counts, from_strides, run.steps)),
    )
