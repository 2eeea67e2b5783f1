"""Agreement of both ends of messages on chunk sizes and keys, when a plan is made.

The sender chooses a chunk size, and the receiver may reduce it: both ends swap the sizes that suit them, and derive the
same size. Then each end maps its keys and exports them to the peer, unless the peer has them already::

    A: proposals | map keys | exports of keys that B does not have | transfers
    B: proposals | map keys | exports of keys that A does not have | transfers
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from halox.errors import PathError
from halox.paths.base import Channel, Job, Key
from halox.paths.messages import Message
from halox.paths.scatter_gather.keys import ExportedKeys, KeyList, Keys, Memory
from halox.paths.scatter_gather.windows import MessageBlocks, Proposal, agreed_chunk, propose
from halox.runtime.handshake import handshake
from halox.runtime.world import World

Name = tuple[str, int]
"""Direction and tag of a message between two ranks."""

Proposals = Mapping[Name, Proposal]
"""Chunk sizes that suit a rank, by message."""

Exports = Mapping[Name, tuple[tuple[int, ...], ExportedKeys]]
"""Keys of a rank by message, each with the numbers of the arrays to which its blocks belong."""


Swap = Callable[[dict[int, Any]], dict[int, Any]]
"""Takes this rank's data for each peer, and returns the data of the peers."""


class AgreeingChannel(Channel):
    """A channel made in three steps: the peers swap `proposals`, then `exports` of their keys, which they `open`.

    ``_blocks``, ``_chunks`` (chunk sizes, once agreed) and ``_own`` (keys of this end) are by the key of a message.
    """

    def _prepare(self, world: World, keys: Keys, messages: tuple[Message, ...]) -> None:
        """List the blocks of the messages, and choose chunk sizes that suit this rank."""
        self._world, self._keys, self.messages = world, keys, messages
        self._blocks = {m.key: MessageBlocks.of(m) for m in messages}
        self._proposed = {m.key: propose(self._blocks[m.key], keys.engine.limits) for m in messages}
        self._chunks: dict[Key, int] = {}
        self._own: dict[Key, KeyList] = {}

    @property
    def n_keys(self) -> int:
        """Number of keys at this rank's ends of the messages."""
        return sum(len(own.keys) for own in self._own.values())

    @abstractmethod
    def _memory(self, blocks: MessageBlocks) -> list[Memory]:
        """Return the memory of a message's arrays."""

    def proposals(self) -> dict[int, Any]:
        """Return for each peer the chunk sizes that suit this rank."""
        proposals: dict[int, dict[Name, Proposal]] = {}
        for m in self.messages:
            proposals.setdefault(m.peer, {})[m.direction, m.tag] = self._proposed[m.key]
        return dict(proposals)

    @abstractmethod
    def exports(self, theirs: Mapping[int, Any]) -> dict[int, Any]:
        """Map the keys, and return those that each peer needs."""

    def _map(self, theirs: Mapping[int, Proposals]) -> None:
        """Derive the chunk sizes, and map this rank's keys; `PathError` if a message has no common size."""
        for m in self.messages:
            own, other = self._proposed[m.key], theirs[m.peer][m.opposite]
            sender, receiver = (own, other) if m.direction == "send" else (other, own)
            chunk = agreed_chunk(sender, receiver, m.nbytes)
            if chunk is None:
                raise PathError(
                    f"rank {self._world.rank} and rank {m.peer} agree on no chunk size for the {m.direction} of "
                    f"{m.nbytes} bytes, in {m.block_count} blocks here: they are too short for the "
                    f"{self._keys.engine.name} engine; leave the choice of the path to halox"
                )
            self._chunks[m.key] = chunk
            blocks = self._blocks[m.key]
            self._own[m.key] = self._keys.acquire(blocks, chunk, self._memory(blocks))

    def _exported(self, messages: Sequence[Message]) -> dict[int, Exports]:
        """Return for each peer the keys of some messages, which the peer must accept (`Keys.accept`)."""
        exports: dict[int, dict[Name, tuple[tuple[int, ...], ExportedKeys]]] = {}
        for m in messages:
            exported = self._keys.export(self._own[m.key], m.peer)
            arrays = self._blocks[m.key].arrays
            exports.setdefault(m.peer, {})[m.direction, m.tag] = arrays, exported
        return dict(exports)

    @abstractmethod
    def open(self, theirs: Mapping[int, Any]) -> None:
        """Take the keys of the peers."""

    def release_keys(self) -> None:
        """Release the keys; channels also drop the transfers between them."""
        for own in self._own.values():
            self._keys.release(own)
        self._own = {}

    def abandon(self) -> None:
        """Release everything, after an error that was raised on all ranks."""
        self.close()
        self.free()

    def remap(self, swap: Swap | None = None) -> None:
        """Map all keys anew and swap them, as if no key were cached; between exchanges, together with the peers.

        The cost of every transfer without caches, for benchmarks and tests. ``swap`` takes this rank's data for each
        peer, and returns the data of the peers.
        """
        swap = swap or self.swap
        for own in self._own.values():
            self._keys.drop(own)
        self.release_keys()
        self.open(swap(self.exports(swap(self.proposals()))))

    def swap(self, records: dict[int, Any]) -> dict[int, Any]:
        """Send data to each peer, and return the data of the peers; collective over them."""
        return self._world.swap(records, [*records], "the mapping of keys")


NewChannel = TypeVar("NewChannel", bound=AgreeingChannel)


def make_with_peers(world: World, make: Callable[[], NewChannel], job: Job) -> NewChannel | None:
    """Make the channel of a job together with its peers; collective over the world.

    None on a rank without messages, which only takes part in the rounds.
    """

    def opened(mine: NewChannel, theirs: Mapping[int, Any]) -> NewChannel:
        mine.open(theirs)
        return mine

    rounds = (lambda mine, _: mine.proposals(), lambda mine, theirs: mine.exports(theirs), opened)
    channel: NewChannel | None = handshake(
        world,
        lambda: make() if job.messages else None,
        rounds,
        "the making of a plan",
        peers=lambda _: job.peers,
    )
    return channel
