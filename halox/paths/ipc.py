"""The ``ipc`` path: arrays on GPUs, in memory that the ranks of a node map; events order the streams.

The path serves ranks with kernels that cannot wait for one another: ranks that share a GPU run on it alternately, and
so every wait of the host for the GPU is long. On this path the host never waits for the GPU. It records an interprocess
event behind a kernel and signals a flag in the node's shared memory, which says only that the event *has been
recorded*. The peer's host sees the flag and makes its stream wait for the event. After Wu et al. 2016, section 4.1,
with flags in place of the active messages. There are three protocols::

    "staging"  A: pack -> B's staging memory, packed |
               B:                                    | waits for packed, unpacks
    "put"      B: ready |                                                        B's part is contiguous:
               A:       | waits for ready, packs -> B's array, moved |           packed straight into place
               B:                                                    | waits for moved
    "get"      A: ready |                                                        A's part is contiguous:
               B:       | waits for ready, unpacks <- A's array, moved |         unpacked straight from there
               A:                                                      | waits for moved

"put" and "get", the shortcuts, move the bytes only once, but add one handover from rank to rank, as all exchanges do in
which a rank accesses a peer's array in place (`halox.paths.in_place`). All waits of a rank in epoch e::

    start   before it packs               the "consumed" of epoch e - 2     of receivers that send nothing back
    finish  before it moves in place      the "ready" of epoch e            of peers whose arrays it accesses
            before it unpacks fragment k  the "packed k" of epoch e         of senders with such a fragment
            at the end                    the "moved" of epoch e            of peers that access its arrays

The receiver owns the staging memory: stores to another GPU are a little faster than loads from it, and only the
receiver reads its contents. Staging memory has two slots; epoch e uses slot e % 2, and each slot has separate events.
Slot and events must be free for epoch e + 2. That needs no additional message if the sender waits for any event of the
receiver in every exchange, because a message travels back or because a shortcut is taken between the two ranks. Proof:
A waits in epoch e + 1 for an event that B recorded behind its unpacking of epoch e, and packs e + 2 behind that wait.
A's host had seen the flag of that event, and B's host signalled the flag after it had made its stream wait for A's
event of epoch e. If A waits for no other event of B, B records "consumed" behind its unpacking, and A waits for the
"consumed" of epoch e before it packs e + 2. Streams keep all this in order. If the caller uses another stream than
before, halox orders it behind the previous stream.

The GPUs cannot deadlock: a stream waits only for events that have already been recorded. Every piece of work therefore
depends only on work that was handed to a GPU earlier, however streams share the hardware's queues. The hosts cannot
deadlock either: `start` waits at most for the exchange before the last one. In `finish` a rank waits for steps that
peers take in `start`, then takes its own step, and then waits for the peers' steps; if a peer waits in another exchange
meanwhile, it takes its step there.

Large messages in one direction between two GPUs are cut into fragments, each with a separate event and count of the
flag: fragment k + 1 is packed while fragment k is unpacked. Between ranks that send in both directions, fragments would
only cost launches, since a stream packs all its messages before it unpacks any. The same holds on one GPU, where all
work runs in sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
from halox.paths.fragments import MOST_FRAGMENTS, Cutter, ends_of, senders_by_stage, whole
from halox.paths.in_place import InPlaceChannel
from halox.paths.launches import (
    ArrayLaunches,
    Item,
    MovableChannel,
    clearing_of,
    fragmented,
    items_of,
    packing,
    unpacking,
)
from halox.paths.messages import Addressed, Message, located
from halox.paths.node import NodeLink
from halox.runtime.arrays import Described
from halox.runtime.context import Context
from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.ipc_events import EventPool
from halox.runtime.gpu.streams import CallStreams
from halox.runtime.handshake import connect
from halox.runtime.segments import Block, Place, SegmentKey
from halox.runtime.topology import Topology
from halox.runtime.waiting import STARTED_STEPS
from halox.runtime.world import World
from halox.values import rounded_up

Sign = str | int
"""An event that peers wait for: `READY`, `MOVED` or `CONSUMED`, or a fragment's number, for the end of its packing."""

SlotPlaces = tuple[tuple[Place, ...], ...]
"""Places of the packed parts of a message, by slot."""

FRAGMENT_BYTES = 4 << 20
"""Smallest fragment between two GPUs, in bytes: at 400 GB/s it takes 10 us, twice the cost of a fragment."""

_SLOTS = 2
_ALIGNMENT = 256
READY, MOVED, CONSUMED = "ready", "moved", "consumed"


