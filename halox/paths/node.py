"""Memory and flags of one path's messages in a plan, shared by the ranks of a node.

A rank's block of shared memory holds its flags, each in a cache line of its own, and behind them the packed
messages that it sends, once for each of two slots::

    | packed | consumed | ready | read | message 0, 1, ... (slot 0) | message 0, 1, ... (slot 1) |

A flag is a 64-bit count that only its owner writes and that only grows, over the lives of all plans that use
the block: a plan's epochs count from what the flags held when it was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halox.paths.messages import Message
from halox.runtime.arena import Block, Place, SharedArena
from halox.runtime.shared_memory import NEEDS_FENCE, fence
from halox.runtime.waiting import SPINS
from halox.runtime.world import World

FLAGS = {
    "packed": "to send",
    "consumed": "to take its last message",
    "ready": "to come to the exchange",
    "read": "to read its cells",
}
"""Flags of a block, and what a peer is waited for where one is not set."""

_LINE_BYTES = 128  # two cache lines, since processors fetch them in pairs
_HEAD_BYTES = _LINE_BYTES * len(FLAGS)
_MESSAGE_ALIGNMENT = 256
_MOST = 1 << 62


class Flag:
    """A flag of this rank and the same flag of some peers."""

    def __init__(
        self,
        world: World,
        own: tuple[Any, int, int],
        others: Sequence[tuple[int, Any, int, int]],
        what: str,
    ) -> None:
        self._world, self._what = world, what
        self._flags, self._index, self._base = own
        self._others = list(others)
        self._waiter = world.waiter()
        self._spins = range(0 if world.crowded else SPINS)

    def signal(self, epoch: int) -> None:
        """Publish everything written so far, and set the flag."""
        if NEEDS_FENCE:
            fence()
        self._flags[self._index] = self._base + epoch

    def wait(self, epoch: int) -> None:
        """Return once every peer's flag has reached an epoch."""
        if not self._others:
            return
        for peer, flags, index, base in self._others:
            if flags[index] < base + epoch:
                for _ in self._spins:
                    if flags[index] >= base + epoch:
                        break
                else:
                    self._wait_for(peer, flags, index, base + epoch)
        if NEEDS_FENCE:
            fence()

    def passed(self, epoch: int) -> bool:
        """Return whether every peer's flag has reached an epoch; what they wrote before may then be read."""
        for _, flags, index, base in self._others:
            if flags[index] < base + epoch:
                return False
        if NEEDS_FENCE and self._others:
            fence()
        return True

    def missing(self, epoch: int) -> list[int]:
        """Return the peers whose flags have not reached an epoch."""
        return [peer for peer, flags, index, base in self._others if flags[index] < base + epoch]

    def _wait_for(self, peer: int, flags: Any, index: int, value: int) -> None:
        rank, what = self._world.rank, self._what
        self._waiter.until(
            lambda: flags[index] >= value,
            lambda: f"rank {rank} has waited for rank {peer} {what}",
            lambda: [peer],
        )


class NodeLink:
    """The shared block of this rank for one path of a plan, and the addresses of its peers' blocks.

    Collective over the ranks of the node. ``failed`` is True, on all of them, where there is too little shared
    memory.
    """

    def __init__(
        self, world: World, arena: SharedArena, sends: Sequence[Message], peers: Sequence[int]
    ) -> None:
        self.world, self._arena = world, arena
        self._offsets: dict[tuple[int, int], int] = {}
        end = 0
        for message in sends:
            self._offsets[message.peer, message.tag] = end
            end += -(-message.packed_bytes // _MESSAGE_ALIGNMENT) * _MESSAGE_ALIGNMENT
        self._slot_bytes = end
        self._block: Block | None = arena.allocate(_HEAD_BYTES + 2 * end)
        self.failed = self._block is None
        if self._block is None:
            return
        self._flags = self._flags_at(self._block.place)
        self._bases = [self._base(_LINE_BYTES // 8 * n) for n in range(len(FLAGS))]
        record = (self._block.place, self._slot_bytes, self._bases, self._offsets)
        self._peers: dict[int, Any] = world.swap(
            dict.fromkeys(peers, record), peers, "the making of a plan"
        )

    def _flags_at(self, place: Place) -> Any:
        return self._arena.memory(place)[:_HEAD_BYTES].data.cast("B").cast("q")

    def _base(self, index: int) -> int:
        """Return what a flag holds, from which epochs count on; start at 0 where it held no count."""
        value = int(self._flags[index])
        if 0 <= value < _MOST:
            return value
        # The block was a field's: nobody looks at its bytes any more.
        self._flags[index] = 0
        return 0

    def flag(self, name: str, peers: Sequence[int]) -> Flag:
        """Return one of `FLAGS`, which waits for the given peers."""
        number = [*FLAGS].index(name)
        index = _LINE_BYTES // 8 * number
        others = []
        for peer in peers:
            place, _, bases, _ = self._peers[peer]
            others.append((peer, self._flags_at(place), index, bases[number]))
        own = (self._flags, index, self._bases[number])
        return Flag(self.world, own, others, FLAGS[name])

    def outgoing_place(self, message: Message, slot: int) -> Place:
        """Return where this rank packs a message."""
        assert self._block is not None
        offset = self._offsets[message.peer, message.tag]
        return self._block.place.at(_HEAD_BYTES + slot * self._slot_bytes + offset)

    def incoming_place(self, message: Message, slot: int) -> Place:
        """Return where a peer packs a message for this rank."""
        place, slot_bytes, _, offsets = self._peers[message.peer]
        offset = offsets[self.world.rank, message.tag]
        found: Place = place.at(_HEAD_BYTES + slot * slot_bytes + offset)
        return found

    def close(self) -> None:
        """Give the block back; local."""
        if self._block is not None:
            self._arena.release(self._block)
            self._block = None
