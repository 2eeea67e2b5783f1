"""The channel of an engine that can access the memory of all ranks of a node; flags in shared memory order its copies.

Either end can move a window: the receiver gets it, or the sender puts it. Between ranks that send in both directions
each rank gets the messages that it receives. If a message has no counterpart in the opposite direction, each end moves
half of it, so that neither end waits while its peer works::

    A: cells final | ready=e | wait for B's ready=e | put windows 0 .. n/2      | read=e | wait for B's read=e | return
    B: halo free   | ready=e | wait for A's ready=e | get windows n/2 .. n      | read=e | wait for A's read=e | return

A rank writes the addresses of its arrays beside its flags before it signals "ready", so that a plan can move to other
arrays of the same layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halox.paths.base import Job, Key
from halox.paths.in_place import InPlaceChannel
from halox.paths.messages import Message
from halox.paths.node import NodeLink
from halox.paths.scatter_gather.agreement import AgreeingChannel, Exports, Proposals
from halox.paths.scatter_gather.engine import Direction, Transfer
from halox.paths.scatter_gather.keys import KeyList, Keys, Memory
from halox.paths.scatter_gather.windows import MessageBlocks
from halox.runtime.arrays import address_of

_MOST_CACHED = 64

Bases = tuple[int, ...]
"""Addresses of the first elements of a rank's arrays."""


@dataclass(frozen=True)
class MovedWindows:
    """Windows of a message that this rank moves."""

    message: Message
    blocks: MessageBlocks  # of this end
    chunk_bytes: int
    direction: Direction
    windows: slice


def moved_windows(
    job: Job, blocks: Mapping[Key, MessageBlocks], chunks: Mapping[Key, int]
) -> list[MovedWindows]:
    """Return the windows that this rank moves of a job's messages; its peers apply the same rule.

    ``blocks`` and ``chunks`` are by the keys of the messages.
    """
    both_ways = job.both_ways
    moved = []
    for message in job.messages:
        own, chunk = blocks[message.key], chunks[message.key]
        half = 0 if message.peer in both_ways else -(-own.nbytes // chunk) // 2
        if message.direction == "receive":
            moved.append(MovedWindows(message, own, chunk, "get", slice(half, None)))
        elif half:
            moved.append(MovedWindows(message, own, chunk, "put", slice(0, half)))
    return moved


class NodeChannel(InPlaceChannel, AgreeingChannel):
    """Moves arrays directly between processes; see the module.

    The channel can move to other arrays unless the engine needs registered memory.
    """

    def __init__(self, job: Job, keys: Keys, link: NodeLink) -> None:
        peers = job.peers
        super().__init__(link, peers, peers)
        self._prepare(link.world, keys, job.messages)
        self.is_movable = not keys.engine.needs_registration
        self._words = link.words()
        self._origins = [array.origin for array in job.arrays]
        self._spans = [len(array.memory) for array in job.arrays]
        self._home: Bases = tuple([array.pointer for array in job.arrays])
        self._bases = self._home
        self._job = job
        self._moved_windows: list[MovedWindows] = []
        self._peer_words: list[memoryview] = []
        self._cached: dict[tuple[Bases, ...], tuple[list[Transfer], list[KeyList]]] = {}
        self._addresses: tuple[Bases, ...] = ()
        self._transfers: list[Transfer] = []

    def exports(self, theirs: Mapping[int, Proposals]) -> dict[int, Exports]:
        """Return for each peer the keys of all messages with that peer, in windows that suit both ends."""
        self._map(theirs)
        self._moved_windows = moved_windows(self._job, self._blocks, self._chunks)
        return self._exported(self.messages)

    def _memory(self, blocks: MessageBlocks, bases: Bases | None = None) -> list[Memory]:
        bases = bases or self._home
        return [
            Memory(bases[n], bases[n] - self._origins[n], self._spans[n], None)
            for n in blocks.arrays
        ]

    def open(self, theirs: Mapping[int, Exports]) -> None:
        """Take the keys of the peers."""
        self._their_exports = [
            theirs[s.message.peer][s.message.opposite] for s in self._moved_windows
        ]
        peers = list(dict.fromkeys(moved.message.peer for moved in self._moved_windows))
        self._peer_words = [self._link.words(peer) for peer in peers]
        self._place = {peer: n for n, peer in enumerate(peers)}
        # Also take the keys of messages that the peer moves: it will not send them again.
        for message in self.messages:
            _, exported = theirs[message.peer][message.opposite]
            self._keys.accept(message.peer, exported)

    def views(self, memories: Sequence[memoryview]) -> Bases:
        """Return the addresses of other arrays."""
        return tuple(
            [address_of(memory) + n for memory, n in zip(memories, self._origins, strict=True)]
        )

    def bind(self, views: Bases) -> None:
        """Use the arrays at these addresses."""
        self._bases = views

    def run(self) -> None:
        """Let the peers access this rank's arrays."""
        for n, base in enumerate(self._bases):
            self._words[n] = base
        super().run()

    def _move(self) -> None:
        addresses = (self._bases, *map(tuple, self._peer_words))
        if addresses != self._addresses:
            self._find_transfers(addresses)
        for transfer in self._transfers:
            transfer()
        self._keys.engine.complete()

    def _find_transfers(self, addresses: tuple[Bases, ...]) -> None:
        """Set the transfers between arrays at these addresses, of this rank and of its peers."""
        transfers = self._cached.pop(addresses, None)
        if transfers is None:
            transfers = self._make_transfers(addresses)
            if len(self._cached) >= _MOST_CACHED:
                for unused in self._cached.pop(next(iter(self._cached)))[1]:
                    self._keys.release(unused)
        self._cached[addresses] = transfers
        self._addresses, self._transfers = addresses, transfers[0]

    def _make_transfers(self, addresses: tuple[Bases, ...]) -> tuple[list[Transfer], list[KeyList]]:
        keys, (own_bases, *peer_bases) = self._keys, addresses
        transfers, lists = [], []
        for moved, (arrays, exported) in zip(self._moved_windows, self._their_exports, strict=True):
            peer = moved.message.peer
            own = keys.acquire(
                moved.blocks, moved.chunk_bytes, self._memory(moved.blocks, own_bases)
            )
            lists.append(own)
            bases = peer_bases[self._place[peer]]
            remote = keys.moved(peer, exported, tuple([bases[n] for n in arrays]))
            transfers += [
                keys.engine.transfer(moved.direction, key, other, peer)
                for key, other in [*zip(own.keys, remote, strict=True)][moved.windows]
            ]
        return transfers, lists

    def close(self) -> None:
        """Leave an exchange that is under way, and release the keys."""
        super().close()
        self.release_keys()

    def release_keys(self) -> None:
        """Release the keys, and drop the transfers between them."""
        for _, key_lists in self._cached.values():
            for key_list in key_lists:
                self._keys.release(key_list)
        self._cached, self._transfers, self._addresses = {}, [], ()
        super().release_keys()
