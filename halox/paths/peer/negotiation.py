"""Negotiation of a peer channel: how ranks agree on the memory, segments and launches of the ``peer`` path.

The sender of each message sends a record "ready to send" (`Rts`) with the runs of the message. The receiver allocates
staging memory and flags for them, and replies "clear to send" (`Cts`) with their addresses. Each rank then makes the
table of segments for its kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.errors import ExchangeTimeoutError
from halox.packing.refine import Copy, Side
from halox.packing.strided_plan import StridedRow
from halox.paths.base import Job, Key
from halox.paths.launches import ArrayLaunches, Item, copying, packed_items, packing, unpacking
from halox.paths.peer.endpoints import (
    PeerEndpoint,
    PeerInfo,
    Rts,
    Tag,
    array_side,
    direct_endpoints,
    endpoint_of,
)
from halox.paths.peer.table import (
    MOST_SHIFTS,
    PACKET_EXPANSION,
    Kind,
    PeerPlan,
    Segment,
    plan,
    repacked,
    runs,
    shifts_of,
)
from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy, multiprocessors
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.pools import FailureWord
from halox.runtime.segments import Block, Place, SegmentKey
from halox.runtime.world import World
from halox.values import rounded_up

_NOTHING = StridedRow(0, 0, 16, ())
_LINE = 128
_ALIGNMENT = 256

EXCHANGE = np.dtype(
    [
        ("state", "u8"),
        ("begun_chunk", "u8"),
        ("peers", "u8"),
        ("failure", "u8"),
        ("limit_ns", "u8"),
        ("peer_count", "u4"),
        ("segments", "u4"),
        ("send_chunks", "u4"),
        ("chunks", "u4"),
        ("send_blocks", "u4"),
        ("parts", "u4"),
        ("shift", "u8", (MOST_SHIFTS,)),
    ]
)
"""Second parameter of the kernel, as in ``peer.cu``."""
_SHIFTS_AT = EXCHANGE.itemsize - 8 * MOST_SHIFTS
_NO_COPIES, _ONLY_COPIES = 1, 2  # values of "parts"


@dataclass(frozen=True)
class Cts:
    """Clear to send: the receiver's reply to a peer, with staging and flag addresses."""

    handles: Mapping[SegmentKey, bytes]
    begun: Place
    staging: dict[int, tuple[Place, int, bool]] = field(default_factory=dict)
    """By tag: place, bytes of a slot, and whether the message travels in LL128-like packets."""
    flags: dict[int, Place] = field(default_factory=dict)


_RegionName = str | tuple[object, ...]
"""Name of a region in this rank's block."""


@dataclass
class _Memory:
    """Layout of this rank's block: its size, and the offset of each region."""

    size: int = 0
    at: dict[_RegionName, int] = field(default_factory=dict)

    def reserve(self, key: _RegionName, nbytes: int) -> None:
        self.at[key] = self.size
        self.size += rounded_up(max(nbytes, 1), _ALIGNMENT)


@dataclass
class LaunchSet:
    """All launches of an exchange: the kernel, and the launches around it."""

    alone: PreparedLaunch  # the kernel for an exchange without other work at the same time
    concurrent: PreparedLaunch  # the kernel for an exchange beside other work: fewer blocks
    remote: PreparedLaunch  # the same without the copies within the rank
    copies: Any  # the launch of these copies alone, None if there are none
    before: list[ArrayLaunches]
    after: list[ArrayLaunches]

    def shift(self, shifts: Sequence[int]) -> None:
        """Shift the arrays of the kernel's table, modulo 2**64, by multiples of the longest word, from now on."""
        for launch in filter(None, (self.alone, self.concurrent, self.remote, self.copies)):
            known = (ctypes.c_uint64 * MOST_SHIFTS).from_buffer(launch.args[1], _SHIFTS_AT)
            for number, shift in enumerate(shifts, 1):
                known[number] = shift


