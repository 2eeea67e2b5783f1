"""Two lists of blocks with equally many bytes, cut so that block k of one is as long as block k of the other.

Whoever copies bytes from one layout straight to another needs the blocks in this form: the ``scatter_gather`` path
between ranks, and the copy-engine packer, whose target is a single block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class BlockColumns(NamedTuple):
    """Blocks of one side in packed order; three columns of shape (n,)."""

    offsets: Int64Array  # from the start of the block's array, in bytes
    lengths: Int64Array  # in bytes
    arrays: Int64Array  # number of the block's array


class CommonBlocks(NamedTuple):
    """Copies of contiguous bytes: offsets and arrays on both sides; five columns of shape (n,)."""

    source: Int64Array
    target: Int64Array
    lengths: Int64Array
    source_arrays: Int64Array
    target_arrays: Int64Array

    def at(self, sources: npt.ArrayLike, targets: npt.ArrayLike) -> CommonBlocks:
        """Return the blocks with addresses for offsets, given the address of each array on both sides."""
        return self._replace(
            source=self.source + np.asarray(sources, np.int64)[self.source_arrays],
            target=self.target + np.asarray(targets, np.int64)[self.target_arrays],
        )

    def some(self, which: slice) -> CommonBlocks:
        return CommonBlocks(*(column[which] for column in self))


def common_blocks(source: BlockColumns, target: BlockColumns, cut: int = 0) -> CommonBlocks:
    """Cut two lists of blocks with equally many bytes so that their blocks match.

    Consecutive blocks are merged if they are adjacent in the same arrays on both sides. No block reaches across byte
    number ``cut``.

    Examples
    --------
    >>> list = np.array
    >>> source = BlockColumns(list([0, 10]), list([4, 4]), list([0, 0]))
    >>> target = BlockColumns(list([100, 0]), list([2, 6]), list([0, 1]))
    >>> [column.tolist() for column in common_blocks(source, target)]
    [[0, 2, 10], [100, 0, 2], [2, 2, 4], [0, 0, 0], [0, 1, 1]]
    """
    sides = source, target
    starts = [np.cumsum(side.lengths) - side.lengths for side in sides]
    cuts = np.union1d(*starts)
    if cut:
        cuts = np.union1d(cuts, [cut])
    lengths = np.diff(cuts, append=int(source.lengths.sum()))
    offsets, arrays = [], []
    is_next = cuts[1:] != cut
    for side, first in zip(sides, starts, strict=True):
        block = np.searchsorted(first, cuts, "right") - 1
        at, array = side.offsets[block] + (cuts - first[block]), side.arrays[block]
        is_next &= (at[1:] == at[:-1] + lengths[:-1]) & (array[1:] == array[:-1])
        offsets.append(at)
        arrays.append(array)
    kept = np.append(0, np.flatnonzero(~is_next) + 1)
    columns = *offsets, *arrays
    source_offsets, target_offsets, *numbers = (column[kept] for column in columns)
    return CommonBlocks(source_offsets, target_offsets, np.add.reduceat(lengths, kept), *numbers)
