"""The ``ipc`` path: arrays on GPUs whose memory the ranks of a node map, their streams ordered by events.

For ranks whose kernels cannot wait for one another: those that share a GPU take turns on it, and so does every wait
of the host for the GPU. Here the host never waits for the GPU. It records an interprocess event behind a kernel and
raises a flag in the node's shared memory, which says only that the event *has been recorded*; the peer's host sees
the flag and makes its stream wait for the event. After Wu et al. 2016, section 4.1, with the flags in place of the
active messages. There are three protocols::

    "staging"  A: pack -> B's staging memory, packed |
               B:                                    | waits for packed, unpacks
    "put"      B: ready |                                                        B's part is contiguous:
               A:       | waits for ready, packs -> B's array, packed |        packed straight into place
               B:                                                     | waits for packed
    "get"      A: ready |                                                        A's part is contiguous:
               B:       | waits for ready, unpacks <- A's array, consumed |    unpacked straight from there
               A:                                                         | waits for consumed

The short cuts move the bytes once, and take one turn more.

Staging memory is the receiver's: stores to another GPU are a little faster than loads from it, and what has been
written there is known to the receiver alone. It has two slots, and epoch e uses slot e % 2, with events of its own.
Slot and events are free for epoch e + 2 without a message for it wherever the sender waits for any event of the
receiver in every exchange, because something comes back or because a short cut is taken between the two. For A waits
in epoch e + 1 for an event that B recorded behind its unpacking of epoch e, and packs e + 2 behind that wait; and A's
host had seen the flag of that event, which B's host raised after it had made its stream wait for A's event of epoch
e. Where A waits for nothing else, B records "consumed" behind its unpacking, and A waits for that of epoch e before it
packs e + 2. Streams keep all this in order, and where the caller uses another stream than the last time, it is
ordered behind the last one.

The GPUs cannot deadlock: a stream is made to wait only for what has been recorded by then, so that every piece of
work stands behind others that were handed to a GPU before it, however streams share the hardware's queues. Nor can
the hosts: `start` waits at most for the exchange before the last one, and each wait of `finish` is for what peers do
in `start`, or in `finish` before they wait for anything that comes later in it.

Large messages that go one way between two GPUs are cut into fragments, each with its event and count of the flag:
fragment k + 1 is packed while fragment k is unpacked. Between ranks that send both ways a stream packs all it sends
before it unpacks anything, and on one GPU everything takes turns: fragments would only cost launches there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from halox.errors import ExchangeTimeoutError
from halox.paths.base import (
    Candidate,
    Carried,
    Channel,
    EndpointInfo,
    Job,
    Key,
    Path,
    Protocol,
    SelectionContext,
    why_not_gpus,
)
from halox.paths.build import Build
from halox.paths.costs import ProtocolCost
from halox.paths.fragments import MOST_FRAGMENTS, Cutter, ends_of, whole
from halox.paths.launches import clearing_of, fragmented, moves_of
from halox.paths.messages import Message, located
from halox.paths.node import Flag, NodeLink
from halox.runtime.device_arena import Allocation, DeviceArena, DevicePlace
from halox.runtime.gpu.ipc_events import EventPool
from halox.runtime.gpu.streams import refuse_capture
from halox.runtime.handshake import handshake
from halox.runtime.topology import Topology
from halox.runtime.world import World

if TYPE_CHECKING:
    from halox.packing.device import Move
    from halox.runtime.arrays import Described
    from halox.runtime.context import Context

SignalKey = tuple[str, int]
"""Name of the flag that goes with an event, and the event's number among the counts of that flag in one epoch."""

FRAGMENT_BYTES = 4 << 20
"""Least bytes of a fragment between two GPUs: at some 400 GB/s it takes twice the 5 us that a fragment costs."""

_SLOTS = 2
_ALIGNMENT = 256
_COUNTS = MOST_FRAGMENTS + 1  # of a flag in one epoch
_READY: SignalKey = ("ready", 0)
_CONSUMED: SignalKey = ("consumed", 0)
_WRITTEN: SignalKey = ("packed", MOST_FRAGMENTS)


