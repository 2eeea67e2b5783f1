"""The ``ipc`` path: arrays on GPUs, in memory that the ranks of a node map; events order the streams.

The path serves ranks with kernels that cannot wait for one another: ranks that share a GPU run on it alternately, and
so every wait of the host for the GPU is long. On this path the host never waits for the GPU. It records an interprocess
event behind a kernel and signals a flag in the node's shared memory, which says only that the event *has been
recorded*. The peer's host sees the flag and makes its stream wait for the event. After Wu et al. 2016, section 4.1,
with flags in place of the active messages::

    A: pack -> B's staging memory, packed |
    B:                                    | waits for packed, unpacks

The receiver owns the staging memory: stores to another GPU are a little faster than loads from it, and only the
receiver reads its contents. Staging memory has two slots; epoch e uses slot e % 2, and each slot has separate events.
Slot and events must be free for epoch e + 2. That needs no additional message if the receiver sends a message back.
Proof: A waits in epoch e + 1 for the "packed" that B recorded behind its unpacking of epoch e, and packs e + 2 behind
that wait. A's host had seen the flag of that event, and B's host signalled the flag after it had made its stream wait
for A's event of epoch e. If B sends nothing back, B records "consumed" behind its unpacking, and A waits for the
"consumed" of epoch e before it packs e + 2. Streams keep all this in order. If the caller uses another stream than
before, halox orders it behind the previous stream.

The GPUs cannot deadlock: a stream waits only for events that have already been recorded. Every piece of work therefore
depends only on work that was handed to a GPU earlier, however streams share the hardware's queues. The hosts cannot
deadlock either: `start` waits at most for the exchange before the last one, and `finish` for steps that peers take in
`start`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halox.paths.base import (
    Build,
    Candidate,
    ChannelMessages,
    Job,
    Key,
    MessageEnds,
    Path,
    Protocol,
)
from halox.paths.costs import ProtocolCost
from halox.paths.launches import (
    Item,
    MovableChannel,
    clearing_of,
    packed_items,
    packing,
    unpacking,
)
from halox.paths.messages import Message
from halox.paths.node import NodeLink
from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.ipc_events import EventPool
from halox.runtime.gpu.streams import CallStreams
from halox.runtime.handshake import connect
from halox.runtime.segments import Block, Place, SegmentKey
from halox.runtime.topology import Topology
from halox.runtime.world import World
from halox.values import rounded_up

_SLOTS = 2
_ALIGNMENT = 256
PACKED, CONSUMED = "packed", "consumed"
"""Events that peers wait for, and their flags."""


class IpcPath(Path):
    """Moves arrays between GPUs, or within one GPU, in memory that the ranks of a node map."""

    name = "ipc"
    protocols = (
        # Kernels, ordered by the host with events and host flags. Processes that share a GPU run on it alternately, a
        # quarter of a millisecond each.
        Protocol(
            "staging",
            ProtocolCost(19.0, 4.0, (165.0, 220.0, 280.0, 320.0)),
            ProtocolCost(260.0, 4.0, (100.0, 250.0, 500.0, 600.0)),
            fallback="staged/mpi",
        ),
    )
    summary = "between ranks that map one another's memory, also of one GPU; see `halox info --paths -n N`"

    def candidates(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        why = ends.why_not_gpus(Topology.why_no_events)
        return why or [self.candidate("staging", "mapped memory, streams ordered by events")]

    def negotiate(self, build: Build) -> IpcChannel | None:
        context, memory = build.context, None
        if context.device_arena is not None and context.events is not None:
            memory = context.device_arena, context.events
        return make_ipc_channel(build.world, build.job(self), memory, build.links.get(self.name))

    def channels(self, build: Build, agreed: IpcChannel) -> Sequence[ChannelMessages]:
        return [ChannelMessages(self.name, agreed, agreed.messages)]


@dataclass(frozen=True)
class IpcRecord:
    """Description of a rank's staging memory and events for its peers, with the handles of both."""

    places: Mapping[Key, Sequence[Place]]  # of received messages, by slot
    segments: Mapping[SegmentKey, bytes]
    events: Mapping[str, tuple[int, ...]]  # numbers, by slot
    handles: dict[int, bytes]


