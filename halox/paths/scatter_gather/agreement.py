"""Agreement of both ends of messages on chunk sizes and keys, when a plan is made.

The sender chooses a chunk size, the receiver reduces it: both swap what suits them, and derive the same size. Then each
maps its keys and tells the peer of them, unless the peer knows them already::

    A: proposals | map keys | offers, keys only where B does not know them | transfers
    B: proposals | map keys | offers, keys only where A does not know them | transfers
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from halox.errors import PathError
from halox.paths.base import Channel, Job, Key
from halox.paths.messages import Message
from halox.paths.scatter_gather.keys import KeyList, Keys, Memory, Offer
from halox.paths.scatter_gather.windows import MessageBlocks, Proposal, agreed_chunk, propose
from halox.runtime.handshake import handshake
from halox.runtime.world import World

_OPPOSITE: dict[str, str] = {"send": "receive", "receive": "send"}

Name = tuple[str, int]
"""Direction and tag of a message between two ranks."""

Proposals = Mapping[Name, Proposal]
"""Chunk sizes that suit a rank, by message."""

Offers = Mapping[Name, tuple[tuple[int, ...], Offer]]
"""Keys of a rank, by message, with the numbers of the arrays that they are in."""


Swap = Callable[[dict[int, Any]], dict[int, Any]]
"""Takes what this rank says to each peer, and returns what they say."""


def opposite(message: Message) -> Name:
    """Return the name of a message at its other end."""
    return _OPPOSITE[message.direction], message.tag


class Agreement:
    """Agreement on some messages, this rank's part: their block lists, chunk sizes and keys.

    ``memory`` returns the memory of a message's arrays. By the key of each message there are its ``blocks`` and, once
    they are known, the chunk size in ``chunks`` and the keys of this end in ``own``.
    """

    def __init__(
        self,
        keys: Keys,
        messages: Sequence[Message],
        memory: Callable[[MessageBlocks], list[Memory]],
        rank: int,
    ) -> None:
        self._keys, self._messages, self._memory, self._rank = keys, messages, memory, rank
        self.blocks = {m.key: MessageBlocks.of(m) for m in messages}
        self.chunks: dict[Key, int] = {}
        self.own: dict[Key, KeyList] = {}
        self._proposed = {m.key: propose(self.blocks[m.key], keys.engine.limits) for m in messages}

    def proposals(self) -> dict[int, Proposals]:
        """Return for each peer the chunk sizes that suit this rank."""
        found: dict[int, dict[Name, Proposal]] = {}
        for m in self._messages:
            found.setdefault(m.peer, {})[m.direction, m.tag] = self._proposed[m.key]
        return dict(found)

    def map(self, theirs: Mapping[int, Proposals]) -> None:
        """Derive the chunk sizes, and map this rank's keys; `PathError` if there is no size for some message."""
        for m in self._messages:
            own, other = self._proposed[m.key], theirs[m.peer][opposite(m)]
            sender, receiver = (own, other) if m.direction == "send" else (other, own)
            chunk = agreed_chunk(sender, receiver, m.nbytes)
            if chunk is None:
                raise PathError(
                    f"rank {self._rank} and rank {m.peer} agree on no chunk size for the {m.direction} of {m.nbytes} "
                    f"bytes, in {m.block_count} blocks here: they are too short for the {self._keys.engine.name} "
                    "engine; leave the choice of the path to halox"
                )
            self.chunks[m.key] = chunk
            blocks = self.blocks[m.key]
            self.own[m.key] = self._keys.local(blocks, chunk, self._memory(blocks))

    def offers(self, messages: Sequence[Message]) -> dict[int, Offers]:
        """Return for each peer the keys of some messages, which it must take."""
        found: dict[int, dict[Name, tuple[tuple[int, ...], Offer]]] = {}
        for m in messages:
            offer = self._keys.offer(self.own[m.key], m.peer)
            arrays = self.blocks[m.key].arrays
            found.setdefault(m.peer, {})[m.direction, m.tag] = arrays, offer
        return dict(found)

    def drop(self) -> None:
        """Take this rank's keys out of the caches, here and at the peers."""
        for own in self.own.values():
            self._keys.drop(own)

    def release(self) -> None:
        """Let go of this rank's keys."""
        for own in self.own.values():
            self._keys.release(own)
        self.own = {}


class AgreeingChannel(Channel):
    """A channel made in three steps: the peers swap `proposals`, what each `offers`, and `open` those of the others."""

    messages: tuple[Message, ...]
    _world: World
    _agreement: Agreement

    @property
    def n_keys(self) -> int:
        """Keys of this rank's ends of the messages."""
        return sum(len(own.keys) for own in self._agreement.own.values())

    def proposals(self) -> dict[int, Any]:
        """Return for each peer the chunk sizes that suit this rank."""
        return self._agreement.proposals()

    @abstractmethod
    def offers(self, theirs: Mapping[int, Any]) -> dict[int, Any]:
        """Map the keys, and return for each peer what it must know of them."""

    @abstractmethod
    def open(self, theirs: Mapping[int, Any]) -> None:
        """Take the keys of the peers."""

    @abstractmethod
    def let_go(self) -> None:
        """Let go of the keys, and of the transfers between them."""

    def abandon(self) -> None:
        """Release everything, after an error that was raised on all ranks."""
        self.close()
        self.free()

    def remap(self, swap: Swap | None = None) -> None:
        """Map all keys anew and swap them, as if nothing were cached; between exchanges, together with the peers.

        What every transfer costs without caches: for benchmarks and tests. ``swap`` takes what this rank says to each
        peer, and returns what they say.
        """
        swap = swap or self.swap
        self._agreement.drop()
        self.let_go()
        self.open(swap(self.offers(swap(self.proposals()))))

    def swap(self, said: dict[int, Any]) -> dict[int, Any]:
        """Say something to each peer, and return what they say; collective over them."""
        return self._world.swap(said, [*said], "the mapping of keys")


Made = TypeVar("Made", bound=AgreeingChannel)


def agreed(world: World, make: Callable[[], Made], job: Job) -> Made | None:
    """Make the channel of a job together with its peers; collective over the world.

    None on a rank without messages, which takes part in the rounds alone.
    """

    def opened(mine: Made, theirs: Mapping[int, Any]) -> Made:
        mine.open(theirs)
        return mine

    rounds = (lambda mine, _: mine.proposals(), lambda mine, theirs: mine.offers(theirs), opened)
    made: Made | None = handshake(
        world,
        lambda: make() if job.messages else None,
        rounds,
        "the making of a plan",
        peers=lambda _: job.peers,
    )
    return made
