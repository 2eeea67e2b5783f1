"""The channel of ``mlx5_umr``: arrays of ranks on different nodes, by RDMA writes.

When a plan is made, the peers swap the chunk sizes that suit them, derive the same size, and swap their keys, except
those that the peer has already::

    A: proposals | map keys | exports of keys that B does not have
    B: proposals | map keys | exports of keys that A does not have

In an exchange the receiver notifies the sender that its halo is free. The sender writes every window from its array
into the receiver's array, and sends a number behind the last window. Adapters deliver in order, so that all windows are
in place when the number arrives::

    B: halo free   | free | . . . . . . . . . . . . . . | return
    A: cells final | . . . . wait for free | writes, number | return

While a rank waits in one exchange, it also makes progress in its other exchanges that have been started
(`halox.runtime.waiting`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from threading import Lock

from halox.errors import PathError
from halox.paths.base import Channel, Job, Key
from halox.paths.messages import Message
from halox.paths.scatter_gather.mlx5.engine import MemoryKey, Mlx5Engine
from halox.paths.scatter_gather.mlx5.gpu import GpuArrays
from halox.paths.scatter_gather.mlx5.keys import ExportedKeys, KeyList, Keys, Memory
from halox.paths.scatter_gather.mlx5.windows import (
    MOST_WINDOWS,
    MessageBlocks,
    Proposal,
    agreed_chunk,
    propose,
)
from halox.runtime.device_arena import DeviceArena
from halox.runtime.handshake import handshake
from halox.runtime.mlx5 import Adapter, QueueAddress
from halox.runtime.waiting import STARTED_STEPS
from halox.runtime.world import World

Name = tuple[str, int]
"""Direction and tag of a message between two ranks."""

Proposals = tuple[Mapping[Name, Proposal], QueueAddress]
"""Chunk sizes that suit a rank, by message, and the address of its queue pair for the peer."""

Exports = Mapping[Name, tuple[ExportedKeys, int]]
"""Keys of a rank by message, and the number by which its end of the message is notified."""


class Inbox:
    """Peers' notifications, counted by their numbers; each end of a message has a separate number."""

    def __init__(self, engine: Mlx5Engine) -> None:
        self.engine, self.lock = engine, Lock()
        self._numbers = count(1)
        self._unread: Counter[int] = Counter()

    def new_number(self) -> int:
        """Return a number that no other end of a message has."""
        return next(self._numbers)

    def collect(self) -> None:
        """Count the numbers that have arrived; does not wait."""
        for _, number in self.engine.arrivals():
            self._unread[number] += 1

    def consume(self, number: int) -> bool:
        """Return whether a number has arrived more often than it was consumed; if so, consume it once."""
        if not self._unread[number]:
            return False
        self._unread[number] -= 1
        return True


class _MessageEnd:
    """End of a message at this rank, in one exchange at a time; ``own`` and ``theirs`` are the numbers of the ends."""

    def __init__(
        self,
        message: Message,
        keys: list[MemoryKey],
        rkeys: tuple[int, ...],
        inbox: Inbox,
        own: int,
        theirs: int,
    ) -> None:
        self.message, self._keys, self._rkeys = message, keys, rkeys
        self._inbox, self._own, self._theirs = inbox, own, theirs
        self._has_moved = True

    def start(self) -> None:
        """Begin an exchange: a receiver notifies the sender that the windows can be written."""
        self._has_moved = False
        if self.message.direction == "receive":
            self._inbox.engine.notify(self.message.peer, self._theirs)

    def step(self) -> None:
        if self._has_moved or not self._inbox.consume(self._own):
            return
        self._has_moved = True
        if self.message.direction == "send":
            last = len(self._keys) - 1
            for n, (key, rkey) in enumerate(zip(self._keys, self._rkeys, strict=True)):
                number = self._theirs if n == last else None
                self._inbox.engine.write(self.message.peer, rkey, number, key)

    @property
    def is_done(self) -> bool:
        """Whether the exchange of the message has ended at this end."""
        if self.message.direction == "receive":
            return self._has_moved
        return self._has_moved and not any(key.posted for key in self._keys)


