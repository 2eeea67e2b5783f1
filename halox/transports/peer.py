"""The ``peer`` path: one kernel an exchange, among GPUs that map one another's memory.

The kernel (``engine/kernels/peer.cu`` states its protocol, and why no order of its blocks can deadlock) packs into
the peers' memory, signals there, waits for what the peers send, and unpacks. The host only launches it::

    rank A  ...user's kernels | pack -> B's staging memory, flag | wait for B's flag, unpack | user's kernels...
    rank B  ...user's kernels | pack -> A's staging memory, flag | wait for A's flag, unpack | user's kernels...

A message goes one of three ways. ``ll``: in packets of data and epoch, which need no flag, for small ones.
``staging``: packed, a flag a chunk. ``direct``: straight into the receiver's array, where both sides have long runs
and the array lies in memory that the receiver has exported.

Double buffers. A rank's launch for epoch e + 2 writes the slot of epoch e in its peer's memory. It comes after its
launch for e + 1, which took what the peer sent in its launch for e + 1; and that began when the peer's launch for e
had ended, and with it the last use of the slot. Where nothing comes back from a peer, the launch waits instead until
the peer says that it has begun epoch e + 1.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.engine.compiler import kernel
from halox.engine.cuda import cupy, multiprocessors
from halox.engine.early_launch import EarlyLaunch
from halox.engine.launch import PreparedLaunch
from halox.engine.memory import PinnedBuffer
from halox.engine.packers.device import Zeroing, launch_add, launch_pack, launch_unpack
from halox.engine.packers.peer_plan import (
    PACKET_EXPANSION,
    WIDE_WORDS,
    Kind,
    Leg,
    PeerPlan,
    Stretch,
    in_even_chunks,
    in_packets,
    in_tiles,
    least_word,
    plan,
    staged,
    stretches,
)
from halox.engine.packers.refine import Copy, Side, contiguous_side, paired
from halox.engine.packers.strided_plan import Row
from halox.engine.spares import HOST_WORDS, SIDE_STREAMS, SideStream
from halox.engine.streams import StreamOrder
from halox.errors import ExchangeTimeoutError, HaloxError
from halox.messages import ALIGNMENT, Message, Part
from halox.transports.base import Channel, Job
from halox.transports.device_arena import DeviceArena, DeviceBlock, DevicePlace, Segment
from halox.transports.exported import Exported
from halox.world import World

WIDE_BYTES = 1 << 17
"""Bytes of a message from which packets are wide: fewer threads do more each, and less goes over the wire."""

PACKET_WORD = 4
"""Bytes of data in the smallest packet: shorter words do not travel in packets."""

_NOTHING = Row(0, 0, 16, ())
_LINE = 128
_ALIGNMENT = 256
_MAKING = "the making of a plan"

Tag = tuple[int, int]
"""Peer and tag of a message."""


@dataclass
class _Side:
    """One message on this rank: its stretches against a packed message at address 0."""

    message: Message
    way: str
    stretches: list[Stretch]
    buffered: bool
    """Whether its packed bytes are collected in a buffer of this rank, for types that no kernel walks in one go."""
    buffer: int = 0
    is_wide: bool = False
    """Whether it goes in wide packets, as both ends' stretches are alike."""

    @property
    def tag(self) -> Tag:
        return self.message.peer, self.message.tag

    @property
    def signature(self) -> tuple[Any, ...]:
        """What its stretches have in common with those of the other end, if they match."""
        return tuple(stretch.signature for stretch in self.stretches)

    def widen(self, signature: tuple[Any, ...]) -> None:
        """Choose wide packets if the other end's stretches are alike, and the message is not too small."""
        words = {stretch.row.word_bytes for stretch in self.stretches}
        self.is_wide = (
            self.way == "ll"
            and self.message.nbytes >= WIDE_BYTES
            and self.signature == signature
            and words <= set(WIDE_WORDS)
            and all(stretch.packed >= 0 for stretch in self.stretches)
        )

    @property
    def staging_bytes(self) -> int:
        """Bytes of a slot of its staging memory."""
        if self.way == "direct":
            return 0
        if self.is_wide:
            return sum(stretch.tile_bytes for stretch in self.stretches)
        return self.message.packed_bytes * (PACKET_EXPANSION if self.way == "ll" else 1)


