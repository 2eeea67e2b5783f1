"""Number of 32-byte sectors of memory that a layout touches: a lower bound of a GPU's traffic."""

from __future__ import annotations

from math import prod

import numpy as np

from halox.datatypes import BlockList, Datatype, StridedBlocks

SECTOR = 32


def sectors(datatype: Datatype, count: int = 1, origin: int = 0) -> int:
    """Count the distinct sectors that items of a datatype touch.

    Parameters
    ----------
    count : int
        Items, one extent apart.
    origin : int
        Address of displacement 0; matters modulo 32.

    Notes
    -----
    Outer levels with steps that share no sector are multiplied, not listed.

    Examples
    --------
    >>> from halox.datatypes import vector
    >>> sectors(vector(100, 1, 4, "f8")), sectors(vector(100, 1, 2, "f8"))
    (100, 50)
    """
    strided = datatype.items(count).strided
    if strided is not None:
        return _of_strided(strided.shifted(origin % SECTOR))
    item = datatype.blocks().shifted(origin % SECTOR)
    if count > 1 and item.n_blocks and datatype.extent % SECTOR == 0:
        first = int(item.offsets.min()) // SECTOR
        last = (int((item.offsets + item.lengths).max()) - 1) // SECTOR
        if (last - first + 1) * SECTOR <= abs(datatype.extent):
            return count * _of_blocks(item)
    return _of_blocks(datatype.blocks(count).shifted(origin % SECTOR))


def _of_strided(blocks: StridedBlocks) -> int:
    """Remove outer levels with steps that share no sector."""
    counts, strides = list(blocks.counts), list(blocks.strides)
    times = 1
    while counts:
        reach = [(n - 1) * s for n, s in zip(counts[1:], strides[1:], strict=True)]
        low = blocks.offset + sum(r for r in reach if r < 0)
        high = blocks.offset + sum(r for r in reach if r > 0) + blocks.block_bytes
        span = (-(-high // SECTOR) - low // SECTOR) * SECTOR
        if strides[0] % SECTOR or span > abs(strides[0]):
            break
        times *= counts.pop(0)
        strides.pop(0)
    rest = StridedBlocks(blocks.offset, tuple(counts), tuple(strides), blocks.block_bytes)
    if len(counts) == 1 and not _fits(rest) and strides[0] > 0:
        return times * _periodic(rest)
    return times * _of_blocks(rest.block_list())


def _fits(blocks: StridedBlocks) -> bool:
    return prod(blocks.counts) <= 1 << 16


def _periodic(blocks: StridedBlocks) -> int:
    """Count along one level: the pattern repeats after 32 steps at the latest."""
    (count,), (stride,) = blocks.counts, blocks.strides
    whole = count // SECTOR

    def listed(n: int) -> int:
        part = StridedBlocks(blocks.offset, (n,), (stride,), blocks.block_bytes)
        return _of_blocks(part.block_list())

    base = count - (whole - 2) * SECTOR
    return listed(base) + (whole - 2) * (listed(base + SECTOR) - listed(base))


def _of_blocks(blocks: BlockList) -> int:
    if not blocks.n_blocks:
        return 0
    first = blocks.offsets // SECTOR
    last = (blocks.offsets + blocks.lengths - 1) // SECTOR
    if (np.diff(first) < 0).any():
        order = np.argsort(first, kind="stable")
        first, last = first[order], last[order]
    reached = np.maximum.accumulate(last)
    new_from = first.copy()
    np.maximum(first[1:], reached[:-1] + 1, out=new_from[1:])
    return int(np.maximum(last - new_from + 1, 0).sum())