class Negotiation:
    """A channel under construction, round by round; see `halox.runtime.handshake`."""

    def __init__(
        self,
        world: World,
        arena: DeviceArena,
        job: Job,
        copies: Job,
        protocols: Mapping[Key, str],
        infos: Mapping[Tag, PeerInfo],
    ) -> None:
        self.world, self.arena, self.device, self.job = world, arena, arena.device, job
        self._copies = copies
        self._receives = [endpoint_of(job, m, protocols[m.key]) for m in job.receives]
        self._sends = self._send_endpoints(protocols, infos)
        self.peers = job.peers
        self._target_ranks = {m.peer for m in job.sends}
        self._source_ranks = {m.peer for m in job.receives}
        self._block: Block | None = None  # memory that the peers map
        self._own: list[Block] = []  # memory that only this rank uses
        self.failure: FailureWord | None = None
        self._memory = _Memory()

    def _send_endpoints(
        self, protocols: Mapping[Key, str], infos: Mapping[Tag, PeerInfo]
    ) -> list[PeerEndpoint]:
        job, targets = self.job, []
        for message in job.sends:
            if protocols[message.key] == "direct":
                there = infos[message.peer, message.tag]
                assert there.places is not None and there.layouts is not None
                self.arena.open(there.handles)
                places = zip(there.places, there.layouts, strict=True)
                sides = [Side(self.arena.pointer(place), layout) for place, layout in places]
                targets.append((message, sides))
        direct = {
            end.tag: end for end in direct_endpoints(job, targets, multiprocessors(self.device))
        }
        return [
            direct.get((message.peer, message.tag))
            or endpoint_of(job, message, protocols[message.key])
            for message in job.sends
        ]

    def request(self, _: object) -> dict[int, dict[int, Rts]]:
        """Return, for each peer, the records of the messages to that peer, by tag."""
        records: dict[int, dict[int, Rts]] = {peer: {} for peer in self.peers}
        for end in self._sends:
            peer, tag = end.tag
            records[peer][tag] = Rts(end.signature, sum(run.chunks for run in end.runs))
        return records

    def reply(self, requests: Mapping[int, Mapping[int, Rts]]) -> dict[int, Cts]:
        """Allocate this rank's memory, and return for each peer the addresses to which it may store."""
        memory = self._memory
        self._rts = {end.tag: requests[end.tag[0]][end.tag[1]] for end in self._receives}
        memory.reserve("state", 16)
        for peer in self.peers:
            memory.reserve(("begun", peer), _LINE)
        for end in self._receives:
            rts = self._rts[end.tag]
            end.widen(rts.signature)
            memory.reserve(("flags", *end.tag), 4 * rts.chunks)
            memory.reserve(("staging", *end.tag), 2 * end.staging_bytes)
        buffered = [end for end in (*self._sends, *self._receives) if end.buffered]
        for end in buffered:
            memory.reserve(("buffer", *end.message.key), end.message.packed_bytes)
        memory.reserve("peers", 8 * len(self.peers))
        self._block = self.arena.allocate(memory.size)
        with cupy().cuda.Device(self.device):
            cupy().cuda.runtime.memset(self._block.pointer, 0, memory.size)
            cupy().cuda.runtime.deviceSynchronize()
        self.failure = FailureWord(self.device)
        for end in buffered:
            end.buffer = self._pointer(("buffer", *end.message.key))
        handles = self.arena.handles([self._block.place])
        replies = {peer: Cts(handles, self._place(("begun", peer))) for peer in self.peers}
        for end in self._receives:
            peer, tag = end.tag
            staging = self._place(("staging", peer, tag))
            replies[peer].staging[tag] = staging, end.staging_bytes, end.is_wide
            replies[peer].flags[tag] = self._place(("flags", peer, tag))
        return replies

    def open(self, replies: Mapping[int, Cts]) -> None:
        self._cts = replies
        for reply in replies.values():
            self.arena.open(reply.handles)

    @property
    def is_movable(self) -> bool:
        """Whether all launches can move to other arrays of the same layouts."""
        ends = (*self._sends, *self._receives)
        return (
            len(self.job.arrays) < MOST_SHIFTS
            and all(end.protocol != "direct" for end in ends)
            and all(send.array == receive.array for send, receive in self._copies.pairs())
        )

    def prepared(self) -> LaunchSet:
        """Return all launches of an exchange; allocates the memory of their tables."""
        copies = [
            Segment(Kind.COPY, run.row, 0, shifts=shifts_of(send.array, receive.array))
            for send, receive in self._copies.pairs()
            for run in runs(
                [Copy(array_side(self.job, send), array_side(self.job, receive))],
                packed=1,
                tiles=True,
            )
        ]
        return self._launches(copies, self._sends, self._receives)

    def through_buffers(self) -> LaunchSet:
        """Return launches for arrays at any addresses: parts are packed to buffers, and unpacked from buffers.

        These launches send and receive the same chunks as the launches of `prepared`. Local; waits for the GPU.
        """
        ends = [*self._sends, *self._receives]
        block = self.arena.allocate(sum(end.message.packed_bytes for end in ends))
        self._own.append(block)
        at, buffered = block.pointer, []
        for end in ends:
            buffered.append(end if end.buffered else end.through_buffer(at))
            at += end.message.packed_bytes
        n = len(self._sends)
        launches = self._launches([], buffered[:n], buffered[n:])
        if self._copies.sends:
            launches.copies = copying(self._copies, [*self._copies.pairs()], self.device)
            launches.after.append(launches.copies)
        return launches

    def _launches(
        self, copies: list[Segment], sends: Sequence[PeerEndpoint], receives: Sequence[PeerEndpoint]
    ) -> LaunchSet:
        """Return the kernel's launches, with launches around it for types that it cannot move and for additions."""
        segments = [*copies, *self._send_segments(sends), *self._receive_segments(receives)]
        kernels = self._prepare(plan(segments, sms=multiprocessors(self.device)))
        before, after = (self._buffered_items(ends) for ends in (sends, receives))
        return LaunchSet(
            *kernels,
            [packing(self.job, before, self.device)] if before else [],
            [unpacking(self.job, after, self.device)] if after else [],
        )

    @staticmethod
    def _buffered_items(ends: Sequence[PeerEndpoint]) -> list[Item]:
        buffered = [end for end in ends if end.buffered]
        return packed_items([end.message for end in buffered], [end.buffer for end in buffered])

    def _send_segments(self, sends: Sequence[PeerEndpoint]) -> list[Segment]:
        segments: list[Segment] = []
        for number, end in enumerate(sends):
            peer, tag = end.tag
            cts, begun = self._cts[peer], self._pointer(("begun", peer))
            place, slot_bytes, end.is_wide = cts.staging[tag]
            flags, base = self.arena.pointer(cts.flags[tag]), self.arena.pointer(place)
            common = Segment(Kind.SEND_STAGED, _NOTHING, number, slot_bytes=slot_bytes)
            if end.protocol == "direct":
                common = common._replace(kind=Kind.SEND_DIRECT, begun=begun)
                base = 0  # these rows already hold the peer's addresses
            elif peer not in self._source_ranks:
                common = common._replace(begun=begun, lag=1)
            segments += _segments_of(end, common, base, flags, packed=1)
        return segments

    def _receive_segments(self, receives: Sequence[PeerEndpoint]) -> list[Segment]:
        segments: list[Segment] = []
        for number, end in enumerate(receives, len(self._sends)):
            rts, flags = self._rts[end.tag], self._pointer(("flags", *end.tag))
            common = Segment(Kind.TAKE_STAGED, _NOTHING, number, flag_count=rts.chunks)
            if end.protocol == "direct":
                segments.append(common._replace(kind=Kind.TAKE_DIRECT, chunk_words=1, flags=flags))
                continue
            mine, theirs = (
                [s[:3] for s in signature] for signature in (end.signature, rts.signature)
            )
            if mine == theirs and all(s[0] >= 0 for s in mine):
                common = common._replace(flag_count=0)
            common = common._replace(slot_bytes=end.staging_bytes)
            base = self._pointer(("staging", *end.tag))
            segments += _segments_of(end, common, base, flags, packed=0)
        return segments

    def _prepare(
        self, planned: PeerPlan
    ) -> tuple[PreparedLaunch, PreparedLaunch, PreparedLaunch, PreparedLaunch | None]:
        runtime = cupy().cuda.runtime
        parameter = planned.table
        table_bytes = 0 if planned.inline else rounded_up(parameter.nbytes, _ALIGNMENT)
        # A separate block for memory that only this rank uses; its size is known only now.
        block = self.arena.allocate(table_bytes + 4 * max(planned.send_chunks, 1))
        self._own.append(block)
        own = block.pointer
        with cupy().cuda.Device(self.device):
            runtime.memset(own, 0, block.nbytes)
            if table_bytes:
                self._upload(own, parameter)
                parameter = np.array([own, own + planned.segments.nbytes], np.uint64)
            # Peers that wait until this rank has begun: senders of direct messages, and senders that get nothing back.
            waiting = sorted(
                {s.message.peer for s in self._receives if s.protocol == "direct"}
                | (self._source_ranks - self._target_ranks)
            )
            addresses = [self.arena.pointer(self._cts[peer].begun) for peer in waiting]
            # Equal for all launch sets, so that this upload changes nothing for a launch that still runs.
            self._upload(self._pointer("peers"), np.array(addresses, np.uint64))
            runtime.deviceSynchronize()
        exchange = np.zeros(1, EXCHANGE)
        exchange["state"], exchange["begun_chunk"] = self._pointer("state"), own + table_bytes
        exchange["peers"], exchange["peer_count"] = self._pointer("peers"), len(addresses)
        assert self.failure is not None
        exchange["failure"] = self.failure.pointer
        exchange["limit_ns"] = int(self.world.limit_s * 1e9)
        exchange["send_chunks"], exchange["chunks"] = planned.send_chunks, planned.chunks
        exchange["segments"] = len(planned.segments)

        def launch(send_blocks: int, blocks: int, parts: int = 0) -> PreparedLaunch:
            exchange["send_blocks"], exchange["parts"] = send_blocks, parts
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
        first = launch(*shape)
        second = first if planned.concurrent == shape else launch(*planned.concurrent)
        if Kind.COPY not in planned.segments["kind"]:
            return first, second, second, None
        remote = launch(*planned.concurrent, _NO_COPIES)
        exchange["peer_count"] = 0  # copies alone signal nothing
        return first, second, remote, launch(shape[0], shape[0], _ONLY_COPIES)

    @staticmethod
    def _upload(pointer: int, data: npt.NDArray[np.generic]) -> None:
        runtime = cupy().cuda.runtime
        runtime.memcpy(pointer, data.ctypes.data, data.nbytes, runtime.memcpyHostToDevice)

    def error(self) -> ExchangeTimeoutError:
        assert self.failure is not None
        number, epoch = self.failure.words[:2]
        call = "accumulation" if self.job.operation == "add" else "exchange"
        peer = [*self._sends, *self._receives][number - 1].message.peer
        return ExchangeTimeoutError(
            f"rank {self.world.rank} has waited for rank {peer} in {call} {epoch} of a plan for "
            f"{self.world.limit_s:g} s (HALOX_TIMEOUT), on the GPU; what was received in it, and since, is not "
            "valid. A rank has failed, is far behind, or has made another sequence of calls"
        )

    def abandon(self) -> None:
        for block in (*self._own, self._block):
            if block is not None:
                self.arena.release(block)
        self._block, self._own = None, []
        if self.failure is not None:
            self.failure.close(self.error)

    def _pointer(self, key: _RegionName) -> int:
        assert self._block is not None
        return self._block.pointer + self._memory.at[key]

    def _place(self, key: _RegionName) -> Place:
        assert self._block is not None
        return self._block.place.at(self._memory.at[key])


