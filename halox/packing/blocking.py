"""Permuting copies in host memory, tile by tile: `blocked` replaces such copies by copies of tiles.

NumPy copies along the axis that is contiguous in the target. If the source is contiguous along another axis,
consecutive elements are in different cache lines of the source. A cache line is then evicted before its other elements
are copied, and each of these elements fetches the line again::

    target, along a row:     a0 b0 c0 d0 ...            source, line by line:  [a0 a1 a2 a3] ... [b0 b1 b2 b3] ...

A tile has long runs in the source and in the target, and fits the second-level cache. Each tile is copied twice: first
its runs to a buffer, then, permuted, from the buffer to the target. Source rows that are a power of two bytes apart map
to few sets of the cache. The rows of the buffer map to different sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import gcd, prod

import numpy as np

from halox.runtime.arrays import Array

Move = tuple[Array, Array]
"""Target and source of a copy: two views of one shape."""

SMALL_BYTES = 1 << 16
"""Smaller copies are not tiled, because both sides fit the second-level cache."""

_LARGE_BYTES = 20 << 20  # larger copies read from memory, which is fastest in long runs
# Approximate size of a tile: the larger of the two numbers. A tile may be up to twice as large.
_TILE_BYTES, _TILE_ELEMENTS = 1 << 17, 1 << 15
_PADDED_BYTES = 1 << 8
_LARGEST_ELEMENT = 16  # larger elements use most of a cache line at once
_LINE_BYTES = 64
# Lines and sets of a first-level cache of 32 KiB, with 8 lines per set.
_FIRST_LINES, _FIRST_SETS = 512, 64
# Lines that stay in a second-level cache of 512 KiB, and in the TLB if each line is in another page.
_MOST_LINES = 2048


def copy_all(moves: Sequence[Move]) -> None:
    """Perform copies, one after another."""
    for target, source in moves:
        target[...] = source  # `np.copyto` takes 0.15 us longer to start


@lru_cache(maxsize=1024)
def tile_of(
    shape: tuple[int, ...],
    itemsize: int,
    target_strides: tuple[int, ...],
    source_strides: tuple[int, ...],
) -> tuple[int, ...] | None:
    """Choose the shape of the tiles for a copy between two views of one shape.

    The last tile along an axis may be smaller. None if one plain copy is as fast: if both views have the smallest
    stride along the same axis, the copy is small, the elements are large, or the source's cache lines stay in the cache
    until all their elements are copied. The target must not overlap itself. The limits were measured on common x86
    cores (docs/performance/log.md).

    Examples
    --------
    >>> tile_of((4096, 4096), 8, (32768, 8), (8, 32768))
    (256, 256)
    >>> tile_of((4096, 4096), 8, (32768, 8), (32768, 8)) is None
    True
    """
    axes = [axis for axis, n in enumerate(shape) if n > 1]
    size = itemsize * prod(shape)
    if len(axes) < 2 or size < SMALL_BYTES or itemsize > _LARGEST_ELEMENT:
        return None
    along_target, along_source = (
        sorted(axes, key=lambda axis: abs(strides[axis]))
        for strides in (target_strides, source_strides)
    )
    first = along_source[0]
    if first == along_target[0] or abs(source_strides[first]) >= _LINE_BYTES:
        return None
    before = along_target[: along_target.index(first)]
    if size < _LARGE_BYTES and _stays_cached(shape, itemsize, source_strides, before):
        return None
    tile = [1] * len(shape)
    tile_bytes = max(_TILE_BYTES, _TILE_ELEMENTS * itemsize)
    run_bytes = 1 << (tile_bytes * itemsize).bit_length() // 2  # for a square tile
    for order in (along_source, along_target):
        run = itemsize
        for axis in order:
            if run < run_bytes:
                tile[axis] = max(tile[axis], min(shape[axis], -(-run_bytes // run)))
                run *= tile[axis]
    for axis in along_target:
        spare = tile_bytes // (itemsize * prod(tile))
        tile[axis] = min(shape[axis], tile[axis] * max(spare, 1))
    # Divide each axis evenly: tiles have equal extents, except the last tile, and exceed the limit by at most half.
    return tuple([-(-n // max(round(n / most), 1)) for n, most in zip(shape, tile, strict=True)])


def _stays_cached(
    shape: tuple[int, ...], itemsize: int, strides: tuple[int, ...], axes: list[int]
) -> bool:
    """Return whether the cache lines of a walk along some axes of the source stay in the cache until the next walk.

    The lines stay in the first-level cache if its sets have room for them. They stay in the second-level cache if the
    rows map to different sets. Elements of 8 bytes and more are read from there as fast as they are stored.
    """
    lines = prod(
        -(-shape[axis] * min(abs(strides[axis]), _LINE_BYTES) // _LINE_BYTES) for axis in axes
    )
    step = gcd(*(strides[axis] for axis in axes))
    apart = max((step & -step) // _LINE_BYTES, 1)
    if lines <= _FIRST_LINES // min(apart, _FIRST_SETS):
        return True
    return itemsize >= 8 and apart == 1 and lines <= _MOST_LINES


def in_tiles(target: Array, source: Array, tile: tuple[int, ...]) -> Iterator[Move]:
    """Yield the copies that together copy one view to another, tile by tile.

    The copies share a buffer, so they must be performed in order.
    """
    shape, itemsize = target.shape, target.itemsize
    by_target = sorted(range(target.ndim), key=lambda axis: -abs(target.strides[axis]))
    buffer_strides, nbytes = [0] * target.ndim, itemsize
    for axis in sorted(by_target, key=lambda axis: abs(source.strides[axis])):
        buffer_strides[axis] = nbytes
        nbytes *= tile[axis]
        if nbytes >= _PADDED_BYTES:  # an odd number of lines, so that rows map to different sets
            nbytes = (-(-nbytes // _LINE_BYTES) | 1) * _LINE_BYTES
    buffer = np.empty(nbytes, np.uint8).data
    for starts in product(*(range(0, shape[axis], tile[axis]) for axis in by_target)):
        place = [slice(None)] * target.ndim
        for axis, start in zip(by_target, starts, strict=True):
            place[axis] = slice(start, start + tile[axis])
        part = target[tuple(place)]
        permuted = np.ndarray(part.shape, part.dtype, buffer, 0, buffer_strides)
        yield permuted, source[tuple(place)]
        yield part, permuted


def blocked(moves: Sequence[Move]) -> list[Move]:
    """Replace each permuting copy with the copies of its tiles, to be performed in order.

    A copy is not replaced if its views may share memory, because NumPy handles the overlap.
    """
    copies: list[Move] = []
    for target, source in moves:
        tile = tile_of(target.shape, target.itemsize, target.strides, source.strides)
        if tile is None or np.may_share_memory(target, source):
            copies.append((target, source))
        else:
            copies += in_tiles(target, source, tile)
    return copies
