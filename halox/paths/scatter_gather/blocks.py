"""The block list of a message, which both ends of a message without packing swap when a plan is made."""

from __future__ import annotations

import numpy as np

from halox.packing.common_blocks import BlockColumns
from halox.paths.messages import Message


def blocks_of(message: Message) -> BlockColumns:
    """List the blocks of a message in packed order, adjacent ones merged; arrays by their numbers in the plan."""
    lists = [part.datatype.blocks(part.count) for part in message.parts]
    arrays = np.repeat(
        np.array([part.array for part in message.parts], np.int64),
        [blocks.n_blocks for blocks in lists],
    )
    offsets = np.concatenate([blocks.offsets for blocks in lists])
    lengths = np.concatenate([blocks.lengths for blocks in lists])
    apart = (offsets[1:] != offsets[:-1] + lengths[:-1]) | (arrays[1:] != arrays[:-1])
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return BlockColumns(offsets[first], np.add.reduceat(lengths, first), arrays[first])
