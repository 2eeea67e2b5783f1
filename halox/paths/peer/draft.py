"""The making of a channel of the peer path: its memory, what is agreed with the peers, the legs and the launch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.packing.device import launch_add, launch_pack, launch_unpack
from halox.packing.refine import Copy, Side
from halox.packing.strided_plan import Row
from halox.paths.base import Job
from halox.paths.peer.ends import Announced, End, Tag, direct_ends, end_of, whole
from halox.paths.peer.exported import Exported
from halox.paths.peer.table import (
    Kind,
    Leg,
    PeerPlan,
    in_packets,
    in_tiles,
    plan,
    staged,
    stretches,
)
from halox.runtime.device_arena import DeviceArena, DeviceBlock, DevicePlace, Segment
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy, multiprocessors
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.memory import PinnedBuffer
from halox.runtime.gpu.pools import HOST_WORDS
from halox.runtime.world import World

_NOTHING = Row(0, 0, 16, ())
_LINE = 128
_ALIGNMENT = 256


@dataclass(frozen=True)
class Granted:
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


class Draft:
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
        self._takes = [end_of(job, message, ways[message.key]) for message in job.receives]
        self._sends = self._sent(ways, exported)
        self.peers = sorted({m.peer for m in (*job.sends, *job.receives)})
        self._to, self._of = {m.peer for m in job.sends}, {m.peer for m in job.receives}
        self._block: DeviceBlock | None = None
        self._own: DeviceBlock | None = None
        self.failure: PinnedBuffer | None = None
        self._memory = _Memory()

    def _sent(
        self, ways: Mapping[tuple[str, int, int], str], exported: Mapping[Tag, Exported | None]
    ) -> list[End]:
        job, targets = self.job, []
        for message in job.sends:
            if ways[message.key] == "direct":
                there = exported[message.peer, message.tag]
                assert there is not None
                self.arena.open(there.handles)
                places = zip(there.places, there.layouts, strict=True)
                sides = [Side(self.arena.pointer(place), layout) for place, layout in places]
                targets.append((message, sides))
        direct = {end.tag: end for end in direct_ends(job, targets, multiprocessors(self.device))}
        return [
            direct.get((message.peer, message.tag)) or end_of(job, message, ways[message.key])
            for message in job.sends
        ]

    def announced(self) -> dict[int, dict[int, Announced]]:
        """Return what each peer must know of the messages it gets."""
        found: dict[int, dict[int, Announced]] = {peer: {} for peer in self.peers}
        for end in self._sends:
            chunks = sum(stretch.chunks for stretch in end.stretches)
            found[end.message.peer][end.message.tag] = Announced(end.signature, chunks)
        return found

    def grant(self, announced: Mapping[int, Mapping[int, Announced]]) -> dict[int, Granted]:
        """Allocate this rank's memory, and return where each peer puts what it sends."""
        memory, ends = self._memory, {end.tag: end for end in self._takes}
        self._incoming = {
            end.tag: announced[end.message.peer][end.message.tag] for end in self._takes
        }
        memory.reserve("state", 16)
        for peer in self.peers:
            memory.reserve(("begun", peer), _LINE)
        for tag, other in self._incoming.items():
            ends[tag].widen(other.signature)
            memory.reserve(("flags", *tag), 4 * other.chunks)
            memory.reserve(("staging", *tag), 2 * ends[tag].staging_bytes)
        for end in (*self._sends, *self._takes):
            if end.buffered:
                memory.reserve(("buffer", *end.message.key), end.message.packed_bytes)
        memory.reserve("peers", 8 * len(self.peers))
        self._block = self.arena.allocate(memory.size)
        with cupy().cuda.Device(self.device):
            cupy().cuda.runtime.memset(self._block.pointer, 0, memory.size)
            cupy().cuda.runtime.deviceSynchronize()
        self.failure = HOST_WORDS.take(self.device)
        self.failure.array[:] = 0
        for end in (*self._sends, *self._takes):
            if end.buffered:
                end.buffer = self._pointer(("buffer", *end.message.key))
        handles = self.arena.handles([self._block.place])
        return {
            peer: Granted(
                handles,
                self._place(("begun", peer)),
                {
                    tag: (
                        self._place(("staging", p, tag)),
                        ends[p, tag].staging_bytes,
                        ends[p, tag].is_wide,
                    )
                    for p, tag in self._incoming
                    if p == peer
                },
                {tag: self._place(("flags", p, tag)) for p, tag in self._incoming if p == peer},
            )
            for peer in self.peers
        }

    def open(self, granted: Mapping[int, Granted]) -> None:
        """Map the peers' memory."""
        self._granted = granted
        for answer in granted.values():
            self.arena.open(answer.handles)

    def prepared(self) -> tuple[PreparedLaunch, PreparedLaunch]:
        """Return the launch, and that for beside other work; memory that its table needs is allocated here."""
        legs = [*self._copy_legs(), *self._send_legs(), *self._take_legs()]
        planned = plan(legs, sms=multiprocessors(self.device))
        return self._prepare(planned)

    def _copy_legs(self) -> list[Leg]:
        copies = []
        for send, take in zip(self._copies.sends, self._copies.receives, strict=True):
            for a, b in zip(send.parts, take.parts, strict=True):
                copies.append(Copy(whole(self.job, a), whole(self.job, b)))
        return [Leg(Kind.COPY, s.row, 0) for s in stretches(copies, packed=1)]

    def _send_legs(self) -> list[Leg]:
        legs = []
        for number, end in enumerate(self._sends):
            peer, tag = end.tag
            answer = self._granted[peer]
            begun = self._pointer(("begun", peer))
            waits = {"begun": begun, "lag": 1} if peer not in self._of else {}
            place, slot_bytes, end.is_wide = answer.staging[tag]
            base = self.arena.pointer(place)
            if end.way == "direct":
                waits = {"begun": begun, "lag": 0}
                base = 0  # these rows hold the peer's addresses already
            flags = self.arena.pointer(answer.flags[tag])
            for stretch in end.stretches:
                row = stretch.row
                if end.buffered:
                    row = row._replace(source=row.source + end.buffer)
                if end.is_wide:
                    row = in_tiles(row, 1, base)
                    legs.append(Leg(Kind.SEND_WIDE, row, number, slot_bytes=slot_bytes, **waits))
                    base += stretch.tile_bytes
                    continue
                if end.way == "ll":
                    row = in_packets(row, 1, base)
                    legs.append(Leg(Kind.SEND_LL, row, number, slot_bytes=slot_bytes, **waits))
                    continue
                kind = Kind.SEND_STAGED if end.way == "staging" else Kind.SEND_DIRECT
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
        for number, end in enumerate(self._takes, len(self._sends)):
            announced = self._incoming[end.tag]
            flags = self._pointer(("flags", *end.tag))
            if end.way == "direct":
                legs.append(
                    Leg(Kind.TAKE_DIRECT, _NOTHING, number, 1, flags, flag_count=announced.chunks)
                )
                continue
            base, slot_bytes = self._pointer(("staging", *end.tag)), end.staging_bytes
            mine, theirs = ([s[:3] for s in both] for both in (end.signature, announced.signature))
            matching = mine == theirs and all(s[0] >= 0 for s in mine)
            for stretch in end.stretches:
                row = stretch.row
                if end.buffered:
                    row = row._replace(target=row.target + end.buffer)
                if end.is_wide:
                    row = in_tiles(row, 0, base)
                    legs.append(Leg(Kind.TAKE_WIDE, row, number, slot_bytes=slot_bytes))
                    base += stretch.tile_bytes
                    continue
                if end.way == "ll":
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

    def _prepare(self, planned: PeerPlan) -> tuple[PreparedLaunch, PreparedLaunch]:
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
        exchange["send_chunks"], exchange["chunks"] = planned.send_chunks, planned.chunks
        exchange["legs"] = len(planned.legs)

        def launch(send_blocks: int, blocks: int) -> PreparedLaunch:
            exchange["send_blocks"] = send_blocks
            return PreparedLaunch(
                kernel("peer", "peer_exchange", self.device, planned.defines),
                blocks,
                planned.threads,
                [
                    (ctypes.c_char * data.nbytes).from_buffer_copy(data.tobytes())
                    for data in (parameter, exchange)
                ],
                device=self.device,
                dependent=True,
            )

        shape = planned.send_blocks, planned.blocks
        at_once = launch(*shape)
        return at_once, at_once if planned.aside == shape else launch(*planned.aside)

    @staticmethod
    def _upload(pointer: int, data: npt.NDArray[Any]) -> None:
        runtime = cupy().cuda.runtime
        runtime.memcpy(pointer, data.ctypes.data, data.nbytes, runtime.memcpyHostToDevice)

    def around(self) -> tuple[list[Any], list[Any]]:
        """Return the launches before and after the kernel: of types that it does not walk, and of additions."""

        def moves(ends: Sequence[End]) -> list[Any]:
            return [
                ((self.job.arrays[part.array], part.datatype, part.count), end.buffer + offset)
                for end in ends
                if end.buffered
                for part, offset in zip(end.message.parts, end.message.offsets, strict=True)
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
        """Give the memory back; no rank may use it any more."""
        for block in (self._block, self._own):
            if block is not None:
                self.arena.release(block)
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