@dataclass(frozen=True)
class _Announced:
    """What a sender tells the receiver of a message first: its chunks."""

    signature: tuple[Any, ...]
    chunks: int


@dataclass(frozen=True)
class _Granted:
    """What a receiver answers its peers: where to put what they send."""

    handles: Mapping[Segment, bytes]
    begun: DevicePlace
    staging: Mapping[int, tuple[DevicePlace, int, bool]]
    """By tag: where, bytes of a slot, and whether in wide packets."""
    flags: Mapping[int, DevicePlace]


@dataclass
class _Memory:
    """The parts of this rank's block, by their offsets."""

    size: int = 0
    at: dict[Any, int] = field(default_factory=dict)

    def reserve(self, key: Any, nbytes: int) -> None:
        self.at[key] = self.size
        self.size += -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT


class PeerChannel(Channel):
    """All messages that one launch moves; made by :func:`make_peer_channel`."""

    def __init__(self, draft: _Draft) -> None:
        self._draft = draft
        self._world, device = draft.world, draft.device
        cp = cupy()
        self._runtime = cp.cuda.runtime
        self._current_stream = cp.cuda.get_current_stream
        self._order = StreamOrder()
        self._launch = draft.prepared()
        assert draft.failure is not None
        self._failure = draft.failure.array.data.cast("I")
        job = draft.job
        self._before, self._after = draft.around()
        cleared = [(job.arrays[p.array], p.datatype, p.count) for p in job.cleared]
        if cleared:
            self._after.append(Zeroing(cleared, device))
        self._side: SideStream | None = SIDE_STREAMS.take(device)
        self._is_aside = False
        self._is_told = False

    def start_at_once(self) -> None:
        """Put the whole exchange on the current stream."""
        self._enter(self._current_stream())

    def start(self) -> None:
        """Put the whole exchange on a stream of its own, after what the current one holds by now."""
        side, runtime = self._side, self._runtime
        assert side is not None
        aside = side.stream.ptr
        runtime.eventRecord(side.before.ptr, self._current_stream().ptr)
        runtime.streamWaitEvent(aside, side.before.ptr)
        self._enter(side.stream)
        runtime.eventRecord(side.after.ptr, aside)
        self._is_aside = True

    def finish(self) -> None:
        """Order the current stream after the exchange."""
        if self._is_aside:
            self._is_aside = False
            assert self._side is not None
            self._runtime.streamWaitEvent(self._current_stream().ptr, self._side.after.ptr)

    def _enter(self, stream: Any) -> None:
        if self._failure[0]:
            self._raise_failure()
        pointer = stream.ptr
        self._order.follow(stream)
        for part in self._before:
            part.launch(pointer)
        self._launch.launch(pointer)
        for part in self._after:
            part.launch(pointer)

    def _raise_failure(self) -> None:
        if self._failure[0]:
            self._is_told = True
            raise self._failed()

    def _failed(self) -> ExchangeTimeoutError:
        peer = self._draft.peer_of(self._failure[0] - 1)
        return ExchangeTimeoutError(
            f"rank {self._world.rank} has waited for rank {peer} in exchange {self._failure[1]} of a plan for "
            f"{self._world.limit_s:g} s (HALOX_TIMEOUT), on the GPU; what was received in it, and since, is not "
            "valid. A rank has failed, is far behind, or has made another sequence of calls"
        )

    def close(self) -> None:
        """Wait for the last launch, then give the memory back; warn if an exchange has failed since the last call."""
        side, self._side = self._side, None
        assert side is not None
        self._order.synchronize()
        if self._failure[0] and not self._is_told:
            warnings.warn(str(self._failed()), stacklevel=2)
        self._failure.release()
        SIDE_STREAMS.give_back(self._draft.device, side)
        self._draft.release()


