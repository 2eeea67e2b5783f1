"""The channel of the ``mlx5_umr`` engine: arrays of ranks on different nodes, by RDMA writes.

The receiver notifies the sender that its halo is free. The sender writes every window from its array into the
receiver's array, and sends a number behind the last window. Adapters deliver in order, so that all windows are in place
when the number arrives. If there are more windows than keys, this repeats in rounds::

    B: halo free, keys mapped | free | . . . . . . . . . . . . | keys to round 1 | free | . . . . . | return
    A: cells final | . . . . wait for free | writes, number | . . . . . wait for free | writes, number | return

While a rank waits in one exchange, it also makes progress in its other exchanges that have been started
(`halox.runtime.waiting`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import count
from threading import Lock

from halox.paths.base import Job, Key
from halox.paths.messages import Message
from halox.paths.scatter_gather.agreement import AgreeingChannel, Exports, Proposals
from halox.paths.scatter_gather.keys import Keys, Memory, Rounds
from halox.paths.scatter_gather.mlx5_gpu import GpuArrays
from halox.paths.scatter_gather.mlx5_umr import Mlx5Umr
from halox.paths.scatter_gather.windows import MessageBlocks
from halox.runtime.mlx5 import QueueAddress
from halox.runtime.waiting import STARTED_STEPS
from halox.runtime.world import World


class Inbox:
    """Peers' notifications, counted by their numbers; each end of a message has a separate number."""

    def __init__(self, engine: Mlx5Umr) -> None:
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
    """End of a message at this rank, in one exchange at a time."""

    def __init__(
        self, message: Message, rounds: Rounds, inbox: Inbox, own: int, theirs: int
    ) -> None:
        self.message, self._rounds, self._inbox = message, rounds, inbox
        self._own, self._theirs = own, theirs
        self._done = rounds.count

    def start(self) -> None:
        """Begin an exchange."""
        self._done = 0
        if self.message.direction == "receive":
            self._invite()

    def _invite(self) -> None:
        """Notify the sender that the windows of the next round can be written."""
        self._rounds.enter(self._done)
        self._inbox.engine.notify(self.message.peer, self._theirs)

    def step(self) -> None:
        """Make all progress that is possible now."""
        if self.message.direction == "receive":
            while not self.is_done and self._inbox.consume(self._own):
                self._done += 1
                if not self.is_done:
                    self._invite()
            return
        while self._done < self._rounds.count and self._is_idle and self._inbox.consume(self._own):
            self._rounds.enter(self._done)
            *first, last = self._rounds.transfers("put", self._done)
            for transfer in first:
                transfer()
            last(self._theirs)
            self._done += 1

    @property
    def _is_idle(self) -> bool:
        """Whether the adapter has finished with the keys of the last round."""
        return self._inbox.engine.is_idle(self._rounds.keys)

    @property
    def is_done(self) -> bool:
        """Whether the exchange of the message has ended at this end."""
        is_written = self.message.direction == "receive" or self._is_idle
        return self._done == self._rounds.count and is_written


class Mlx5Channel(AgreeingChannel):
    """Moves arrays between nodes without packing; see the module. ``gpu`` is given for arrays on this rank's GPU."""

    def __init__(
        self, world: World, job: Job, keys: Keys, inbox: Inbox, gpu: GpuArrays | None = None
    ) -> None:
        self._prepare(world, keys, job.messages)
        self._arrays, self._inbox = job.arrays, inbox
        self._waiter = world.waiter()
        self._numbers: dict[Key, int] = {m.key: inbox.new_number() for m in job.messages}
        self._peers = job.peers
        self._ends: list[_MessageEnd] = []
        self._gpu, self._is_begun = gpu, False

    def _memory(self, blocks: MessageBlocks) -> list[Memory]:
        memory = []
        for number in blocks.arrays:
            array = self._arrays[number]
            if self._gpu is not None:
                memory.append(self._gpu.memory(array))
                continue
            address, nbytes = array.pointer - array.origin, len(array.memory)
            memory.append(Memory(array.pointer, address, nbytes, array.owner()))
        return memory

    def proposals(self) -> dict[int, tuple[Proposals, QueueAddress]]:
        """Return for each peer the chunk sizes that suit this rank, and the address of its queue pair."""
        proposals = super().proposals()
        addresses = self._inbox.engine.invite(proposals)
        return {peer: (sizes, addresses[peer]) for peer, sizes in proposals.items()}

    def exports(
        self, theirs: Mapping[int, tuple[Proposals, QueueAddress]]
    ) -> dict[int, tuple[Exports, dict[tuple[str, int], int]]]:
        """Connect, and return for each peer the keys of all messages with it, and their numbers."""
        self._inbox.engine.connect({peer: address for peer, (_, address) in theirs.items()})
        self._map({peer: proposals for peer, (proposals, _) in theirs.items()})
        numbers: dict[int, dict[tuple[str, int], int]] = {peer: {} for peer in theirs}
        for m in self.messages:
            numbers[m.peer][m.direction, m.tag] = self._numbers[m.key]
        exports = self._exported(self.messages)
        return {peer: (exports[peer], numbers[peer]) for peer in theirs}

    def open(self, theirs: Mapping[int, tuple[Exports, Mapping[tuple[str, int], int]]]) -> None:
        """Take the keys of the peers."""
        for m in self.messages:
            exports, numbers = theirs[m.peer]
            _, exported = exports[m.opposite]
            remote = self._keys.accept(m.peer, exported)
            own = self._own[m.key]
            rounds = Rounds(self._keys, own, m.peer, exported, remote)
            number = numbers[m.opposite]
            self._ends.append(_MessageEnd(m, rounds, self._inbox, self._numbers[m.key], number))

    def check(self) -> None:
        """Refuse a stream that is being captured."""
        if self._gpu is not None:
            self._gpu.check()

    def start(self) -> None:
        """Let the peers write."""
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
        """Release the keys; no rank uses them any longer."""
        self.release_keys()

    def release_keys(self) -> None:
        """Release the keys, and drop the ends of messages that use them."""
        self._ends = []
        super().release_keys()
