"""Windows over the block list of a message: cut at the same bytes on both ends, however their blocks differ.

A message is a row of bytes in packed order. A window is ``chunk_bytes`` consecutive ones, and at each end the blocks,
or pieces of blocks, that hold them: it does not span the gaps between blocks. Window k of the sender and window k of
the receiver hold the same bytes, so that one engine can gather what the other one scatters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from halox.paths.messages import Message

if TYPE_CHECKING:
    from halox.paths.scatter_gather.engine import Limits, Region

Int64Array = npt.NDArray[np.int64]

MOST_WINDOWS = 1 << 16
"""Most windows of a message: half of the bits of an immediate count them."""

_FINER = 4


@dataclass(frozen=True, eq=False)
class MessageBlocks:
    """Blocks of a message in packed order, merged, relative to its arrays."""

    arrays: tuple[int, ...]  # numbers of the message's arrays, in the order of their first part
    array_of: Int64Array  # for each block the index in ``arrays``,
    offsets: Int64Array  # its displacement from that array's first element,
    lengths: Int64Array  # and its bytes

    @classmethod
    def of(cls, message: Message) -> MessageBlocks:
        """List the blocks of a message."""
        arrays = tuple(dict.fromkeys(part.array for part in message.parts))
        lists = [part.datatype.blocks(part.count) for part in message.parts]
        array_of = np.repeat(
            np.array([arrays.index(part.array) for part in message.parts], np.int64),
            [blocks.n_blocks for blocks in lists],
        )
        offsets = np.concatenate([blocks.offsets for blocks in lists])
        lengths = np.concatenate([blocks.lengths for blocks in lists])
        apart = (offsets[1:] != offsets[:-1] + lengths[:-1]) | (array_of[1:] != array_of[:-1])
        first = np.concatenate(([0], np.flatnonzero(apart) + 1))
        return cls(
            arrays,
            array_of[first],
            offsets[first],
            np.add.reduceat(lengths, first),
        )

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return int(self.lengths.size)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return int(self.lengths.sum())

    @cached_property
    def starts(self) -> Int64Array:
        """First byte of each block in the message."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def identity(self) -> bytes:
        """Digest that is equal for equal block lists, of this process and others."""
        digest = blake2b(digest_size=16)
        for column in (self.array_of, self.offsets, self.lengths):
            digest.update(column.tobytes())
        return digest.digest()

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of each block; 1 for a single block, which can be cut anywhere, and 0 where they differ."""
        if self.n_blocks == 1:
            return 1
        return int(self.lengths[0]) if (self.lengths == self.lengths[0]).all() else 0

    @cached_property
    def is_regular(self) -> bool:
        """Whether all blocks are of one length, and one distance apart."""
        steps = np.diff(self.offsets)
        return bool(self.block_bytes and len(self.arrays) == 1 and (steps == steps[:1]).all())

    def is_repeated(self, limits: Limits) -> bool:
        """Whether an entry of an engine's key can describe several of the blocks."""
        if limits.repeats == 1 or self.n_blocks == 1 or not self.is_regular:
            return False
        step = int(self.offsets[1] - self.offsets[0])
        return self.block_bytes <= step <= limits.stride_bytes

    def most_touched(self, chunk_bytes: int) -> int:
        """Return the most blocks that any window of a size touches."""
        cuts = np.arange(0, self.nbytes, chunk_bytes)
        first = np.searchsorted(self.starts, cuts, "right")
        behind = np.searchsorted(self.starts, cuts + chunk_bytes, "left")
        return int((behind - first).max()) + 1

    def windows(
        self, chunk_bytes: int, regions: Sequence[Region], bases: Sequence[int]
    ) -> list[Window]:
        """Cut the message, its arrays at some addresses and in some regions, into windows."""
        cuts = np.arange(0, self.nbytes, chunk_bytes)
        starts = np.union1d(self.starts, cuts)
        block = np.searchsorted(self.starts, starts, "right") - 1
        array_of = self.array_of[block]
        addresses = np.asarray(bases, np.int64)[array_of] + self.offsets[block]
        addresses += starts - self.starts[block]
        lengths = np.diff(starts, append=self.nbytes)
        at = np.append(np.searchsorted(starts, cuts), starts.size)
        lkeys = np.array([region.lkey for region in regions], np.int64)[array_of]
        return [
            Window(addresses[low:high], lengths[low:high], lkeys[low:high], array_of[low:high])
            for low, high in zip(at[:-1].tolist(), at[1:].tolist(), strict=True)
        ]


