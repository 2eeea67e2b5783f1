"""Windows over the block list of a message, cut at the same bytes at both ends, even if the blocks of the ends differ.

A message is a sequence of bytes in packed order. A window is ``chunk_bytes`` consecutive bytes of the message. At each
end it consists of the blocks, or pieces of blocks, that hold these bytes, without the gaps between blocks. Window k of
the sender and window k of the receiver hold the same bytes, so that an engine can gather from the first and scatter to
the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from halox.packing.common_blocks import Int64Array
from halox.paths.messages import Message
from halox.paths.scatter_gather.blocks import blocks_of
from halox.runtime.mlx5 import INLINE_BYTES

ENTRIES = INLINE_BYTES // 16
"""Entries of a list, 16 bytes each, that fit into the work request that maps a key."""

MOST_STRIDE = (1 << 16) - 1
"""Largest distance from block to block of a strided pattern, in bytes."""

MOST_WINDOWS = 256
"""Largest number of windows of a message, each of which needs a key, so that other messages find keys, too."""


class Registration:
    """Registered memory of this rank, which may be given up while keys refer to it.

    ``origin`` is the address from which requests count: 0 on the host, the start of the dmabuf on a GPU. ``n_keys`` is
    the number of keys that are mapped to the memory.
    """

    def __init__(self, mr: Any, origin: int) -> None:
        self.mr, self.lkey, self.origin = mr, int(mr.lkey), origin
        self.n_keys, self.has_ended = 0, False

    def close_if_unused(self) -> None:
        if self.has_ended and not self.n_keys and self.mr is not None:
            self.mr.close()
            self.mr = None


@dataclass(frozen=True)
class Limits:
    """Limits of an adapter's keys; each is a maximum."""

    entries: int = ENTRIES  # of a key; blocks of a list
    repeats: int = 1 << 20  # blocks of a strided pattern, which is a single entry
    stride_bytes: int = MOST_STRIDE
    key_bytes: int = 1 << 30  # bytes of a window
    keys: int = 1 << 14  # at a time
    pool: int = 64  # keys made at a time, in advance


@dataclass(frozen=True, eq=False)
class MessageBlocks:
    """Blocks of a message in packed order, merged, relative to its arrays."""

    arrays: tuple[int, ...]  # numbers of the message's arrays in the plan
    array_of: Int64Array  # for each block its array, as an index into ``arrays``
    offsets: Int64Array  # for each block its offset from that array's first element, in bytes
    lengths: Int64Array  # for each block its bytes

    @classmethod
    def of(cls, message: Message) -> MessageBlocks:
        blocks = blocks_of(message)
        arrays, array_of = np.unique(blocks.arrays, return_inverse=True)
        return cls(tuple(arrays.tolist()), array_of, blocks.offsets, blocks.lengths)

    @property
    def n_blocks(self) -> int:
        return int(self.lengths.size)

    @cached_property
    def nbytes(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def starts(self) -> Int64Array:
        """First byte of each block in the message."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def identity(self) -> bytes:
        """Digest that is equal for equal block lists, in all processes."""
        digest = blake2b(digest_size=16)
        for column in (self.array_of, self.offsets, self.lengths):
            digest.update(column.tobytes())
        return digest.digest()

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of each block; 1 for a single block, which can be cut anywhere, and 0 if lengths differ."""
        if self.n_blocks == 1:
            return 1
        return int(self.lengths[0]) if (self.lengths == self.lengths[0]).all() else 0

    def is_repeated(self, limits: Limits) -> bool:
        """Whether one entry of a key can describe several of the blocks: all of one length and one distance apart."""
        steps = np.diff(self.offsets)
        if limits.repeats == 1 or not steps.size or len(self.arrays) > 1 or not self.block_bytes:
            return False
        return bool(
            (steps == steps[0]).all() and self.block_bytes <= steps[0] <= limits.stride_bytes
        )

    def most_window_blocks(self, chunk_bytes: int) -> int:
        """Return the largest number of blocks in a window of ``chunk_bytes`` bytes."""
        cuts = np.arange(0, self.nbytes, chunk_bytes)
        first = np.searchsorted(self.starts, cuts, "right")
        behind = np.searchsorted(self.starts, cuts + chunk_bytes, "left")
        return int((behind - first).max()) + 1

    def windows(
        self, chunk_bytes: int, bases: Sequence[int], registrations: Sequence[Registration]
    ) -> list[Window]:
        """Cut the message into windows, with the first elements of its arrays at ``bases`` in registered memory."""
        cuts = np.arange(0, self.nbytes, chunk_bytes)
        starts = np.union1d(self.starts, cuts)
        block = np.searchsorted(self.starts, starts, "right") - 1
        array_of = self.array_of[block]
        origins = [base - one.origin for base, one in zip(bases, registrations, strict=True)]
        addresses = np.asarray(origins, np.int64)[array_of] + self.offsets[block]
        addresses += starts - self.starts[block]
        lengths = np.diff(starts, append=self.nbytes)
        at = np.append(np.searchsorted(starts, cuts), starts.size)
        lkeys = np.array([one.lkey for one in registrations], np.int64)[array_of]
        memory = tuple(registrations)
        return [
            Window(addresses[low:high], lengths[low:high], lkeys[low:high], memory)
            for low, high in zip(at[:-1].tolist(), at[1:].tolist(), strict=True)
        ]


class Window(NamedTuple):
    """Blocks that hold consecutive bytes of a message at one end."""

    addresses: Int64Array  # one entry per block in all three columns; as the adapter counts them
    lengths: Int64Array
    lkeys: Int64Array  # lkey of the block's registration
    registrations: tuple[Registration, ...]  # of the message's arrays

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())

    @property
    def repeated(self) -> tuple[int, int, int, int] | None:
        """Address, length, distance and number of the blocks if one entry describes them all; otherwise None."""
        steps = np.diff(self.addresses)
        columns = steps, self.lengths, self.lkeys
        if not steps.size or any((column != column[0]).any() for column in columns):
            return None
        address, length, step = (int(column[0]) for column in (self.addresses, self.lengths, steps))
        return (address, length, step, steps.size + 1) if length <= step <= MOST_STRIDE else None