class Mlx5Channel(Channel):
    """Moves arrays between nodes without packing; see the module. ``gpu`` is given for arrays on this rank's GPU."""

    def __init__(
        self, world: World, job: Job, keys: Keys, inbox: Inbox, gpu: GpuArrays | None = None
    ) -> None:
        self._world, self._keys, self._inbox, self._gpu = world, keys, inbox, gpu
        self._job, self.messages = job, job.messages
        self._blocks = {m.key: MessageBlocks.of(m) for m in job.messages}
        self._proposed = {
            m.key: propose(self._blocks[m.key], keys.engine.limits) for m in job.messages
        }
        self._own: dict[Key, KeyList] = {}
        self._numbers: dict[Key, int] = {m.key: inbox.new_number() for m in job.messages}
        self._ends: list[_MessageEnd] = []
        self._waiter = world.waiter()
        self._is_begun = False

    def proposals(self) -> dict[int, Proposals]:
        """Return for each peer the chunk sizes that suit this rank, and the address of its queue pair."""
        sizes: dict[int, dict[Name, Proposal]] = {peer: {} for peer in self._job.peers}
        for m in self.messages:
            sizes[m.peer][m.direction, m.tag] = self._proposed[m.key]
        addresses = self._inbox.engine.invite(sizes)
        return {peer: (sizes[peer], addresses[peer]) for peer in sizes}

    def exports(self, theirs: Mapping[int, Proposals]) -> dict[int, Exports]:
        """Connect, map the keys, and return for each peer the keys and numbers of all messages with it.

        Raises `PathError` if the ends of a message have no chunk size in common.
        """
        self._inbox.engine.connect({peer: address for peer, (_, address) in theirs.items()})
        exports: dict[int, dict[Name, tuple[ExportedKeys, int]]] = {peer: {} for peer in theirs}
        for m in self.messages:
            own, other = self._proposed[m.key], theirs[m.peer][0][m.opposite]
            sender, receiver = (own, other) if m.direction == "send" else (other, own)
            chunk = agreed_chunk(sender, receiver, m.nbytes)
            if chunk is None:
                raise PathError(
                    f"rank {self._world.rank} and rank {m.peer} agree on no chunk size for the {m.direction} of "
                    f"{m.nbytes} bytes, in {m.block_count} blocks here: they are too short for {MOST_WINDOWS} keys "
                    "of the network adapters; leave the choice of the path to halox"
                )
            blocks = self._blocks[m.key]
            key_list = self._keys.acquire(blocks, chunk, self._memory(blocks))
            self._own[m.key] = key_list
            exported = self._keys.export(key_list, m.peer)
            exports[m.peer][m.direction, m.tag] = exported, self._numbers[m.key]
        return dict(exports)

    def _memory(self, blocks: MessageBlocks) -> list[Memory]:
        memory = []
        for number in blocks.arrays:
            array = self._job.arrays[number]
            if self._gpu is not None:
                memory.append(self._gpu.memory(array))
                continue
            address, nbytes = array.pointer - array.origin, len(array.memory)
            memory.append(Memory(array.pointer, address, nbytes, array.owner()))
        return memory

    def open(self, theirs: Mapping[int, Exports]) -> Mlx5Channel:
        """Take the keys of the peers, and return the channel."""
        for m in self.messages:
            exported, number = theirs[m.peer][m.opposite]
            rkeys = self._keys.accept(m.peer, exported)
            keys = self._own[m.key].keys
            self._ends.append(
                _MessageEnd(m, keys, rkeys, self._inbox, self._numbers[m.key], number)
            )
        return self

    def abandon(self) -> None:
        self.close()
        self.free()

    def check(self) -> None:
        if self._gpu is not None:
            self._gpu.check()

    def start(self) -> None:
        self.run()
        STARTED_STEPS[self] = self._step

    def run(self) -> None:
        """Let the peers write, on a GPU when the stream reaches the exchange; `finish` is the next call that waits."""
        self._is_begun = False
        if self._gpu is not None:
            self._gpu.begin()
            return
        with self._inbox.lock:
            self._begin()

    def _begin(self) -> bool:
        """Let the peers write if the stream has reached the exchange; return whether it has."""
        if not self._is_begun and (self._gpu is None or self._gpu.is_reached):
            self._is_begun = True
            for end in self._ends:
                end.start()
        return self._is_begun

    def finish(self) -> None:
        """Write to the peers that are ready, and wait until all writes are complete and all messages have arrived."""
        STARTED_STEPS.pop(self, None)
        self._waiter.until(self._step, self._what, self._missing)
        if self._gpu is not None:
            self._gpu.end()

    def _step(self) -> bool:
        """Make all progress that is possible now; return whether the exchange has ended on this rank."""
        if not self._inbox.lock.acquire(blocking=False):  # another thread makes progress
            return False
        try:
            self._inbox.collect()
            if not self._begin():
                return False
            for end in self._ends:
                end.step()
            return all(end.is_done for end in self._ends)
        finally:
            self._inbox.lock.release()

    def _missing(self) -> list[int]:
        if not self._is_begun:
            return []
        return sorted({end.message.peer for end in self._ends if not end.is_done})

    def _what(self) -> str:
        if not self._is_begun:
            return f"rank {self._world.rank} has waited for its own stream to come to the exchange"
        end = next((end for end in self._ends if not end.is_done), self._ends[0])
        peer = end.message.peer
        doing = "write its cells" if end.message.direction == "receive" else "take cells"
        return f"rank {self._world.rank} has waited for rank {peer} to {doing}"

    def close(self) -> None:
        """Leave an exchange that is under way; the peers may write until they have closed it, too."""
        STARTED_STEPS.pop(self, None)

    def free(self) -> None:
        self._ends = []
        for own in self._own.values():
            self._keys.release(own)
        self._own = {}


def make_keys(world: World, adapter: Adapter) -> tuple[Keys, Inbox]:
    """Make the keys and the inbox of an adapter, for all channels of a communicator."""
    engine = Mlx5Engine(world.rank, adapter, world.waiter)
    return Keys(engine), Inbox(engine)


def make_channel(
    world: World, job: Job, keys: Callable[[], tuple[Keys, Inbox]], arena: DeviceArena | None
) -> Mlx5Channel | None:
    """Make the channel of a job together with its peers, None on a rank without messages; collective over the world."""

    def begin() -> Mlx5Channel | None:
        if not job.messages:
            return None
        return Mlx5Channel(world, job, *keys(), None if arena is None else GpuArrays(arena))

    channel: Mlx5Channel | None = handshake(
        world,
        begin,
        (
            lambda channel, _: channel.proposals(),
            Mlx5Channel.exports,
            Mlx5Channel.open,
        ),
        "the making of a plan",
        peers=lambda _: job.peers,
    )
    return channel