class Window(NamedTuple):
    """Blocks that hold consecutive bytes of a message at one end."""

    addresses: Int64Array  # of each block, as the others
    lengths: Int64Array
    lkeys: Int64Array  # of the region in which it is
    array_of: Int64Array  # number of its array among the message's

    @property
    def nbytes(self) -> int:
        """Bytes of the window."""
        return int(self.lengths.sum())

    @property
    def repeated(self) -> tuple[int, int, int, int] | None:
        """Address, length, distance and number of blocks that one entry could describe; None if they are not alike."""
        n = int(self.lengths.size)
        if n == 1:
            return int(self.addresses[0]), int(self.lengths[0]), int(self.lengths[0]), 1
        steps = np.diff(self.addresses)
        is_alike = (steps == steps[0]).all() and (self.lengths == self.lengths[0]).all()
        if not is_alike or (self.lkeys != self.lkeys[0]).any():
            return None
        return int(self.addresses[0]), int(self.lengths[0]), int(steps[0]), n


class Proposal(NamedTuple):
    """One end's choice of a chunk size, from which both ends derive the same one by `agreed_chunk`."""

    block_bytes: int  # where all blocks are alike; see `MessageBlocks.block_bytes`
    by_blocks: int  # most bytes of a window that holds whole blocks only; 0 where blocks differ
    # Largest power of two at which windows may cut blocks; 0 if there would be too many.
    by_bytes: int


def propose(blocks: MessageBlocks, limits: Limits) -> Proposal:
    """Choose for one end of a message the largest windows that an engine's keys can hold; local."""
    nbytes = blocks.nbytes

    def largest(windows: int) -> int:
        return min(limits.key_bytes, max(nbytes // windows, limits.window_bytes))

    most = largest(limits.windows)
    block_bytes = blocks.block_bytes
    by_blocks = 0
    if block_bytes == 1 == blocks.n_blocks:
        by_blocks = most
    elif block_bytes:
        repeats = limits.repeats if blocks.is_repeated(limits) else 1
        by_blocks = min(most // block_bytes, limits.entries * repeats) * block_bytes
    # Powers of two make the last window a short one: of many windows it matters little.
    finer = largest(_FINER * limits.windows) if limits.windows > 1 else most
    by_bytes = 1 << (finer.bit_length() - 1)
    while nbytes <= by_bytes * MOST_WINDOWS and blocks.most_touched(by_bytes) > limits.entries:
        by_bytes >>= 1
    return Proposal(block_bytes, by_blocks, by_bytes if nbytes <= by_bytes * MOST_WINDOWS else 0)


def agreed_chunk(sender: Proposal, receiver: Proposal, nbytes: int) -> int | None:
    """Return the chunk size of a message: the sender's choice, as far as it suits the receiver; None if none does.

    Both ends call this with the same arguments. Windows of whole blocks at both ends are taken if there are any:
    multiples of both block lengths. Powers of two divide one another, so that the smaller of two is cut where the
    larger one is, and its windows touch no more blocks.

    Examples
    --------
    >>> agreed_chunk(Proposal(768, 3072, 2048), Proposal(512, 4096, 2048), 1 << 20)
    3072
    >>> agreed_chunk(Proposal(768, 3072, 2048), Proposal(0, 0, 1024), 1 << 20)
    1024
    """
    most = min(sender.by_blocks, receiver.by_blocks)
    unit = lcm(sender.block_bytes, receiver.block_bytes)
    chunk = most // unit * unit if unit else 0
    chunk = chunk or min(sender.by_bytes, receiver.by_bytes)
    return chunk if chunk and nbytes <= chunk * MOST_WINDOWS else None
