"""Regular blocks as strided views of host memory."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import numpy as np

from halox.datatypes import StridedBlocks
from halox.packing.refine import Copy, Side, single_piece
from halox.runtime.arrays import DType

# One NumPy element a block: no inner loop, and often one axis in all, along which NumPy does not look for overlaps.
_LARGEST_ELEMENT = 1 << 16
_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class View(NamedTuple):
    """A strided view of memory, as `numpy.ndarray` makes it: relative to an array's first element."""

    shape: tuple[int, ...]
    dtype: DType
    offset: int
    strides: tuple[int, ...]


def block_view(blocks: StridedBlocks) -> View:
    """View regular blocks: one element a block, or long blocks as words.

    Where blocks in two rows interleave, NumPy copies views of several axes by way of a buffer, those of one axis not.
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
    """View regular blocks as elements of a dtype whose size divides theirs."""
    size = dtype.itemsize
    shape, strides = (*blocks.counts, blocks.block_bytes // size), (*blocks.strides, size)
    return View(shape, dtype, blocks.offset, strides)


def common_views(target: StridedBlocks, source: StridedBlocks) -> tuple[View, View] | None:
    """View regular blocks of two layouts so that both views have one shape and dtype.

    None if no such views hold all bytes in their order: blocks of different lengths meet, there are no bytes, or
    more in one layout.
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