class IpcPath(Path):
    """Moves arrays between GPUs whose memory ranks of a node map, the same GPU included."""

    name = "ipc"
    protocols = (
        # Kernels and copies ordered by the host, events and host flags. Processes that share a GPU take turns of it,
        # a quarter of a millisecond each.
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
                former=former,
            )
            for name, former in (("put", "into"), ("get", "from"))
        ),
    )
    summary = "between ranks that map one another's memory, also of one GPU; see `halox info --paths -n N`"

    def describe(
        self, message: Message, arrays: Sequence[Described], context: Context
    ) -> bool | None:
        """Say that the message is contiguous in memory that peers can map."""
        if context.device_arena is None or arrays[message.parts[0].array].device is None:
            return None
        return contiguous_places(message, arrays, context.device_arena) is not None or None

    def candidates(
        self, sender: EndpointInfo, receiver: EndpointInfo, selection: SelectionContext
    ) -> Sequence[Candidate] | str:
        """Offer to go by staging memory, or straight to or from a contiguous array."""
        why = why_not_gpus(sender, receiver, selection, Topology.why_no_events)
        if why is not None:
            return why
        found = [self.offer("staging", "mapped memory, streams ordered by events")]
        if selection.operation == "copy" and self.name in receiver.paths:
            why = "mapped memory, packed straight into the receiver's contiguous array"
            found.append(self.offer("put", why))
        if selection.operation == "copy" and self.name in sender.paths:
            why = "mapped memory, unpacked straight from the sender's contiguous array"
            found.append(self.offer("get", why))
        return found

    def negotiate(self, build: Build) -> IpcChannel | None:
        """Swap memory and events with the peers."""
        context, link, job = build.context, build.link(self), build.job(self)
        memory = None
        if context.device_arena is not None and context.events is not None:
            memory = context.device_arena, context.events
        sharers = context.topology.sharers(build.world.rank) if context.topology is not None else ()
        cut = one_way_cutter(job, sharers)
        return make_ipc_channel(build.world, job, build.protocols(job), memory, link, cut)

    def channels(self, build: Build, agreed: IpcChannel | None) -> Sequence[Carried]:
        """Return the channel that was agreed on."""
        return [Carried(self.name, agreed, agreed.messages)] if agreed else []


def _packed(fragment: int) -> SignalKey:
    return "packed", fragment


def contiguous_places(
    message: Message, arrays: Sequence[Any], arena: DeviceArena
) -> tuple[DevicePlace, ...] | None:
    """Return the addresses of a message's parts, None unless each is contiguous and in the arena.

    Where the receiver has places a message may be put there, where the sender has, it may be got from there; not in
    accumulations.
    """
    found = located(message, arrays, arena.locate)
    if found is None or any(layout.counts for layout in found[1]):
        return None
    return tuple(place.at(layout.offset) for place, layout in zip(*found, strict=True))


def one_way_cutter(
    job: Job, sharers: Collection[int], fragment_bytes: int = FRAGMENT_BYTES
) -> Cutter:
    """Return what cuts the messages of a job where fragments pay, alike on both ends."""
    both_ways = {m.peer for m in job.sends} & {m.peer for m in job.receives}

    def cut(message: Message) -> tuple[int, ...]:
        if message.peer in both_ways or message.peer in sharers or job.operation == "add":
            return whole(message)
        return ends_of(message.packed_bytes, fragment_bytes)

    return cut


@dataclass(frozen=True)
class IpcRecord:
    """Description of a rank's memory and events for its peers.

    Attributes
    ----------
    places : mapping
        For each message whose packed bytes are in this rank's memory, by slot, where those of each part do.
    segments : mapping
        Handles of the memory named there.
    events : mapping
        Number of this rank's event of each sign, by slot.
    handles : mapping
        Handles of the events.
    """

    places: Mapping[Key, tuple[tuple[DevicePlace, ...], ...]]
    segments: Mapping[Allocation, bytes]
    events: Mapping[SignalKey, tuple[int, ...]]
    handles: dict[int, bytes]


