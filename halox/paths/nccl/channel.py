"""Exchanges by NCCL: pack kernels, one group of sends and receives, unpack kernels, all in order on one stream.

Between two ranks NCCL matches sends and receives in their order: the order of the tags. There is one buffer per
message; the stream has unpacked it before the next exchange receives into it.

All ranks must put the exchanges of all plans on their streams in the same order, since NCCL runs the operations of one
communicator in sequence. To detect other orders, each buffer begins with the plan's name, written when the plan is
made, and the unpacking kernel checks the name of each message::

    | name | packed parts ... |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from halox.paths.base import Job
from halox.paths.launches import (
    ArrayLaunches,
    MovableChannel,
    View,
    clearing_of,
    packed_items,
    packing,
    unpacking,
)
from halox.paths.messages import Message
from halox.paths.stream_channel import StreamChannel
from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu.marks import Mark, MarkLaunch
from halox.runtime.gpu.nccl import NcclOp
from halox.runtime.gpu.streams import Stream, refuse_loop
from halox.runtime.nccl_ranks import AHEAD_BYTES, NcclRanks, Watch, write
from halox.runtime.world import World
from halox.values import rounded_up

_ALIGNMENT = 512


class Agreed(NamedTuple):
    """Result of `NcclPath.negotiate`."""

    ranks: NcclRanks
    name: int  # of the plan, the same on all ranks
    copies: Job  # this rank's messages to itself, which the packing launch copies


class NcclChannel(StreamChannel, MovableChannel):
    """All messages of a plan that NCCL carries, and copies within the rank; see the module. Local."""

    def __init__(self, world: World, job: Job, agreed: Agreed, arena: DeviceArena) -> None:
        super().__init__(arena.device)
        self._arena, ranks, name = arena, agreed.ranks, agreed.name
        # The block: a table with the addresses of the received names, then the buffers.
        nbytes = rounded_up(8 * len(job.receives), _ALIGNMENT)
        offsets = []
        for message in job.messages:
            offsets.append(nbytes)
            nbytes += rounded_up(_sent_bytes(message), _ALIGNMENT)
        self._block = arena.allocate(nbytes)
        table = int(arena.pointer(self._block.place))
        starts = [table + offset for offset in offsets]
        sent, received = starts[: len(job.sends)], starts[len(job.sends) :]
        packed, unpacked = (
            packed_items(messages, [start + AHEAD_BYTES for start in of])
            for messages, of in ((job.sends, sent), (job.receives, received))
        )
        written = dict.fromkeys(sent, np.array([name], "u4"))
        if received:  # otherwise there is no table, and its place belongs to the first message
            written[table] = np.array(received, "u8")
        write(self._device, written)
        sources = [m.peer for m in job.receives]
        self._watch = watch = Watch(
            ranks, "an exchange", job.peers, name, table, sources, world.limit_s
        )
        begin, end = watch.begin, watch.end
        self._before: list[ArrayLaunches] = []
        self._after = clearing_of(job, self._device)
        # Launches of marks, if no packing or unpacking kernel sets them.
        self._begin = _marked(begin, packed, self._device)
        self._end = _marked(end, unpacked, self._device)
        pairs = [*agreed.copies.pairs()]
        if packed or pairs:
            mark = begin if packed else None
            self._before.append(packing(job, packed, self._device, mark, pairs))
        if unpacked:
            self._after.append(unpacking(job, unpacked, self._device, end))
        self._movable = [*self._before, *self._after]
        self._group: Callable[[int], None] = ranks.prepared(
            [
                NcclOp(m.direction == "send", start, _sent_bytes(m), m.peer)
                for m, start in zip(job.messages, starts, strict=True)
            ]
        )
        self._collect()

    def bind(self, views: Sequence[View]) -> None:
        super().bind(views)
        self._collect()

    def _collect(self) -> None:
        """List the steps of a call, as functions of a stream's address."""
        before, after = (
            [launch for launches in around for launch in launches.stages]
            for around in (self._before, self._after)
        )
        self._packing = [*self._begin, *before]
        self._sending = [self._group, *self._end, *after]

    def check(self) -> None:
        """Refuse the capture of a loop: NCCL may add nodes for the host."""
        refuse_loop("the nccl path")

    def _enter(self, stream: Stream, is_concurrent: bool) -> None:
        self._watch.check()
        pointer = stream.ptr
        if self._order.last is not stream:
            self._order.follow(stream)
        for step in self._packing:
            step(pointer)
        if is_concurrent:
            self._runtime.eventRecord(self._side.before.ptr, pointer)
        for step in self._sending:
            step(pointer)

    def start_copied(self) -> None:
        self.start()
        # Packing also copies within the rank.
        self._runtime.streamWaitEvent(self._current_stream().ptr, self._side.before.ptr)

    def close(self) -> None:
        """Wait for the last exchange; warn of a mismatch that was not raised."""
        super().close()
        self.has_failed = self._watch.close()

    def free(self) -> None:
        self._arena.release(self._block)


def _sent_bytes(message: Message) -> int:
    return AHEAD_BYTES + message.offsets[-1] + message.parts[-1].nbytes


def _marked(
    mark: Mark | None, packed: Sequence[object], device: int
) -> list[Callable[[int], None]]:
    """Return the launch that sets a mark, if there is a mark and no kernel sets it."""
    return [] if mark is None or packed else [MarkLaunch(mark, device).at]