def _segments_of(
    end: PeerEndpoint, common: Segment, base: int, flags: int, *, packed: int
) -> Iterator[Segment]:
    """Yield the segments of a message; its packed side, side 1 of a send or 0 of a receive, begins at ``base``.

    Each run has separate flags, unless all runs wait for all flags of the message.
    """
    kinds = (Kind.TAKE_LL, Kind.TAKE_WIDE), (Kind.SEND_LL, Kind.SEND_WIDE)
    for run in end.runs:
        row = run.row
        common = common._replace(
            shifts=shifts_of(*((run.array, -1) if packed else (-1, run.array)))
        )
        if end.buffered:  # the side opposite the packed message is this rank's buffer
            side = ("target", "source")[packed]
            row = row._replace(**{side: getattr(row, side) + end.buffer})
        if end.is_wide:
            unflagged = common._replace(kind=kinds[packed][1], flag_count=0)
            yield unflagged._replace(row=repacked(row, packed, base, 0))
            base += run.tile_bytes
        elif end.protocol == "ll":
            unflagged = common._replace(kind=kinds[packed][0], flag_count=0)
            yield unflagged._replace(row=repacked(row, packed, base, PACKET_EXPANSION))
        else:
            row = repacked(row, packed, base)
            yield common._replace(row=row, chunk_words=run.chunk_words, flags=flags)
            if not common.flag_count:
                flags += 4 * run.chunks