class IpcMemory:
    """One rank's end of the `ipc` messages of a plan: its staging memory and its events.

    Attributes
    ----------
    record : IpcRecord
        To be swapped with the peers before `IpcChannel` is made.
    peers : list of int
        The ranks to swap it with.

    Local.
    """

    def __init__(
        self,
        job: Job,
        protocols: Mapping[Key, str],
        arena: DeviceArena,
        events: EventPool,
        cut: Cutter = whole,
    ) -> None:
        self.job, self.arena, self.events = job, arena, events
        self.cut = whole if job.operation == "add" else cut
        self.sends, self.receives = (
            {
                name: tuple(m for m in messages if protocols[m.key] == name)
                for name in ("staging", "put", "get")
            }
            for messages in (job.sends, job.receives)
        )
        self.peers = job.peers
        # Those to which messages go by staging memory alone, and from which nothing comes.
        self.acknowledging = _peers(self.sends["staging"]).difference(
            _peers(job.receives), _peers(self.sends["put"]), _peers(self.sends["get"])
        )
        self.acknowledged = _peers(self.receives["staging"]).difference(
            _peers(job.sends), _peers(self.receives["put"]), _peers(self.receives["get"])
        )
        self.fragments = max((len(cut(m)) for m in self.sends["staging"]), default=0)
        self._block: Any = None
        places = self._staging()
        for message in (*self.receives["put"], *self.sends["get"]):
            found = contiguous_places(message, job.arrays, arena)
            if found is None:
                raise AssertionError("a short cut to an array that is not contiguous in the arena")
            places[message.key] = (found,) * _SLOTS
        signs = self._signs()
        self._numbers = events.take(_SLOTS * len(signs))
        numbers = iter(self._numbers)
        self.record = IpcRecord(
            places,
            arena.handles(place for slots in places.values() for row in slots for place in row),
            {sign: tuple(next(numbers) for _ in range(_SLOTS)) for sign in signs},
            events.handles(self._numbers),
        )

    def _staging(self) -> dict[Key, tuple[tuple[DevicePlace, ...], ...]]:
        """Allocate both slots, and return where in them the parts of the messages go."""
        offsets, end = [], 0
        for message in self.receives["staging"]:
            offsets.append(end)
            end += -(-message.packed_bytes // _ALIGNMENT) * _ALIGNMENT
        if not offsets:
            return {}
        self._block = self.arena.allocate(_SLOTS * end)
        at = self._block.place.at
        return {
            message.key: tuple(
                tuple(at(slot * end + offset + part) for part in message.offsets)
                for slot in range(_SLOTS)
            )
            for message, offset in zip(self.receives["staging"], offsets, strict=True)
        }

    def _signs(self) -> list[SignalKey]:
        """Return the signals that this rank gives."""
        signs = [_packed(fragment) for fragment in range(self.fragments)]
        if self.sends["put"]:
            signs.append(_WRITTEN)
        if self.receives["put"] or self.sends["get"]:
            signs.append(_READY)
        if self.receives["get"] or self.acknowledged:
            signs.append(_CONSUMED)
        return signs

    def abandon(self) -> None:
        """Give the memory and the events back; this rank's streams must have done with them."""
        if self._block is not None:
            self.arena.release(self._block)
            self._block = None
        self.events.release(self._numbers)
        self._numbers = []


class _Signal:
    """A signal that this rank gives, and for which it waits when some peers give it: an event and a flag each."""

    def __init__(
        self, number: int, flag: Flag, own: Sequence[int], theirs: Sequence[Sequence[int]]
    ) -> None:
        from halox.runtime.gpu.cuda import cupy

        runtime = cupy().cuda.runtime
        self._number, self._flag = number, flag
        self._own, self._theirs = own, theirs
        self._record, self._wait = runtime.eventRecord, runtime.streamWaitEvent

    def give(self, epoch: int, stream: int) -> None:
        """Record the slot's event and say so, if any peer waits for it."""
        if self._own:
            self._record(self._own[epoch % _SLOTS], stream)
            self._flag.signal(self._count(epoch))

    def wait(self, epoch: int, stream: int) -> None:
        """Make a stream wait for the peers' events, once they have been recorded."""
        self._flag.wait(self._count(epoch))
        for event in self._theirs[epoch % _SLOTS]:
            self._wait(stream, event)

    def _count(self, epoch: int) -> int:
        return (epoch - 1) * _COUNTS + self._number + 1


class IpcChannel(Channel):
    """Moves arrays on this rank's GPU to and from memory that it shares with its peers; see the module.

    Local. Kernels wait for the peers' on the stream; the host waits for the peers' hosts alone. Cannot be captured.
    """

    def __init__(self, memory: IpcMemory, records: Mapping[int, IpcRecord], link: NodeLink) -> None:
        from halox.runtime.gpu.cuda import cupy

        self._current_stream = cupy().cuda.get_current_stream
        self._memory, self._records, self._link = memory, records, link
        for rank, record in records.items():
            memory.arena.open(record.segments)
            memory.events.open(rank, record.handles)
        self._epoch = 0
        self._stream: Any = None
        with cupy().cuda.Device(memory.arena.device):
            self._last = cupy().cuda.Event(disable_timing=True)
        self._make_signals()
        self._make_launches()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages of the channel."""
        return self._memory.job.messages

    def _make_signals(self) -> None:
        sends, receives = self._memory.sends, self._memory.receives
        signal = self._signal
        self._packed = [signal(_packed(k), ()) for k in range(self._memory.fragments)]
        lengths = [(m.peer, len(self._memory.cut(m))) for m in receives["staging"]]
        self._come = [
            signal(_packed(k), {peer for peer, n in lengths if n > k})
            for k in range(max((n for _, n in lengths), default=0))
        ]
        self._ready = signal(_READY, ())
        self._may_write = signal(_READY, _peers(sends["put"]))
        self._may_read = signal(_READY, _peers(receives["get"]))
        self._written = signal(_WRITTEN, ())
        self._in_place = signal(_WRITTEN, _peers(receives["put"]))
        self._consumed = signal(_CONSUMED, ())
        self._acknowledged = signal(_CONSUMED, self._memory.acknowledging)
        self._taken = signal(_CONSUMED, _peers(sends["get"]))

    def _signal(self, sign: SignalKey, peers: Collection[int]) -> _Signal:
        events, record = self._memory.events, self._memory.record
        name, number = sign
        theirs = [
            [events.opened(peer, self._records[peer].events[sign][slot]) for peer in sorted(peers)]
            for slot in range(_SLOTS)
        ]
        own = [events.own(event) for event in record.events.get(sign, ())]
        return _Signal(number, self._link.flag(name, sorted(peers)), own, theirs)

    def _make_launches(self) -> None:
        from halox.packing.device import launch_add, launch_pack

        memory, job, device = self._memory, self._memory.job, self._memory.arena.device
        staging, put = memory.sends["staging"], memory.sends["put"]
        incoming = (*memory.receives["staging"], *memory.receives["get"])
        stages = max(len(self._come), 1) if incoming else 0
        self._packs, self._unpacks = (
            [
                fragmented(
                    self._moves(messages, slot),
                    messages,
                    [*map(memory.cut, messages)],
                    count,
                    device,
                    unpack=unpack,
                )
                for slot in range(_SLOTS)
            ]
            for messages, count, unpack in (
                (staging, memory.fragments, False),
                (() if job.operation == "add" else incoming, stages, True),
            )
        )
        if job.operation == "add" and incoming:
            self._unpacks = [
                [launch_add(self._moves(incoming, slot), device)] for slot in range(_SLOTS)
            ]
        self._put = launch_pack(self._moves(put, 0), device) if put else None
        self._clear = clearing_of(job, device)

    def _moves(self, messages: Sequence[Message], slot: int) -> list[Move]:
        """Return each part's endpoint and the address here of its packed bytes."""
        pointer = self._memory.arena.pointer
        addresses = [map(pointer, self._places(message)[slot]) for message in messages]
        return moves_of(self._memory.job, messages, addresses)

    def _places(self, message: Message) -> tuple[tuple[DevicePlace, ...], ...]:
        """Return by slot where the packed bytes of a message lie, as one of its ends has said."""
        own = self._memory.record.places.get(message.key)
        if own is not None:
            return own
        opposite = "receive" if message.direction == "send" else "send"
        return self._records[message.peer].places[opposite, self._link.world.rank, message.tag]

    def _enter(self) -> int:
        """Return the current stream, put behind what the last one was given."""
        stream = self._current_stream()
        last, self._stream = self._stream, stream
        if last is not None and last.ptr != stream.ptr:
            self._last.record(last)
            stream.wait_event(self._last)
        return int(stream.ptr)

    def check(self) -> None:
        """Refuse a stream that is being captured, and one behind a last one that is."""
        refuse_capture(self._current_stream().ptr, "ipc")
        if self._stream is not None:
            refuse_capture(self._stream.ptr, "ipc")

    def start(self) -> None:
        """Pack into the peers' staging memory."""
        stream = self._enter()
        self._epoch = epoch = self._epoch + 1
        self._ready.give(epoch, stream)
        if epoch > _SLOTS:
            self._acknowledged.wait(epoch - _SLOTS, stream)
        packs = self._packs[epoch % _SLOTS]
        for launch, packed in zip(packs, self._packed, strict=True):
            launch.launch(stream)
            packed.give(epoch, stream)
        for clear in self._clear:
            clear.launch(stream)

    def finish(self) -> None:
        """Put the unpacking on the current stream, and take the short cuts."""
        stream = self._enter()
        epoch = self._epoch
        if self._put is not None:
            self._may_write.wait(epoch, stream)
            self._put.launch(stream)
            self._written.give(epoch, stream)
        self._may_read.wait(epoch, stream)
        for launch, come in zip_longest(self._unpacks[epoch % _SLOTS], self._come):
            if come is not None:  # as where all is read from the senders' arrays
                come.wait(epoch, stream)
            launch.launch(stream)
        self._in_place.wait(epoch, stream)
        self._consumed.give(epoch, stream)
        self._taken.wait(epoch, stream)

    def close(self) -> None:
        """Wait until the stream has done with the memory, which stays as it is for the peers.

        A stream that does not end within ``HALOX_TIMEOUT``, as when a kernel of the caller's runs on, has not ended
        later either: the memory is never used again.
        """
        self.has_ended = self.has_ended and self._waits()

    def free(self) -> None:
        """Give the memory, the events and the flags back."""
        self._memory.abandon()
        self._link.close()

    def _waits(self) -> bool:
        stream = self._stream
        try:
            if stream is not None:
                waiter = self._link.world.waiter()
                waiter.until(lambda: bool(stream.done), lambda: "closing has waited for the stream")
        except ExchangeTimeoutError:
            return False
        return True


def make_ipc_channel(
    world: World,
    job: Job,
    protocols: Mapping[Key, str],
    memory: tuple[DeviceArena, EventPool] | None,
    link: NodeLink | None,
    cut: Cutter = whole,
) -> IpcChannel | None:
    """Make the channel of a plan's `ipc` messages together with the peers.

    Collective over the world.
    """

    def begin() -> IpcMemory | None:
        if not job.messages:
            return None
        if memory is None:
            raise AssertionError("a message between GPUs on a rank that has none")
        return IpcMemory(job, protocols, *memory, cut)

    def record(mine: IpcMemory, _: object) -> dict[int, IpcRecord]:
        return dict.fromkeys(mine.peers, mine.record)

    def channel(mine: IpcMemory, records: Mapping[int, IpcRecord]) -> IpcChannel:
        if link is None:
            raise AssertionError("messages that go by flags on a node that has none")
        return IpcChannel(mine, records, link)

    made: IpcChannel | None = handshake(
        world, begin, (record, channel), "the making of a plan", peers=lambda mine: mine.peers
    )
    return made


def _peers(messages: Sequence[Message]) -> set[int]:
    return {m.peer for m in messages}
