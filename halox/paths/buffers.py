"""Transport buffers: memory of packed messages, and the transfer of their contents to another rank.

`SharedBuffers` serves the ranks of a node, and `RequestBuffers` any ranks, by MPI. Each message has one buffer in each
of the ``slots``. The channel that uses the buffers packs and unpacks. In an exchange (epoch e = 1, 2, ...) it calls, in
this order::

    open(e)        the channel may write the outgoing buffers of slot e from now on
      ... pack ...
    post(e)        the outgoing buffers have been written
    collect(e)     the channel may read the incoming buffers of slot e from now on
      ... unpack ...
    release(e)     the incoming buffers have been read

If messages are cut into fragments, stage k consists of fragment k of every message with more than k fragments. The
channel can then call stage by stage, so that stages overlap::

    open(e)
      ... pack stage 0, 1, ... ...
    release(e-1)           the last epoch's incoming buffers have been read
    expect(e)              the peers' messages may write the incoming buffers of slot e
    post_stage(e, k)       stage k has been written; in ascending order of k
    arrived(e, k)          whether stage k may be read; any number of times, for any k
    complete(e)            all stages have arrived, and the sends need no further call of this rank
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from halox.paths.fragments import MOST_FRAGMENTS, Cutter, senders_by_stage, whole, within_counts
from halox.paths.messages import Message
from halox.paths.node import NodeLink
from halox.runtime.arena import SharedArena
from halox.runtime.finalizing import keep_at_exit
from halox.runtime.leftovers import Leftovers
from halox.runtime.segments import Place
from halox.runtime.shared_memory import Bytes
from halox.runtime.world import World

if TYPE_CHECKING:
    from mpi4py.MPI import Prequest


class TransportBuffers(ABC):
    """Buffers for the messages of one channel, and their transfer."""

    slots: int  # number of buffers per message; epoch e uses slot ``e % slots``
    # ``outgoing[slot][number]`` is the buffer of send number ``number``; empty lists for buffers on a GPU.
    outgoing: list[list[Bytes]]
    incoming: list[list[Bytes]]
    outgoing_ends: list[tuple[int, ...]]  # for each message the end offsets of its fragments
    incoming_ends: list[tuple[int, ...]]

    @cached_property
    def stages_out(self) -> int:
        return max(map(len, self.outgoing_ends), default=0)

    @cached_property
    def stages_in(self) -> int:
        return max(map(len, self.incoming_ends), default=0)

    def open(self, epoch: int) -> None:  # noqa: B027 - nothing to wait for by default
        """Wait until the outgoing buffers may be written."""

    @abstractmethod
    def post(self, epoch: int) -> None:
        """Send the outgoing buffers."""

    def expect(self, epoch: int) -> None:  # noqa: B027 - peers need no permission by default
        """Let the peers' messages write the incoming buffers."""

    @abstractmethod
    def post_stage(self, epoch: int, stage: int) -> None:
        """Send one stage of the outgoing buffers; after `expect`, and after all earlier stages."""

    @abstractmethod
    def arrived(self, epoch: int, stage: int) -> bool:
        """Return whether one stage of the incoming buffers is filled, without waiting."""

    @abstractmethod
    def collect(self, epoch: int) -> None:
        """Wait until all incoming buffers are filled."""

    def complete(self, epoch: int) -> None:  # noqa: B027 - sends need no further call by default
        """Wait until all sends are complete; called when all stages have arrived."""

    @abstractmethod
    def awaited(self, epoch: int) -> list[int]:
        """Return the ranks with messages that have not arrived."""

    def release(self, epoch: int) -> None:  # noqa: B027 - nobody waits by default
        """Signal that the incoming buffers have been read."""

    @abstractmethod
    def device_pointers(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the GPU addresses of outgoing and incoming buffers, by slot; page-locks buffers on the host."""

    def close(self) -> None:  # noqa: B027 - nothing kept by default
        """Release the buffers that no other rank accesses; local."""

    def free(self) -> None:  # noqa: B027 - nothing shared by default
        """Release the buffers that other ranks accessed; local."""


class SharedBuffers(TransportBuffers):
    """Buffers in the node's shared memory, which the receiver reads: no copy by MPI, one flag per rank and exchange.

    Two slots: when a rank sees its peer's flag for epoch e + 1, the peer has finished reading epoch e, because the peer
    packs e + 1 only after that. So between ranks that send in both directions, slot e % 2 is free for epoch e + 2
    without an acknowledgement. If the receiver sends nothing back, the sender waits for the receiver's second flag
    instead::

        A: pack 1 | ready=1 |           | pack 2 | ready=2 | ... pack 3 overwrites slot 1
        B:        | ready=1 | unpack 1  |        | ready=2 | <- seen by A before it packs 3

    The flag counts in steps, many of them in one epoch. Each stage advances the flag by one step, except that the last
    stage advances it to the end of the epoch. So a receiver of any fragment need not know the sender's number of
    stages.
    """

    slots = 2

    def __init__(
        self,
        arena: SharedArena,
        link: NodeLink,
        sends: Sequence[Message],
        receives: Sequence[Message],
        cut: Cutter = whole,
    ) -> None:
        self._arena, self._link = arena, link
        self._places_out, self._places_in = (
            [[link.place(m, slot) for m in messages] for slot in range(self.slots)]
            for messages in (sends, receives)
        )
        self.outgoing = self._views(self._places_out, sends)
        self.incoming = self._views(self._places_in, receives)
        self.outgoing_ends, self.incoming_ends = [*map(cut, sends)], [*map(cut, receives)]
        sources = sorted({m.peer for m in receives})
        targets = {m.peer for m in sends}
        self._ready = link.flag("packed", sources)
        stages = senders_by_stage(receives, self.incoming_ends)
        self._stages = [link.flag("packed", senders) for senders in stages]
        self._consumed = link.flag("consumed", sorted(targets.difference(sources)))

    def _views(
        self, places: Sequence[Sequence[Place]], messages: Sequence[Message]
    ) -> list[list[Bytes]]:
        return [
            [
                self._arena.memory(place)[: m.packed_bytes]
                for place, m in zip(row, messages, strict=True)
            ]
            for row in places
        ]

    def open(self, epoch: int) -> None:
        """Wait until receivers that send nothing back have read the slot's last message."""
        self._consumed.wait(epoch - 2)

    def post(self, epoch: int) -> None:
        self._ready.signal(epoch * _STEPS)

    def post_stage(self, epoch: int, stage: int) -> None:
        """Advance this rank's flag by one step, or for the last stage to the epoch's end."""
        last = stage == self.stages_out - 1
        self._ready.signal(epoch * _STEPS if last else (epoch - 1) * _STEPS + stage + 1)

    def arrived(self, epoch: int, stage: int) -> bool:
        return self._stages[stage].passed((epoch - 1) * _STEPS + stage + 1)

    def collect(self, epoch: int) -> None:
        self._ready.wait(epoch * _STEPS)

    def awaited(self, epoch: int) -> list[int]:
        """Return the senders that have not set their flags to the end of the epoch."""
        return self._ready.missing(epoch * _STEPS)

    def release(self, epoch: int) -> None:
        """Signal the flag for senders that receive nothing from this rank."""
        self._consumed.signal(epoch)

    def device_pointers(self) -> tuple[list[list[int]], list[list[int]]]:
        pointer = self._arena.device_pointer
        return (
            [[pointer(place) for place in row] for row in self._places_out],
            [[pointer(place) for place in row] for row in self._places_in],
        )

    def free(self) -> None:
        self._link.close()


_STEPS = 2 * MOST_FRAGMENTS
"""Steps of the flag in one epoch: more than the fragments of any message."""


@dataclass(eq=False)
class Buffer:
    """Memory of one message, as an array or as mpi4py's buffer, with its GPU address if it has one."""

    memory: Any
    device_pointer: int = 0
    owner: object = None  # if ``memory`` does not keep it alive

    def close(self) -> None:
        self.memory = self.owner = None


def host_buffer(nbytes: int) -> Buffer:
    """Return ordinary host memory."""
    return Buffer(np.zeros(nbytes, np.uint8))


def pinned_buffer(nbytes: int) -> Buffer:
    """Return page-locked host memory that the GPU can read and write."""
    from halox.runtime.gpu.memory import pinned

    memory = pinned(nbytes)
    return Buffer(memory.array[:nbytes], int(memory.device_pointer))


class RequestBuffers(TransportBuffers):
    """Buffers that persistent MPI requests send, one request per fragment of a message.

    One slot: receives are started when this rank has read the last messages. MPI matches the fragments of a message in
    the order of their start, so that all fragments can share one tag.
    """

    slots = 1

    def __init__(
        self,
        world: World,
        sends: Sequence[Message],
        receives: Sequence[Message],
        mpi_tag: Callable[[Message], int],
        allocate: Callable[[int], Buffer] = host_buffer,
        cut: Cutter = whole,
        leftovers: Leftovers | None = None,
    ) -> None:
        self._world, self._mpi_tag = world, mpi_tag
        self._leftovers = Leftovers(world.ranks) if leftovers is None else leftovers
        self._buffers_out = [allocate(m.packed_bytes) for m in sends]
        self._buffers_in = [allocate(m.packed_bytes) for m in receives]
        self.outgoing, self.incoming = (
            [[b.memory for b in buffers if isinstance(b.memory, np.ndarray)]]
            for buffers in (self._buffers_out, self._buffers_in)
        )
        cut = within_counts(cut)
        self.outgoing_ends, self.incoming_ends = [*map(cut, sends)], [*map(cut, receives)]
        self._peers: list[tuple[Prequest, int]] = []
        self._receiving = self._stages(
            world.comm.Recv_init, receives, self._buffers_in, self.incoming_ends
        )
        self._sending = self._stages(
            world.comm.Send_init, sends, self._buffers_out, self.outgoing_ends
        )
        self._requests = [request for request, _ in self._peers]
        keep_at_exit(self)

    def _stages(
        self,
        make: Callable[..., Prequest],
        messages: Sequence[Message],
        buffers: Sequence[Buffer],
        ends: Sequence[tuple[int, ...]],
    ) -> list[list[Prequest]]:
        stages: list[list[Prequest]] = [[] for _ in range(max(map(len, ends), default=0))]
        for m, buffer, at in zip(messages, buffers, ends, strict=True):
            for requests, (start, end) in zip(stages, pairwise((0, *at)), strict=False):
                requests.append(make(buffer.memory[start:end], m.peer, self._mpi_tag(m)))
                self._peers.append((requests[-1], m.peer))
        return stages

    def post(self, epoch: int) -> None:
        if self.stages_out <= 1 and self.stages_in <= 1:
            self._world.mpi.Prequest.Startall(self._requests)
            return
        # Startall may start requests in any order, but fragments of one message must be started in sequence.
        self.expect(epoch)
        for stage in range(self.stages_out):
            self.post_stage(epoch, stage)

    def expect(self, epoch: int) -> None:
        for stage in self._receiving:
            self._world.mpi.Prequest.Startall(stage)

    def post_stage(self, epoch: int, stage: int) -> None:
        self._world.mpi.Prequest.Startall(self._sending[stage])

    def arrived(self, epoch: int, stage: int) -> bool:
        return bool(self._world.mpi.Request.Testall(self._receiving[stage]))

    def collect(self, epoch: int) -> None:
        self._world.wait(
            self._requests,
            lambda: f"for messages with ranks {self.awaited(epoch)}",
            lambda: self.awaited(epoch),
        )

    def complete(self, epoch: int) -> None:
        """Wait for the sends, too."""
        self.collect(epoch)

    def awaited(self, epoch: int) -> list[int]:
        return sorted({peer for request, peer in self._peers if not request.Test()})

    def device_pointers(self) -> tuple[list[list[int]], list[list[int]]]:
        outgoing, incoming = (
            [b.device_pointer for b in row] for row in (self._buffers_out, self._buffers_in)
        )
        return [outgoing], [incoming]

    def close(self) -> None:
        """Free the requests and the buffers; active requests and their buffers are freed when complete."""
        receives, sends = ([*chain(*stages)] for stages in (self._receiving, self._sending))
        buffers = [*self._buffers_out, *self._buffers_in]
        self._requests, self._receiving, self._sending, self._peers = [], [], [], []
        self._buffers_out, self._buffers_in = [], []
        self._leftovers.keep(receives, sends, buffers)