class _Draft:
    """A channel in the making, step by step; steps that fail on one rank alone must fail on all."""

    def __init__(
        self,
        world: World,
        arena: DeviceArena,
        job: Job,
        copies: Job,
        ways: Mapping[tuple[str, int, int], str],
        exported: Mapping[Tag, Exported | None],
    ) -> None:
        self.world, self.arena, self.device, self.job = world, arena, arena.device, job
        self._copies = copies
        self._sends = [self._side(m, ways[m.key], exported.get((m.peer, m.tag))) for m in job.sends]
        self._takes = [self._side(m, ways[m.key], None) for m in job.receives]
        self._cut_evenly()
        self.peers = sorted({m.peer for m in (*job.sends, *job.receives)})
        self._to, self._of = {m.peer for m in job.sends}, {m.peer for m in job.receives}
        self._block: DeviceBlock | None = None
        self._own: DeviceBlock | None = None
        self.failure: PinnedBuffer | None = None
        self._memory = _Memory()

    def _side(self, message: Message, way: str, exported: Exported | None) -> _Side:
        is_send = message.direction == "send"
        if way == "direct":
            copies = self._straight(message, exported) if is_send else []
            found = stretches(copies, packed=1)
            return _Side(message, way, found, False)
        copies = []
        buffered = not is_send and self.job.operation == "add"
        for part, offset in zip(message.parts, message.offsets, strict=True):
            pairs = paired(self.job.arrays[part.array].pointer, part.datatype, part.count, offset)
            if pairs is None:
                buffered = True
                break
            copies += [Copy(a, b) if is_send else Copy(b, a) for a, b in pairs]
        if buffered:
            runs = [(0, message.packed_bytes)] if is_send else _waited_for(message)
            sides = [contiguous_side(start, nbytes) for start, nbytes in runs]
            copies = [Copy(side, side) for side in sides]
        # Packets hold 8 bytes of a word at most.
        max_word = 8 if way == "ll" else 16
        found = stretches(copies, packed=int(is_send), max_word=max_word)
        return _Side(message, way, found, buffered)

    def _cut_evenly(self) -> None:
        """Cut what is sent direct into chunks, of which each block has as many as the others."""
        sides = [side for side in self._sends if side.way == "direct"]
        total = sum(stretch.row.nbytes for side in sides for stretch in side.stretches)
        for side in sides:
            sms = multiprocessors(self.device)
            side.stretches = [in_even_chunks(s, total, sms) for s in side.stretches]

    def _straight(self, message: Message, exported: Exported | None) -> list[Copy]:
        """Return the copies from this rank's array into the peer's."""
        assert exported is not None
        self.arena.open(exported.handles)
        copies = []
        for part, place, layout in zip(
            message.parts, exported.places, exported.layouts, strict=True
        ):
            copies.append(Copy(self._whole(part), Side(self.arena.pointer(place), layout)))
        return copies

    def announced(self) -> dict[int, dict[int, _Announced]]:
        """Return what each peer must know of the messages it gets."""
        found: dict[int, dict[int, _Announced]] = {peer: {} for peer in self.peers}
        for side in self._sends:
            chunks = sum(stretch.chunks for stretch in side.stretches)
            found[side.message.peer][side.message.tag] = _Announced(side.signature, chunks)
        return found

    def grant(self, announced: Mapping[int, Mapping[int, _Announced]]) -> dict[int, _Granted]:
        """Allocate this rank's memory, and return where each peer puts what it sends."""
        memory, sides = self._memory, {side.tag: side for side in self._takes}
        self._incoming = {
            side.tag: announced[side.message.peer][side.message.tag] for side in self._takes
        }
        memory.reserve("state", 16)
        for peer in self.peers:
            memory.reserve(("begun", peer), _LINE)
        for tag, other in self._incoming.items():
            sides[tag].widen(other.signature)
            memory.reserve(("flags", *tag), 4 * other.chunks)
            memory.reserve(("staging", *tag), 2 * sides[tag].staging_bytes)
        for side in (*self._sends, *self._takes):
            if side.buffered:
                memory.reserve(("buffer", *side.message.key), side.message.packed_bytes)
        memory.reserve("peers", 8 * len(self.peers))
        self._block = self.arena.allocate(memory.size)
        with cupy().cuda.Device(self.device):
            cupy().cuda.runtime.memset(self._block.pointer, 0, memory.size)
            cupy().cuda.runtime.deviceSynchronize()
        self.failure = HOST_WORDS.take(self.device)
        self.failure.array[:] = 0
        for side in (*self._sends, *self._takes):
            if side.buffered:
                side.buffer = self._pointer(("buffer", *side.message.key))
        handles = self.arena.handles([self._block.place])
        return {
            peer: _Granted(
                handles,
                self._place(("begun", peer)),
                {
                    tag: (
                        self._place(("staging", p, tag)),
                        sides[p, tag].staging_bytes,
                        sides[p, tag].is_wide,
                    )
                    for p, tag in self._incoming
                    if p == peer
                },
                {tag: self._place(("flags", p, tag)) for p, tag in self._incoming if p == peer},
            )
            for peer in self.peers
        }

    def open(self, granted: Mapping[int, _Granted]) -> None:
        """Map the peers' memory."""
        self._granted = granted
        for answer in granted.values():
            self.arena.open(answer.handles)

    def prepared(self) -> PreparedLaunch:
        """Return the launch; memory that its table needs is allocated here."""
        legs = [*self._copy_legs(), *self._send_legs(), *self._take_legs()]
        planned = plan(legs, sms=multiprocessors(self.device))
        return self._prepare(planned)

    def _copy_legs(self) -> list[Leg]:
        copies = []
        for send, take in zip(self._copies.sends, self._copies.receives, strict=True):
            for a, b in zip(send.parts, take.parts, strict=True):
                copies.append(Copy(*(self._whole(part) for part in (a, b))))
        return [Leg(Kind.COPY, s.row, 0) for s in stretches(copies, packed=1)]

    def _whole(self, part: Part) -> Side:
        strided = part.datatype.items(part.count).strided
        assert strided is not None
        return Side(self.job.arrays[part.array].pointer, strided)

    def _send_legs(self) -> list[Leg]:
        legs = []
        for number, side in enumerate(self._sends):
            peer, tag = side.tag
            answer = self._granted[peer]
            begun = self._pointer(("begun", peer))
            waits = {"begun": begun, "lag": 1} if peer not in self._of else {}
            place, slot_bytes, side.is_wide = answer.staging[tag]
            base = self.arena.pointer(place)
            if side.way == "direct":
                waits = {"begun": begun, "lag": 0}
                base = 0  # these rows hold the peer's addresses already
            flags = self.arena.pointer(answer.flags[tag])
            for stretch in side.stretches:
                row = stretch.row
                if side.buffered:
                    row = row._replace(source=row.source + side.buffer)
                if side.is_wide:
                    row = in_tiles(row, 1, base)
                    legs.append(Leg(Kind.SEND_WIDE, row, number, slot_bytes=slot_bytes, **waits))
                    base += stretch.tile_bytes
                    continue
                if side.way == "ll":
                    row = in_packets(row, 1, base)
                    legs.append(Leg(Kind.SEND_LL, row, number, slot_bytes=slot_bytes, **waits))
                    continue
                kind = Kind.SEND_STAGED if side.way == "staging" else Kind.SEND_DIRECT
                row = staged(row, 1, base)
                legs.append(
                    Leg(
                        kind,
                        row,
                        number,
                        stretch.chunk_words,
                        flags,
                        slot_bytes=slot_bytes,
                        **waits,
                    )
                )
                flags += 4 * stretch.chunks
        return legs

    def _take_legs(self) -> list[Leg]:
        legs = []
        for number, side in enumerate(self._takes, len(self._sends)):
            announced = self._incoming[side.tag]
            flags = self._pointer(("flags", *side.tag))
            if side.way == "direct":
                legs.append(
                    Leg(Kind.TAKE_DIRECT, _NOTHING, number, 1, flags, flag_count=announced.chunks)
                )
                continue
            base, slot_bytes = self._pointer(("staging", *side.tag)), side.staging_bytes
            mine, theirs = ([s[:3] for s in both] for both in (side.signature, announced.signature))
            matching = mine == theirs and all(s[0] >= 0 for s in mine)
            for stretch in side.stretches:
                row = stretch.row
                if side.buffered:
                    row = row._replace(target=row.target + side.buffer)
                if side.is_wide:
                    row = in_tiles(row, 0, base)
                    legs.append(Leg(Kind.TAKE_WIDE, row, number, slot_bytes=slot_bytes))
                    base += stretch.tile_bytes
                    continue
                if side.way == "ll":
                    row = in_packets(row, 0, base)
                    legs.append(Leg(Kind.TAKE_LL, row, number, slot_bytes=slot_bytes))
                    continue
                row = staged(row, 0, base)
                count = 0 if matching else announced.chunks
                legs.append(
                    Leg(
                        Kind.TAKE_STAGED,
                        row,
                        number,
                        stretch.chunk_words,
                        flags,
                        slot_bytes=slot_bytes,
                        flag_count=count,
                    )
                )
                if matching:
                    flags += 4 * stretch.chunks
        return legs

    def _prepare(self, planned: PeerPlan) -> PreparedLaunch:
        runtime = cupy().cuda.runtime
        parameter = planned.table
        table_bytes = 0 if planned.inline else -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
        # One more block for what only this rank uses, known only now.
        self._own = self.arena.allocate(table_bytes + 4 * max(planned.send_chunks, 1))
        own = self._own.pointer
        with cupy().cuda.Device(self.device):
            runtime.memset(own, 0, self._own.nbytes)
            if table_bytes:
                self._upload(own, parameter)
                parameter = np.array([own, own + planned.legs.nbytes], np.uint64)
            # Those who wait for this rank to begin: whoever stores straight into its arrays, or gets nothing back.
            waiting = sorted(
                {s.message.peer for s in self._takes if s.way == "direct"} | (self._of - self._to)
            )
            addresses = [self.arena.pointer(self._granted[peer].begun) for peer in waiting]
            self._upload(self._pointer("peers"), np.array(addresses, np.uint64))
            runtime.deviceSynchronize()
        exchange = np.zeros(1, EXCHANGE)
        exchange["state"], exchange["begun_chunk"] = self._pointer("state"), own + table_bytes
        exchange["peers"], exchange["peer_count"] = self._pointer("peers"), len(addresses)
        assert self.failure is not None
        exchange["failure"] = self.failure.device_pointer
        exchange["limit_ns"] = int(self.world.limit_s * 1e9)
        for name in ("send_chunks", "chunks", "send_blocks"):
            exchange[name] = getattr(planned, name)
        exchange["legs"] = len(planned.legs)
        return EarlyLaunch(
            kernel("peer", "peer_exchange", self.device, planned.defines),
            planned.blocks,
            planned.threads,
            [
                (ctypes.c_char * data.nbytes).from_buffer_copy(data.tobytes())
                for data in (parameter, exchange)
            ],
            device=self.device,
        )

    @staticmethod
    def _upload(pointer: int, data: npt.NDArray[Any]) -> None:
        runtime = cupy().cuda.runtime
        runtime.memcpy(pointer, data.ctypes.data, data.nbytes, runtime.memcpyHostToDevice)

    def around(self) -> tuple[list[Any], list[Any]]:
        """Return the launches before and after the kernel: of types that it does not walk, and of additions."""

        def moves(sides: Sequence[_Side]) -> list[Any]:
            return [
                ((self.job.arrays[part.array], part.datatype, part.count), side.buffer + offset)
                for side in sides
                if side.buffered
                for part, offset in zip(side.message.parts, side.message.offsets, strict=True)
            ]

        outgoing, incoming = moves(self._sends), moves(self._takes)
        unpack = launch_add if self.job.operation == "add" else launch_unpack
        return (
            [launch_pack(outgoing, self.device)] if outgoing else [],
            [unpack(incoming, self.device)] if incoming else [],
        )

    def peer_of(self, number: int) -> int:
        """Return the other rank of a message by its number."""
        return [*self._sends, *self._takes][number].message.peer

    def release(self) -> None:
        """Give the memory back; nothing may use it any more."""
        # A peer that is behind may still say that it has begun.
        for block, give_back in (
            (self._block, self.arena.retire),
            (self._own, self.arena.release),
        ):
            if block is not None:
                give_back(block)
        self._block = self._own = None
        if self.failure is not None:
            HOST_WORDS.give_back(self.device, self.failure)
            self.failure = None

    def _pointer(self, key: Any) -> int:
        assert self._block is not None
        return self._block.pointer + self._memory.at[key]

    def _place(self, key: Any) -> DevicePlace:
        assert self._block is not None
        return self._block.place.at(self._memory.at[key])