class Proposal(NamedTuple):
    """One end's limits on the chunk size; from both proposals `agreed_chunk` derives the common size."""

    block_bytes: int  # if all blocks have one length; see `MessageBlocks.block_bytes`
    by_blocks: int  # largest window of whole blocks, in bytes; 0 if lengths differ
    # Largest power of two for windows that may cut blocks; 0 if there would be too many windows.
    by_bytes: int


def propose(blocks: MessageBlocks, limits: Limits) -> Proposal:
    """Choose for one end of a message the largest windows that keys can hold; local."""
    nbytes, block_bytes = blocks.nbytes, blocks.block_bytes
    most = min(limits.key_bytes, nbytes)
    by_blocks = 0
    if blocks.n_blocks == 1:
        by_blocks = most
    elif block_bytes:
        repeats = limits.repeats if blocks.is_repeated(limits) else 1
        by_blocks = min(most // block_bytes, limits.entries * repeats) * block_bytes
    # With a power of two the last window may be short; among many windows that matters little.
    by_bytes = 1 << (most.bit_length() - 1)
    while (
        nbytes <= by_bytes * MOST_WINDOWS and blocks.most_window_blocks(by_bytes) > limits.entries
    ):
        by_bytes >>= 1
    return Proposal(block_bytes, by_blocks, by_bytes if nbytes <= by_bytes * MOST_WINDOWS else 0)


def agreed_chunk(sender: Proposal, receiver: Proposal, nbytes: int) -> int | None:
    """Return the chunk size of a message: the sender's choice, reduced for the receiver; None if no size suits both.

    Both ends call this with the same arguments. If possible, windows consist of whole blocks at both ends: their size
    is a common multiple of both block lengths. Otherwise the size is a power of two. Of two powers of two, the smaller
    cuts the message also wherever the larger does, so that its windows touch no more blocks.

    Examples
    --------
    >>> agreed_chunk(Proposal(768, 3072, 2048), Proposal(512, 4096, 2048), 1 << 18)
    3072
    >>> agreed_chunk(Proposal(768, 3072, 2048), Proposal(0, 0, 1024), 1 << 18)
    1024
    """
    most = min(sender.by_blocks, receiver.by_blocks)
    unit = lcm(sender.block_bytes, receiver.block_bytes)
    chunk = most // unit * unit if unit else 0
    chunk = chunk or min(sender.by_bytes, receiver.by_bytes)
    return chunk if chunk and nbytes <= chunk * MOST_WINDOWS else None