class IpcChannel(MovableChannel):
    """Moves arrays on this rank's GPU through staging memory that the ranks of a node map; see the module.

    It is made in two steps: the peers swap each `record`, and each peer opens the records of its peers with `open`.

    Local. Kernels wait on the stream for the peers' kernels; the host waits only for the peers' hosts. Cannot be
    captured.
    """

    timeline = (
        ("start", "pack"),
        ("_consumed.wait", "wait"),
        ("finish", "wait and unpack"),
    )

    def __init__(self, job: Job, arena: DeviceArena, events: EventPool, link: NodeLink) -> None:
        self._job, self._arena, self._events, self._link = job, arena, events, link
        self._world, self.messages, self._epoch = link.world, job.messages, 0
        targets, sources = ({m.peer for m in some} for some in (job.sends, job.receives))
        # Peers for whose events this rank waits, and peers that wait for its own.
        self._waits = {PACKED: sorted(sources), CONSUMED: sorted(targets - sources)}
        waiting = {PACKED: targets, CONSUMED: sources - targets}
        self._packed, self._consumed = (
            link.flag(sign, peers) for sign, peers in self._waits.items()
        )
        signs = [sign for sign, peers in waiting.items() if peers]
        self._block: Block | None = None
        places = self._staging()
        self._numbers = events.acquire(_SLOTS * len(signs))
        numbers = iter(self._numbers)
        self.record = IpcRecord(
            places,
            arena.handles([place for slots in places.values() for place in slots]),
            {sign: tuple(next(numbers) for _ in range(_SLOTS)) for sign in signs},
            events.handles(self._numbers),
        )
        self._streams = CallStreams("ipc")

    def _staging(self) -> dict[Key, Sequence[Place]]:
        """Allocate both slots, and return the places of the received messages in them."""
        offsets, end = [], 0
        for message in self._job.receives:
            offsets.append(end)
            end += rounded_up(message.packed_bytes, _ALIGNMENT)
        if not offsets:
            return {}
        self._block = self._arena.allocate(_SLOTS * end)
        at = self._block.place.at
        return {
            message.key: [at(slot * end + offset) for slot in range(_SLOTS)]
            for message, offset in zip(self._job.receives, offsets, strict=True)
        }

    def open(self, records: Mapping[int, IpcRecord]) -> IpcChannel:
        """Map the peers' memory and events, make the launches, and return the channel."""
        for rank, record in records.items():
            self._arena.open(record.segments)
            self._events.open(rank, record.handles)
        runtime = cupy().cuda.runtime
        self._record_event, self._wait_event = runtime.eventRecord, runtime.streamWaitEvent
        # By sign and slot: this rank's event, and the peers' events for which it waits.
        self._own = {
            sign: [*map(self._events.own, numbers)] for sign, numbers in self.record.events.items()
        }
        self._theirs = {
            sign: [
                [self._events.opened(peer, records[peer].events[sign][slot]) for peer in peers]
                for slot in range(_SLOTS)
            ]
            for sign, peers in self._waits.items()
        }
        job, rank, device = self._job, self._world.rank, self._arena.device
        outgoing = [records[m.peer].places["receive", rank, m.tag] for m in job.sends]
        incoming = [self.record.places[m.key] for m in job.receives]
        self._packs = [
            packing(job, self._items(job.sends, outgoing, slot), device) for slot in range(_SLOTS)
        ]
        self._unpacks = [
            unpacking(job, self._items(job.receives, incoming, slot), device)
            for slot in range(_SLOTS)
        ]
        self._clear = clearing_of(job, device)
        self._movable = [*self._packs, *self._unpacks, *self._clear]
        return self

    def _items(
        self, messages: Sequence[Message], places: Sequence[Sequence[Place]], slot: int
    ) -> list[Item]:
        """Pair each part with the address, in this process, of its packed bytes."""
        return packed_items(messages, [self._arena.pointer(slots[slot]) for slots in places])

    def check(self) -> None:
        self._streams.check()

    def start(self) -> None:
        stream = self._streams.enter()
        self._epoch = epoch = self._epoch + 1
        if epoch > _SLOTS:
            self._consumed.wait(epoch - _SLOTS)
            self._wait(CONSUMED, stream)
        self._packs[epoch % _SLOTS].launch(stream)
        self._record(PACKED, stream)
        self._packed.signal(epoch)
        for clear in self._clear:
            clear.launch(stream)

    def finish(self) -> None:
        """Put the unpacking on the current stream."""
        stream, epoch = self._streams.enter(), self._epoch
        self._packed.wait(epoch)
        self._wait(PACKED, stream)
        self._unpacks[epoch % _SLOTS].launch(stream)
        self._record(CONSUMED, stream)
        self._consumed.signal(epoch)

    def _record(self, sign: str, stream: int) -> None:
        """Record this rank's event of a sign, if any peer waits for it."""
        if sign in self._own:
            self._record_event(self._own[sign][self._epoch % _SLOTS], stream)

    def _wait(self, sign: str, stream: int) -> None:
        """Make the stream wait for the peers' events of a sign, which have been recorded."""
        for event in self._theirs[sign][self._epoch % _SLOTS]:
            self._wait_event(stream, event)

    def close(self) -> None:
        """Wait until the stream has finished with the memory, which stays unchanged for the peers.

        If a stream does not end within ``HALOX_TIMEOUT``, its memory is never used again.
        """
        if self.has_ended:
            self.has_ended = self._streams.end(self._world.waiter())

    def free(self) -> None:
        if self._block is not None:
            self._arena.release(self._block)
            self._block = None
        self._events.release(self._numbers)
        self._numbers = []
        self._link.close()

    abandon = free


def make_ipc_channel(
    world: World,
    job: Job,
    memory: tuple[DeviceArena, EventPool] | None,
    link: NodeLink | None,
) -> IpcChannel | None:
    """Make the channel of a plan's `ipc` messages together with the peers; collective over the world."""

    def begin() -> IpcChannel:
        assert memory is not None and link is not None
        return IpcChannel(job, *memory, link)

    def records(channel: IpcChannel) -> Mapping[int, IpcRecord]:
        return dict.fromkeys(job.peers, channel.record)

    return connect(world, job.peers, begin, records, IpcChannel.open)
