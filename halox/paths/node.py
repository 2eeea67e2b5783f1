"""Shared memory and flags of one path's messages in a plan, among the ranks of a node: `NodeLink`.

A rank's block of shared memory holds its flags, each on a separate cache line, and behind them the packed messages that
it sends, once for each of two slots::

    | packed | consumed | ready | read | words | message 0, 1, ... (slot 0) | message 0, 1, ... (slot 1) |

The words are 64-bit numbers that some paths pass to their peers; they are written before a flag is signalled. A flag is
a 64-bit count that only its owner writes and that only grows, over the lives of all plans that use the block: a plan
counts its epochs from the value of the flag when the plan was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halox.paths.messages import Message
from halox.runtime.arena import SharedArena
from halox.runtime.segments import Block, Place
from halox.runtime.shared_memory import NEEDS_FENCE, fence
from halox.runtime.waiting import SPINS
from halox.runtime.world import World
from halox.values import rounded_up

FLAGS = {
    "packed": "to send",
    "consumed": "to take its last message",
    "ready": "to come to the exchange",
    "read": "to move its cells",
}
"""Flags of a block, each with the awaited action of a peer, for timeout errors."""

_LINE_BYTES = 128  # two cache lines, since processors fetch them in pairs
_HEAD_BYTES = _LINE_BYTES * len(FLAGS)
_MESSAGE_ALIGNMENT = 256
_MOST = 1 << 62


class Flag:
    """A flag of this rank and the same flag of some peers, each with its memory word and its initial value."""

    def __init__(
        self,
        world: World,
        own: tuple[memoryview, int],
        others: Sequence[tuple[int, memoryview, int]],
        what: str,
    ) -> None:
        self._world, self._what = world, what
        self._word, self._base = own
        self._others = others
        self._waiter = world.waiter()
        self._spins = range(0 if world.crowded else SPINS)

    def signal(self, epoch: int) -> None:
        """Publish all earlier writes, and set the flag."""
        if NEEDS_FENCE:
            fence()
        self._word[0] = self._base + epoch

    def wait(self, epoch: int) -> None:
        """Return once every peer's flag has reached an epoch."""
        if not self._others:
            return
        for peer, word, base in self._others:
            if word[0] < base + epoch:
                for _ in self._spins:
                    if word[0] >= base + epoch:
                        break
                else:
                    self._wait_for(peer, word, base + epoch)
        if NEEDS_FENCE:
            fence()

    def passed(self, epoch: int) -> bool:
        """Return whether every peer's flag has reached an epoch; if so, the peers' earlier writes may be read."""
        for _, word, base in self._others:
            if word[0] < base + epoch:
                return False
        if NEEDS_FENCE and self._others:
            fence()
        return True

    def missing(self, epoch: int) -> list[int]:
        """Return the peers that have not set their flags to an epoch."""
        return [peer for peer, word, base in self._others if word[0] < base + epoch]

    def _wait_for(self, peer: int, word: memoryview, value: int) -> None:
        rank, what = self._world.rank, self._what
        self._waiter.until(
            lambda: word[0] >= value,
            lambda: f"rank {rank} has waited for rank {peer} {what}",
            lambda: [peer],
        )


class _Record(NamedTuple):
    """Description of a rank's block for its peers: the first values of its flags, and offsets by (peer, tag)."""

    place: Place
    words: int
    slot_bytes: int
    bases: list[int]
    offsets: dict[tuple[int, int], int]


class NodeLink:
    """The shared block of this rank for one path of a plan, and the addresses of its peers' blocks.

    Collective over the ranks of the node. ``failed`` is True, on all these ranks, if there is too little shared memory.
    """

    def __init__(
        self,
        world: World,
        arena: SharedArena,
        sends: Sequence[Message],
        peers: Sequence[int],
        words: int = 0,
    ) -> None:
        self.world, self._arena = world, arena
        offsets, end = {}, 0
        messages_at = _HEAD_BYTES + rounded_up(8 * words, _LINE_BYTES)
        for message in sends:
            offsets[message.peer, message.tag] = end
            end += rounded_up(message.packed_bytes, _MESSAGE_ALIGNMENT)
        self._block: Block | None = arena.allocate(messages_at + 2 * end)
        self.failed = self._block is None
        if self._block is None:
            return
        place = self._block.place
        bases = [self._base(place, n) for n in range(len(FLAGS))]
        self._own = _Record(place, words, end, bases, offsets)
        self._peers: dict[int, _Record] = world.swap(
            dict.fromkeys(peers, self._own), peers, "the making of a plan"
        )

    def _word(self, place: Place, number: int) -> memoryview:
        return self._arena.memory(place)[number * _LINE_BYTES :][:8].data.cast("B").cast("q")

    def _base(self, place: Place, number: int) -> int:
        """Return the value of a flag, the origin of the epochs; reset it to 0 if it is not a valid count."""
        word = self._word(place, number)
        if not 0 <= word[0] < _MOST:
            word[0] = 0  # The block was a field's memory, and nobody reads these bytes any longer.
        return word[0]

    def flag(self, name: str, peers: Sequence[int]) -> Flag:
        """Return the flag of a name in `FLAGS`, which waits for the given peers."""
        number = [*FLAGS].index(name)
        own, *others = (
            (self._word(record.place, number), record.bases[number])
            for record in (self._own, *map(self._peers.__getitem__, peers))
        )
        waited_for = [(peer, *other) for peer, other in zip(peers, others, strict=True)]
        return Flag(self.world, own, waited_for, FLAGS[name])

    def words(self, rank: int | None = None) -> memoryview:
        """Return the words of this rank, or of a peer."""
        record = self._own if rank is None else self._peers[rank]
        memory = self._arena.memory(record.place)[_HEAD_BYTES:][: 8 * record.words]
        return memory.data.cast("B").cast("q")

    def place(self, message: Message, slot: int) -> Place:
        """Return the place of a packed message: in its sender's block."""
        record, key = self._own, (message.peer, message.tag)
        if message.direction == "receive":
            record, key = self._peers[message.peer], (self.world.rank, message.tag)
        messages_at = _HEAD_BYTES + rounded_up(8 * record.words, _LINE_BYTES)
        return record.place.at(messages_at + slot * record.slot_bytes + record.offsets[key])

    def close(self) -> None:
        if self._block is not None:
            self._arena.release(self._block)
            self._block = None
