"""The ``ipc`` path: arrays on GPUs whose memory the ranks of a node map, their streams ordered by events.

For ranks whose kernels cannot wait for one another: those that share a GPU take turns on it, and so does every wait
of the host for the GPU. Here the host never waits for the GPU. It records an interprocess event behind a kernel and
raises a flag in the node's shared memory, which says only that the event *has been recorded*; the peer's host sees
the flag and makes its stream wait for the event. After Wu et al. 2016, section 4.1, with the flags in place of the
active messages. A message goes one of three ways::

    "staging"  A: pack -> B's staging memory, packed |
               B:                                    | waits for packed, unpacks
    "into"     B: settled |                                                        B's part is contiguous:
               A:         | waits for settled, packs -> B's array, packed |        packed straight into place
               B:                                                         | waits for packed
    "from"     A: settled |                                                        A's part is contiguous:
               B:         | waits for settled, unpacks <- A's array, drained |     unpacked straight from there
               A:                                                            | waits for drained

The short cuts move the bytes once, and take one turn more.

Staging memory is the receiver's: stores to another GPU are a little faster than loads from it, and what has been
written there is known to the receiver alone. It has two slots, and epoch e uses slot e % 2, with events of its own.
Slot and events are free for epoch e + 2 without a message for it wherever the sender waits for any event of the
receiver in every exchange, because something comes back or because a short cut is taken between the two. For A waits
in epoch e + 1 for an event that B recorded behind its unpacking of epoch e, and packs e + 2 behind that wait; and A's
host had seen the flag of that event, which B's host raised after it had made its stream wait for A's event of epoch
e. Where A waits for nothing else, B records "drained" behind its unpacking, and A waits for that of epoch e before it
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
from typing import Any, Literal

from halox.errors import ExchangeTimeoutError, HaloxError
from halox.paths.base import Channel, Job
from halox.paths.fragments import MOST_FRAGMENTS, Cutter, ends_of, whole
from halox.paths.messages import Message
from halox.paths.node import Gate, NodeLink
from halox.runtime.device_arena import DeviceArena, DevicePlace, Segment
from halox.runtime.gpu.capture import refuse_capture
from halox.runtime.gpu.ipc_events import EventPool
from halox.runtime.world import World

IpcWay = Literal["staging", "into", "from"]

Key = tuple[str, int, int]
"""Direction, peer and tag of a message."""

Sign = tuple[str, int]
"""What an event says: the flag that goes with it, and its number among the counts of that flag in one epoch."""

FRAGMENT_BYTES = 4 << 20
"""Least bytes of a fragment between two GPUs: at some 400 GB/s it takes twice the 5 us that a fragment costs."""

_SLOTS = 2
_ALIGNMENT = 256
_COUNTS = MOST_FRAGMENTS + 1  # of a flag in one epoch
_SETTLED: Sign = ("ipc_settled", 0)
_DRAINED: Sign = ("ipc_drained", 0)
_WRITTEN: Sign = ("ipc_packed", MOST_FRAGMENTS)


def _packed(fragment: int) -> Sign:
    return "ipc_packed", fragment


def contiguous_places(
    message: Message, arrays: Sequence[Any], arena: DeviceArena
) -> tuple[DevicePlace, ...] | None:
    """Return where the parts of a message lie, None unless each is contiguous and in the arena.

    Parameters
    ----------
    message : Message
    arrays : sequence of Described
        The plan's arrays.
    arena : DeviceArena
        This rank's.

    Notes
    -----
    Not collective. Where the receiver has places a message may go "into" them, where the sender has, "from" them;
    not in accumulations.
    """
    places = []
    for part in message.parts:
        strided = part.datatype.items(part.count).strided
        if strided is None or strided.counts:
            return None
        start = arrays[part.array].pointer + strided.offset
        place = arena.locate(start, start + strided.nbytes)
        if place is None:
            return None
        places.append(place)
    return tuple(places)


def one_way_cutter(
    job: Job, sharers: Collection[int], fragment_bytes: int = FRAGMENT_BYTES
) -> Cutter:
    """Return what cuts the messages of a job where fragments pay, alike on both ends.

    Parameters
    ----------
    job : Job
        All messages of the plan that go this path.
    sharers : collection of int
        Ranks that work on this rank's GPU.
    fragment_bytes : int
        Least bytes of a fragment, the same on all ranks; 0 leaves all messages whole.
    """
    both_ways = {m.peer for m in job.sends} & {m.peer for m in job.receives}

    def cut(message: Message) -> tuple[int, ...]:
        if message.peer in both_ways or message.peer in sharers or job.operation == "add":
            return whole(message)
        return ends_of(message.packed_bytes, fragment_bytes)

    return cut


@dataclass(frozen=True)
class IpcRecord:
    """What a rank tells its peers of its end.

    Attributes
    ----------
    places : mapping
        For each message whose packed bytes lie in this rank's memory, by slot, where those of each part do.
    segments : mapping
        Handles of the memory named there.
    events : mapping
        Number of this rank's event of each sign, by slot.
    handles : mapping
        Handles of the events.
    """

    places: Mapping[Key, tuple[tuple[DevicePlace, ...], ...]]
    segments: Mapping[Segment, bytes]
    events: Mapping[Sign, tuple[int, ...]]
    handles: dict[int, bytes]


class IpcEnd:
    """One rank's end of the `ipc` messages of a plan: its staging memory and its events.

    Parameters
    ----------
    job : Job
        The messages; arrays are `Described`.
    ways : mapping
        The way of each message, by its key; "staging" in accumulations.
    arena : DeviceArena
    events : EventPool
    cut : callable
        Cuts messages that go by staging memory; the same answer on both ends.

    Attributes
    ----------
    record : IpcRecord
        To be swapped with the peers before `IpcChannel` is made.
    peers : list of int
        Whom to swap it with.

    Notes
    -----
    Local.
    """

    def __init__(
        self,
        job: Job,
        ways: Mapping[Key, IpcWay],
        arena: DeviceArena,
        events: EventPool,
        cut: Cutter = whole,
    ) -> None:
        self.job, self.arena, self.events = job, arena, events
        self.cut = whole if job.operation == "add" else cut
        self.sends = {way: _going(job.sends, ways, way) for way in ("staging", "into", "from")}
        self.receives = {
            way: _going(job.receives, ways, way) for way in ("staging", "into", "from")
        }
        self.peers = sorted({m.peer for m in (*job.sends, *job.receives)})
        # Those to which messages go by staging memory alone, and from which nothing comes.
        self.acknowledging = _peers(self.sends["staging"]).difference(
            _peers(job.receives), _peers(self.sends["into"]), _peers(self.sends["from"])
        )
        self.acknowledged = _peers(self.receives["staging"]).difference(
            _peers(job.sends), _peers(self.receives["into"]), _peers(self.receives["from"])
        )
        self.fragments = max((len(cut(m)) for m in self.sends["staging"]), default=0)
        self._block: Any = None
        places = self._staging()
        for message in (*self.receives["into"], *self.sends["from"]):
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

    def _signs(self) -> list[Sign]:
        """Return what this rank's events have to say."""
        signs = [_packed(fragment) for fragment in range(self.fragments)]
        if self.sends["into"]:
            signs.append(_WRITTEN)
        if self.receives["into"] or self.sends["from"]:
            signs.append(_SETTLED)
        if self.receives["from"] or self.acknowledged:
            signs.append(_DRAINED)
        return signs

    def close(self) -> None:
        """Give the memory and the events back; this rank's streams must have done with them."""
        if self._block is not None:
            self.arena.release(self._block)
            self._block = None
        self.events.give_back(self._numbers)
        self._numbers = []