def _waited_for(message: Message) -> list[tuple[int, int]]:
    """Return where the bytes of a message that every sender sends are, once packed: first byte, and length.

    A sender that packs straight from its arrays does not send what lies between the parts. A part that ends within a
    PACKET_WORD goes in packets only if its sender sends a packed message as a whole.
    """
    runs: list[tuple[int, int]] = []
    for part, start in zip(message.parts, message.offsets, strict=True):
        padded = -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        nbytes = padded if part.nbytes % PACKET_WORD else part.nbytes
        if runs and sum(runs[-1]) == start:
            start, nbytes = runs[-1][0], runs.pop()[1] + nbytes
        runs.append((start, nbytes))
    return runs


EXCHANGE = np.dtype(
    [
        ("state", "u8"),
        ("begun_chunk", "u8"),
        ("peers", "u8"),
        ("failure", "u8"),
        ("limit_ns", "u8"),
        ("peer_count", "u4"),
        ("legs", "u4"),
        ("send_chunks", "u4"),
        ("chunks", "u4"),
        ("send_blocks", "u4"),
        ("unused", "u4"),
    ]
)
"""The kernel's second parameter, as in ``peer.cu``."""


def shortest_word(message: Message, arrays: Sequence[Any]) -> int:
    """Return the bytes of the shortest word in which a kernel walks a message, 1 for runs of no alignment."""
    found = []
    for part, offset in zip(message.parts, message.offsets, strict=True):
        pairs = paired(arrays[part.array].pointer, part.datatype, part.count, offset)
        if pairs is None:
            return ALIGNMENT  # packed by itself first
        found += [Copy(a, b) for a, b in pairs]
    return least_word(stretches(found, packed=1))