class IpcPath(Path):
    """Moves arrays between GPUs, or within one GPU, in memory that the ranks of a node map."""

    name = "ipc"
    protocols = (
        # Kernels and copies, ordered by the host with events and host flags. Processes that share a GPU run on it
        # alternately, a quarter of a millisecond each.
        Protocol(
            "staging",
            ProtocolCost(19.0, 4.0, (165.0, 220.0, 280.0, 320.0)),
            ProtocolCost(260.0, 4.0, (100.0, 250.0, 500.0, 600.0)),
            fallback="staged/mpi",
        ),
        *(
            Protocol(
                name,
                ProtocolCost(24.0, 4.0, (120.0, 220.0, 300.0, 315.0)),
                ProtocolCost(390.0, 4.0, (120.0, 300.0, 700.0, 900.0)),
                fallback="staged/mpi",
                in_field=True,
            )
            for name in ("put", "get")
        ),
    )
    summary = "between ranks that map one another's memory, also of one GPU; see `halox info --paths -n N`"

    def describe(
        self, message: Message, arrays: Sequence[Described], context: Context, *, relocatable: bool
    ) -> bool | None:
        """Return True if the message is contiguous in memory that peers can map, else None."""
        if context.device_arena is None or relocatable:
            return None
        return contiguous_places(message, arrays, context.device_arena) is not None or None

    def candidates(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        """Offer staging memory, and direct access to a contiguous array of the receiver or the sender."""
        why = ends.why_not_gpus(Topology.why_no_events)
        if why is not None:
            return why
        offers = [self.candidate("staging", "mapped memory, streams ordered by events")]
        can_send, can_receive = ends.described(self)
        if ends.selection.operation == "copy" and can_receive:
            why = "mapped memory, packed straight into the receiver's contiguous array"
            offers.append(self.candidate("put", why))
        if ends.selection.operation == "copy" and can_send:
            why = "mapped memory, unpacked straight from the sender's contiguous array"
            offers.append(self.candidate("get", why))
        return offers

    def negotiate(self, build: Build) -> IpcChannel | None:
        context, link, job = build.context, build.links.get(self.name), build.job(self)
        memory = None
        if context.device_arena is not None and context.events is not None:
            memory = context.device_arena, context.events
        sharers = context.topology.sharers(build.world.rank) if context.topology is not None else ()
        cut = one_way_cutter(job, sharers)
        return make_ipc_channel(build.world, job, build.protocols(job), memory, link, cut)

    def channels(self, build: Build, agreed: IpcChannel) -> Sequence[ChannelMessages]:
        return [ChannelMessages(self.name, agreed, agreed.messages)]


def contiguous_places(
    message: Message, arrays: Sequence[Addressed], arena: DeviceArena
) -> tuple[Place, ...] | None:
    """Return the addresses of a message's parts; None unless each part is contiguous and in the arena.

    If the receiver has places, the sender may put the message there. If the sender has places, the receiver may get the
    message from there. Neither is possible in accumulations.
    """
    if any(part.strided is None or part.strided.counts for part in message.parts):
        return None
    located_parts = located(message, arrays, arena.locate)
    if located_parts is None or located_parts.places is None:
        return None
    pairs = zip(located_parts.places, located_parts.layouts, strict=True)
    return tuple(place.at(layout.offset) for place, layout in pairs)


def one_way_cutter(
    job: Job, sharers: Collection[int], fragment_bytes: int = FRAGMENT_BYTES
) -> Cutter:
    """Return the function that cuts the messages of a job if fragments are profitable; the same at both ends."""
    both_ways = job.both_ways

    def cut(message: Message) -> tuple[int, ...]:
        if message.peer in both_ways or message.peer in sharers or job.operation == "add":
            return whole(message)
        return ends_of(message.packed_bytes, fragment_bytes)

    return cut


@dataclass(frozen=True)
class IpcRecord:
    """Description of a rank's memory and events for its peers, with the handles of both."""

    places: Mapping[Key, SlotPlaces]  # of messages with packed bytes in this rank's memory
    segments: Mapping[SegmentKey, bytes]
    events: Mapping[Sign, tuple[int, ...]]  # numbers, by slot
    handles: dict[int, bytes]


class IpcChannel(InPlaceChannel, MovableChannel):
    """Moves arrays on this rank's GPU to and from memory that it shares with its peers; see the module.

    The channel can move to other arrays unless peers write this rank's arrays, or read them.

    It is made in two steps: the peers swap each `record`, and each peer opens the records of its peers with `open`.

    Local. Kernels wait on the stream for the peers' kernels; the host waits only for the peers' hosts. Cannot be
    captured.
    """

    def __init__(
        self,
        job: Job,
        protocols: Mapping[Key, str],
        arena: DeviceArena,
        events: EventPool,
        link: NodeLink,
        cut: Cutter = whole,
    ) -> None:
        self._job, self._arena, self._events = job, arena, events
        self.messages = job.messages
        self._cut = whole if job.operation == "add" else cut
        self._sends, self._receives = (
            {
                name: tuple(m for m in messages if protocols[m.key] == name)
                for name in ("staging", "put", "get")
            }
            for messages in (job.sends, job.receives)
        )
        sends, receives = self._sends, self._receives
        accessed = _peers(sends["put"]) | _peers(receives["get"])
        accessing = _peers(receives["put"]) | _peers(sends["get"])
        super().__init__(link, sorted(accessed), sorted(accessing))
        self.is_movable = not accessed and not accessing
        incoming = receives["staging"]
        senders = senders_by_stage(incoming, [*map(self._cut, incoming)])
        # The table of all waits in the module: peers for whose events this rank waits, and peers that wait for its own.
        self._waits: dict[Sign, list[int]] = {
            CONSUMED: sorted(_one_way(sends, job.receives)),
            READY: sorted(accessed),
            MOVED: sorted(accessing),
            **dict(enumerate(senders)),
        }
        waiting: dict[Sign, Collection[int]] = {
            CONSUMED: _one_way(receives, job.sends),
            READY: accessing,
            MOVED: accessed,
        }
        self._consumed = link.flag("consumed", self._waits[CONSUMED])
        self._incoming = [link.flag("packed", peers) for peers in senders]
        self._packed = link.flag("packed", ())
        self._fragments = max((len(self._cut(m)) for m in sends["staging"]), default=0)
        signs = [*range(self._fragments), *(sign for sign, peers in waiting.items() if peers)]
        self._block: Block | None = None
        places = self._staging()
        for message in (*receives["put"], *sends["get"]):
            in_array = contiguous_places(message, job.arrays, arena)
            assert in_array is not None, (
                "a short cut to an array that is not contiguous in the arena"
            )
            places[message.key] = (in_array,) * _SLOTS
        self._numbers = events.acquire(_SLOTS * len(signs))
        numbers = iter(self._numbers)
        self.record = IpcRecord(
            places,
            arena.handles(place for slots in places.values() for row in slots for place in row),
            {sign: tuple(next(numbers) for _ in range(_SLOTS)) for sign in signs},
            events.handles(self._numbers),
        )
        self._records: Mapping[int, IpcRecord] = {}
        self._stream = 0
        self._streams = CallStreams("ipc")

    def _staging(self) -> dict[Key, SlotPlaces]:
        """Allocate both slots, and return the places of the messages' parts in them."""
        offsets, end = [], 0
        for message in self._receives["staging"]:
            offsets.append(end)
            end += rounded_up(message.packed_bytes, _ALIGNMENT)
        if not offsets:
            return {}
        self._block = self._arena.allocate(_SLOTS * end)
        at = self._block.place.at
        return {
            message.key: tuple(
                tuple(at(slot * end + offset + part) for part in message.offsets)
                for slot in range(_SLOTS)
            )
            for message, offset in zip(self._receives["staging"], offsets, strict=True)
        }

    def open(self, records: Mapping[int, IpcRecord]) -> IpcChannel:
        """Map the peers' memory and events, and return the channel."""
        self._records = records
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
        self._make_launches()
        return self

    def _make_launches(self) -> None:
        job, device = self._job, self._arena.device
        staging, put = self._sends["staging"], self._sends["put"]
        incoming = (*self._receives["staging"], *self._receives["get"])
        slots = range(_SLOTS)

        def cut(
            messages: Sequence[Message], slot: int, stages: int, *, unpack: bool
        ) -> ArrayLaunches:
            items, ends = self._items(messages, slot), [*map(self._cut, messages)]
            return fragmented(job, items, messages, ends, stages, device, unpack=unpack)

        self._packs = [cut(staging, slot, self._fragments, unpack=False) for slot in slots]
        stages = max(len(self._incoming), 1) if incoming else 0
        self._unpacks = [
            unpacking(job, self._items(incoming, slot), device)
            if job.operation == "add" and incoming
            else cut(incoming, slot, stages, unpack=True)
            for slot in slots
        ]
        self._put = packing(job, self._items(put, 0), device) if put else None
        self._clear = clearing_of(job, device)
        self._movable = [*self._packs, *self._unpacks, *self._clear]

    def _items(self, messages: Sequence[Message], slot: int) -> list[Item]:
        """Pair each part with the address, in this process, of its packed bytes."""
        pointer = self._arena.pointer
        addresses = [map(pointer, self._places(message)[slot]) for message in messages]
        return items_of(messages, addresses)

    def _places(self, message: Message) -> SlotPlaces:
        """Return by slot the places of a message's packed bytes, from the record of the end that has them."""
        own = self.record.places.get(message.key)
        if own is not None:
            return own
        direction, tag = message.opposite
        return self._records[message.peer].places[direction, self._world.rank, tag]

    def check(self) -> None:
        self._streams.check()

    def run(self) -> None:
        self._stream = stream = self._streams.enter()
        epoch = self._epoch + 1
        self._record(READY, epoch)
        super().run()
        if epoch > _SLOTS:
            self._consumed.wait(epoch - _SLOTS)
            self._wait(CONSUMED, epoch)
        for fragment, stage in enumerate(self._packs[epoch % _SLOTS].stages):
            stage(stream)
            self._record(fragment, epoch)
            self._packed.signal(_count(epoch, fragment))
        for clear in self._clear:
            clear.launch(stream)

    def finish(self) -> None:
        """Put the unpacking on the current stream, and the kernels and waits of "put" and "get"."""
        self._stream = self._streams.enter()
        super().finish()
        self._wait(MOVED, self._epoch)

    def _move(self) -> None:
        """Put to the peers' arrays, and unpack from the staging memory and the peers' arrays."""
        stream, epoch = self._stream, self._epoch
        self._wait(READY, epoch)
        if self._put is not None:
            self._put.launch(stream)
        for fragment, stage in enumerate(self._unpacks[epoch % _SLOTS].stages):
            if self._incoming:  # not if all messages are read from the senders' arrays
                self._incoming[fragment].wait(_count(epoch, fragment))
                self._wait(fragment, epoch)
            stage(stream)
        self._record(MOVED, epoch)
        if CONSUMED in self._own:
            self._record(CONSUMED, epoch)
            self._consumed.signal(epoch)

    def _help(self) -> None:
        """Move while this rank waits in another exchange, if that takes no wait."""
        if all(flag.passed(_count(self._epoch, k)) for k, flag in enumerate(self._incoming)):
            with cupy().cuda.Device(self._arena.device):
                super()._help()

    def _record(self, sign: Sign, epoch: int) -> None:
        """Record this rank's event of a sign, if any peer waits for it."""
        if sign in self._own:
            self._record_event(self._own[sign][epoch % _SLOTS], self._stream)

    def _wait(self, sign: Sign, epoch: int) -> None:
        """Make the stream wait for the peers' events of a sign, which have been recorded."""
        for event in self._theirs[sign][epoch % _SLOTS]:
            self._wait_event(self._stream, event)

    def close(self) -> None:
        """Wait until the stream has finished with the memory, which stays unchanged for the peers.

        If a stream does not end within ``HALOX_TIMEOUT``, its memory is never used again.
        """
        STARTED_STEPS.pop(self, None)
        if self.has_ended:
            self.has_ended = self._streams.end(self._world.waiter())

    def free(self) -> None:
        if self._block is not None:
            self._arena.release(self._block)
            self._block = None
        self._events.release(self._numbers)
        self._numbers = []
        super().free()

    abandon = free


def make_ipc_channel(
    world: World,
    job: Job,
    protocols: Mapping[Key, str],
    memory: tuple[DeviceArena, EventPool] | None,
    link: NodeLink | None,
    cut: Cutter = whole,
) -> IpcChannel | None:
    """Make the channel of a plan's `ipc` messages together with the peers; collective over the world."""

    def begin() -> IpcChannel:
        assert memory is not None and link is not None
        return IpcChannel(job, protocols, *memory, link, cut)

    def records(channel: IpcChannel) -> Mapping[int, IpcRecord]:
        return dict.fromkeys(job.peers, channel.record)

    return connect(world, job.peers, begin, records, IpcChannel.open)


def _count(epoch: int, fragment: int) -> int:
    """Return the count of the flag "packed" when a fragment has been packed."""
    return (epoch - 1) * MOST_FRAGMENTS + fragment + 1


def _peers(messages: Sequence[Message]) -> set[int]:
    return {m.peer for m in messages}


def _one_way(messages: Mapping[str, Sequence[Message]], others: Sequence[Message]) -> set[int]:
    """Return the peers with "staging" as the only protocol, and without a message in the opposite direction."""
    shortcut = _peers(messages["put"]) | _peers(messages["get"])
    return _peers(messages["staging"]) - _peers(others) - shortcut