class _Signal:
    """A sign that this rank gives, and for which it waits when some peers give it: an event and a flag each."""

    def __init__(
        self, number: int, gate: Gate, own: Sequence[int], theirs: Sequence[Sequence[int]]
    ) -> None:
        from halox.runtime.gpu.cuda import cupy

        runtime = cupy().cuda.runtime
        self._number, self._gate = number, gate
        self._own, self._theirs = own, theirs
        self._record, self._wait = runtime.eventRecord, runtime.streamWaitEvent

    def give(self, epoch: int, stream: int) -> None:
        """Record the slot's event and say so, if any peer waits for it."""
        if self._own:
            self._record(self._own[epoch % _SLOTS], stream)
            self._gate.raise_to(self._count(epoch))

    def wait(self, epoch: int, stream: int) -> None:
        """Make a stream wait for the peers' events, once they have been recorded."""
        self._gate.wait(self._count(epoch))
        for event in self._theirs[epoch % _SLOTS]:
            self._wait(stream, event)

    def _count(self, epoch: int) -> int:
        return (epoch - 1) * _COUNTS + self._number + 1


class IpcChannel(Channel):
    """Moves arrays on this rank's GPU to and from memory that it shares with its peers; see the module.

    Parameters
    ----------
    end : IpcEnd
        The channel closes it.
    records : mapping
        The peers' records, by rank.
    link : NodeLink
        The plan's flags, with all peers among its own.

    Notes
    -----
    Local. Kernels wait for the peers' on the stream; the host waits for the peers' hosts alone. Cannot be captured.
    """

    def __init__(self, end: IpcEnd, records: Mapping[int, IpcRecord], link: NodeLink) -> None:
        from halox.runtime.gpu.cuda import cupy

        self._current_stream = cupy().cuda.get_current_stream
        self._end, self._records, self._link = end, records, link
        for rank, record in records.items():
            end.arena.open(record.segments)
            end.events.open(rank, record.handles)
        self._epoch = 0
        self._stream: Any = None
        with cupy().cuda.Device(end.arena.device):
            self._last = cupy().cuda.Event(disable_timing=True)
        self._make_signals()
        self._make_launches()

    def _make_signals(self) -> None:
        sends, receives = self._end.sends, self._end.receives
        signal = self._signal
        self._packed = [signal(_packed(k), ()) for k in range(self._end.fragments)]
        lengths = [(m.peer, len(self._end.cut(m))) for m in receives["staging"]]
        self._come = [
            signal(_packed(k), {peer for peer, n in lengths if n > k})
            for k in range(max((n for _, n in lengths), default=0))
        ]
        self._settled = signal(_SETTLED, ())
        self._may_write = signal(_SETTLED, _peers(sends["into"]))
        self._may_read = signal(_SETTLED, _peers(receives["from"]))
        self._written = signal(_WRITTEN, ())
        self._in_place = signal(_WRITTEN, _peers(receives["into"]))
        self._drained = signal(_DRAINED, ())
        self._acknowledged = signal(_DRAINED, self._end.acknowledging)
        self._taken = signal(_DRAINED, _peers(sends["from"]))

    def _signal(self, sign: Sign, peers: Collection[int]) -> _Signal:
        events, record = self._end.events, self._end.record
        flag, number = sign
        theirs = [
            [events.opened(peer, self._records[peer].events[sign][slot]) for peer in sorted(peers)]
            for slot in range(_SLOTS)
        ]
        own = [events.own(event) for event in record.events.get(sign, ())]
        return _Signal(number, self._link.gate(flag, sorted(peers)), own, theirs)

    def _make_launches(self) -> None:
        from halox.packing.device import Zeroing, fragment_launches, launch_add, launch_pack

        end, job, device = self._end, self._end.job, self._end.arena.device
        incoming = (*end.receives["staging"], *end.receives["from"])
        stages = max(len(self._come), 1) if incoming else 0

        def fragmented(messages: Sequence[Message], slot: int, count: int, unpack: bool) -> Any:
            moves = self._fragmented(messages, slot, count)
            return fragment_launches(moves, count, device, unpack=unpack)

        slots = range(_SLOTS)
        self._packs = [
            fragmented(end.sends["staging"], slot, end.fragments, False) for slot in slots
        ]
        if job.operation == "add" and incoming:
            self._unpacks = [[launch_add(self._moves(incoming, slot), device)] for slot in slots]
        else:
            self._unpacks = [fragmented(incoming, slot, stages, True) for slot in slots]
        into = end.sends["into"]
        self._pack_into = launch_pack(self._moves(into, 0), device) if into else None
        cleared = [(job.arrays[p.array], p.datatype, p.count) for p in job.cleared]
        self._clear = Zeroing(cleared, device) if cleared else None

    def _moves(self, messages: Sequence[Message], slot: int) -> list[Any]:
        """Return each part's endpoint and the address here of its packed bytes."""
        arrays, pointer = self._end.job.arrays, self._end.arena.pointer
        return [
            ((arrays[part.array], part.datatype, part.count), pointer(place))
            for message in messages
            for part, place in zip(message.parts, self._places(message)[slot], strict=True)
        ]

    def _fragmented(self, messages: Sequence[Message], slot: int, count: int) -> list[Any]:
        """Return the moves, and where each part's share of every fragment ends."""
        shares = []
        for message in messages:
            ends = self._end.cut(message)
            padded = (*ends, *ends[-1:] * (count - len(ends)))
            shares += [
                [min(max(end - offset, 0), part.nbytes) for end in padded]
                for part, offset in zip(message.parts, message.offsets, strict=True)
            ]
        moves = self._moves(messages, slot)
        return [(*move, share) for move, share in zip(moves, shares, strict=True)]

    def _places(self, message: Message) -> tuple[tuple[DevicePlace, ...], ...]:
        """Return by slot where the packed bytes of a message lie, which one of its ends has said."""
        own = self._end.record.places.get(message.key)
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
        """Pack into the peers' staging memory.

        Raises
        ------
        ExchangeTimeoutError
            If a receiver that sends nothing back has not come to the exchange before the last.
        """
        stream = self._enter()
        self._epoch = epoch = self._epoch + 1
        self._settled.give(epoch, stream)
        if epoch > _SLOTS:
            self._acknowledged.wait(epoch - _SLOTS, stream)
        packs = self._packs[epoch % _SLOTS]
        for launch, packed in zip(packs, self._packed, strict=True):
            launch.launch(stream)
            packed.give(epoch, stream)
        if self._clear is not None:
            self._clear.launch(stream)

    def finish(self) -> None:
        """Put the unpacking on the current stream, and take the short cuts.

        Raises
        ------
        StateError
            If the current stream is being captured.
        ExchangeTimeoutError
            If a peer's host does not come.
        """
        stream = self._enter()
        epoch = self._epoch
        if self._pack_into is not None:
            self._may_write.wait(epoch, stream)
            self._pack_into.launch(stream)
            self._written.give(epoch, stream)
        self._may_read.wait(epoch, stream)
        for launch, come in zip_longest(self._unpacks[epoch % _SLOTS], self._come):
            if come is not None:  # as where all is read from the senders' arrays
                come.wait(epoch, stream)
            launch.launch(stream)
        self._in_place.wait(epoch, stream)
        self._drained.give(epoch, stream)
        self._taken.wait(epoch, stream)

    def close(self) -> None:
        """Wait until the stream has done with the memory, which stays as it is for the peers.

        A stream that does not end within ``HALOX_TIMEOUT``, as when a kernel of the caller's runs on, has not ended
        later either: the memory is never used again.
        """
        self.has_ended = self.has_ended and self._waits()

    def free(self) -> None:
        """Give the memory and the events back."""
        self._end.close()

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
    ways: Mapping[Key, IpcWay],
    memory: tuple[DeviceArena, EventPool] | None,
    link: NodeLink | None,
    cut: Cutter = whole,
) -> IpcChannel | None:
    """Make the channel of a plan's `ipc` messages together with the peers.

    Parameters
    ----------
    world : World
    job, ways, cut
        As of `IpcEnd`; a job without messages on ranks that have none.
    memory : (DeviceArena, EventPool) or None
        None on ranks without a GPU.
    link : NodeLink or None
        The plan's flags; None on nodes without any message that needs them.

    Returns
    -------
    IpcChannel or None
        None where there are no messages.

    Raises
    ------
    HaloxError
        On all ranks, if any of them cannot make its part.

    Notes
    -----
    Collective over the world.
    """
    doing = "the making of a plan"

    def ended() -> IpcEnd | None:
        if not (job.sends or job.receives):
            return None
        if memory is None:
            raise AssertionError("a message between GPUs on a rank that has none")
        return IpcEnd(job, ways, *memory, cut)

    end: IpcEnd | None = world.guarded(ended, doing)
    records: dict[int, IpcRecord] = {}
    if end is not None:
        records = world.swap(dict.fromkeys(end.peers, end.record), end.peers, doing)

    def channel() -> IpcChannel | None:
        if end is None:
            return None
        if link is None:
            raise AssertionError("messages that go by flags on a node that has none")
        return IpcChannel(end, records, link)

    try:
        made: IpcChannel | None = world.guarded(channel, doing)
    except HaloxError:
        if end is not None:
            end.close()
        raise
    return made


def _going(
    messages: Sequence[Message], ways: Mapping[Key, IpcWay], way: str
) -> tuple[Message, ...]:
    return tuple(m for m in messages if ways[m.key] == way)


def _peers(messages: Sequence[Message]) -> set[int]:
    return {m.peer for m in messages}