def make_peer_channel(
    world: World,
    arena: DeviceArena | None,
    job: Job,
    copies: Job,
    ways: Mapping[tuple[str, int, int], str],
    exported: Mapping[Tag, Exported | None],
) -> PeerChannel | None:
    """Make the channel of a plan's messages that go the peer path.

    Parameters
    ----------
    world, arena
        The ranks, and this rank's device memory; None on a rank without a GPU.
    job : Job
        The messages, none on ranks that have none.
    copies : Job
        Messages to this rank itself that may be copied by the same launch.
    ways : mapping
        For each message of the job, by its key: "ll", "staging" or "direct".
    exported : mapping
        For each message sent directly, by (peer, tag), where its receiver's array lies.

    Returns
    -------
    PeerChannel or None
        None on ranks without such messages.

    Raises
    ------
    HaloxError
        On all ranks, if any of them cannot make its part.

    Notes
    -----
    Collective over the world. The GPUs must be idle as far as earlier plans are concerned: their memory is used again.
    """
    draft: _Draft | None = None

    def begun() -> None:
        nonlocal draft
        if arena is not None and (job.sends or job.receives):
            draft = _Draft(world, arena, job, copies, ways, exported)

    def granted() -> dict[int, _Granted]:
        return {} if draft is None else draft.grant(announced)

    def made() -> PeerChannel | None:
        if draft is None:
            return None
        draft.open(answers)
        return PeerChannel(draft)

    try:
        world.guarded(begun, _MAKING)
        peers = [] if draft is None else draft.peers
        announced = world.swap({} if draft is None else draft.announced(), peers, _MAKING)
        answers = world.swap(world.guarded(granted, _MAKING), peers, _MAKING)
        channel: PeerChannel | None = world.guarded(made, _MAKING)
    except HaloxError:
        if draft is not None:
            draft.release()
        raise
    return channel
