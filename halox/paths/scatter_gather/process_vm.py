"""The protocol ``process_vm``: Linux copies between NumPy arrays of two ranks of a node, block list to block list.

The ranks swap their block lists when a plan is made, and both cut them alike (`halox.packing.common_blocks`). Between
ranks that send in both directions each rank reads the messages that it receives. If a message has no counterpart in the
opposite direction, each end moves half of it, so that neither end waits while its peer works::

    A: cells final | ready=e | wait for B's ready=e | write the first half | read=e | wait for B's read=e | return
    B: halo free   | ready=e | wait for A's ready=e | read the second half | read=e | wait for A's read=e | return

A rank writes the addresses of its arrays beside its flags before it signals "ready", so that a plan can move to other
arrays of the same layouts.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from halox.errors import ExchangeTimeoutError, HaloxError, PathError
from halox.packing.common_blocks import BlockColumns, CommonBlocks, Int64Array, common_blocks
from halox.paths.base import Job
from halox.paths.in_place import InPlaceChannel
from halox.paths.node import NodeLink
from halox.paths.scatter_gather.blocks import blocks_of
from halox.runtime.arrays import address_of
from halox.runtime.cross_memory import MOST_BLOCKS, Iovec, MemoryCopy
from halox.runtime.handshake import connect
from halox.runtime.world import World

LEAST_SHARED_BYTES = 16 << 10
"""Smallest message, in bytes, that both ends share: a call takes about 1 us, as copying 8 KiB does."""

_MOST_CACHED = 64
_LINE_BYTES = 64

Bases = tuple[int, ...]
"""Addresses of the first elements of a rank's arrays."""

Lists = Mapping[tuple[str, int], BlockColumns]
"""Block lists of a rank's ends of messages, by direction and tag."""


class _Share(NamedTuple):
    """Blocks of a message that this rank copies; its own blocks are the source if it writes, else the target."""

    kind: Literal["read", "write"]
    peer: int
    blocks: CommonBlocks


class ProcessVmChannel(InPlaceChannel):
    """Moves arrays directly between processes; see the module. ``pids`` has the process IDs of the node's ranks."""

    is_movable = True

    def __init__(self, job: Job, pids: Mapping[int, int], link: NodeLink) -> None:
        super().__init__(link, job.peers, job.peers)
        self._job, self._pids, self.messages = job, pids, job.messages
        self._blocks = {m.key: blocks_of(m) for m in job.messages}
        self._words = link.words()
        self._origins = [array.origin for array in job.arrays]
        self._bases: Bases = tuple([array.pointer for array in job.arrays])
        self._shares: list[_Share] = []
        # By the addresses of this rank's and the peers' arrays, the least recently used first.
        self._cached: dict[tuple[Bases, ...], list[tuple[int, MemoryCopy]]] = {}
        self._addresses: tuple[Bases, ...] = ()
        self._copies: list[tuple[int, MemoryCopy]] = []

    def lists(self) -> dict[int, Lists]:
        """Return for each peer the block lists of all messages with it."""
        lists: dict[int, dict[tuple[str, int], BlockColumns]] = {}
        for m in self.messages:
            lists.setdefault(m.peer, {})[m.direction, m.tag] = self._blocks[m.key]
        return dict(lists)

    def open(self, theirs: Mapping[int, Lists]) -> ProcessVmChannel:
        """Take the block lists of the peers, and return the channel."""
        both_ways = self._job.both_ways
        for m in self.messages:
            own, other = self._blocks[m.key], theirs[m.peer][m.opposite]
            sent, received = (own, other) if m.direction == "send" else (other, own)
            half = 0
            if m.peer not in both_ways and m.nbytes >= LEAST_SHARED_BYTES:
                half = m.nbytes // 2 // _LINE_BYTES * _LINE_BYTES
            blocks = common_blocks(sent, received, half)
            first = int(np.searchsorted(np.cumsum(blocks.lengths), half, "right"))
            if m.direction == "receive":
                self._shares.append(_Share("read", m.peer, blocks.some(slice(first, None))))
            elif first:
                self._shares.append(_Share("write", m.peer, blocks.some(slice(first))))
        peers = list(dict.fromkeys(share.peer for share in self._shares))
        self._peer_words = [self._link.words(peer) for peer in peers]
        self._place = {peer: n for n, peer in enumerate(peers)}
        return self

    def abandon(self) -> None:
        self.close()
        self.free()

    def views(self, memories: Sequence[memoryview]) -> Bases:
        return tuple(
            [address_of(memory) + n for memory, n in zip(memories, self._origins, strict=True)]
        )

    def bind(self, views: Bases) -> None:
        self._bases = views

    def run(self) -> None:
        for n, base in enumerate(self._bases):
            self._words[n] = base
        super().run()

    def _move(self) -> None:
        addresses = (self._bases, *map(tuple, self._peer_words))
        if addresses != self._addresses:
            copies = self._cached.pop(addresses, None) or self._copies_between(*addresses)
            if len(self._cached) >= _MOST_CACHED:
                del self._cached[next(iter(self._cached))]
            self._cached[addresses] = copies
            self._addresses, self._copies = addresses, copies
        for peer, copy in self._copies:
            try:
                copy()
            except OSError as error:
                raise _failure(error, self._world.rank, peer) from error

    def _copies_between(self, own: Bases, *theirs: Bases) -> list[tuple[int, MemoryCopy]]:
        """Prepare the copies between this rank's arrays and its peers' arrays at some addresses."""
        copies = []
        for kind, peer, blocks in self._shares:
            other = theirs[self._place[peer]]
            ends = (own, other) if kind == "write" else (other, own)
            at = blocks.at(*ends)
            for start in range(0, at.lengths.size, MOST_BLOCKS):
                part = at.some(slice(start, start + MOST_BLOCKS))
                sides = iovec(part.source, part.lengths), iovec(part.target, part.lengths)
                here, there = sides if kind == "write" else sides[::-1]
                copies.append((peer, MemoryCopy(kind, self._pids[peer], here, there)))
        return copies


def iovec(addresses: Int64Array, lengths: Int64Array) -> Iovec:
    """Return blocks as an array of the kernel's ``struct iovec``, adjacent ones merged."""
    first = np.append(0, np.flatnonzero(addresses[1:] != addresses[:-1] + lengths[:-1]) + 1)
    merged = np.stack([addresses[first], np.add.reduceat(lengths, first)], axis=1)
    return merged.astype(np.uint64)


def make_channel(
    world: World, job: Job, pids: Mapping[int, int], link: NodeLink | None
) -> ProcessVmChannel | None:
    """Make the channel of a job together with its peers, None on a rank without messages; collective over the world."""

    def begin() -> ProcessVmChannel:
        assert link is not None
        return ProcessVmChannel(job, pids, link)

    return connect(world, job.peers, begin, ProcessVmChannel.lists, ProcessVmChannel.open)


def _failure(error: OSError, rank: int, peer: int) -> HaloxError:
    if error.errno == errno.ESRCH:
        return ExchangeTimeoutError(
            f"exchange: rank {rank} cannot reach the memory of rank {peer}, whose process has ended"
        )
    freed = "; an array of the plan was freed" if error.errno == errno.EFAULT else ""
    return PathError(
        f"rank {rank} cannot reach the memory of rank {peer} any more: {error.strerror}{freed}"
    )
