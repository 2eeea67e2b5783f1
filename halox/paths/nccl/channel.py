"""Exchanges by NCCL: pack kernels, one group of sends and receives, unpack kernels, all in order on one stream.

Each end chooses how to pack and unpack. Each message, or each of its parts, travels as bytes in one send::

    "packed"  array -> pack -> buffer | send ... receive | buffer -> unpack -> array
    "parts"   array ------------------> send ... receive -------------------> array     a part that is one run of bytes
              array -> pack -> buffer | send ... receive | buffer -> unpack -> array    any other part

"packed" is one send per message; "parts" is one send per part, after one for the name below.

Between two ranks NCCL matches sends and receives in their order: the order of the tags, then of the parts. There is one
buffer per message; the stream has unpacked it before the next exchange receives into it.

All ranks must put the exchanges of all plans on their streams in the same order, since NCCL runs the operations of one
communicator in sequence. To detect other orders, each buffer begins with the plan's name, written when the plan is
made, and the unpacking kernel checks the name of each message::

    | name | packed parts ... |      "packed": one send; "parts": the name is sent, then each part
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from halox.paths.base import Job, Key
from halox.paths.launches import (
    ArrayLaunches,
    Item,
    MovableChannel,
    View,
    clearing_of,
    packing,
    unpacking,
)
from halox.paths.messages import Message, Part
from halox.paths.stream_channel import StreamChannel
from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu.marks import Mark, MarkLaunch
from halox.runtime.gpu.nccl import NcclOp
from halox.runtime.gpu.streams import Stream, refuse_loop
from halox.runtime.nccl_ranks import AHEAD_BYTES, NAME_BYTES, NcclRanks, Watch, write
from halox.runtime.world import World
from halox.values import rounded_up

_ALIGNMENT = 512
_Views = tuple[Sequence[View], Sequence[int]]
"""Launches for other arrays, and the addresses of these arrays."""


class Agreed(NamedTuple):
    """Result of `NcclPath.negotiate`."""

    ranks: NcclRanks
    name: int  # of the plan, the same on all ranks
    copies: Job  # this rank's messages to itself, which the packing launch copies


class NcclChannel(StreamChannel, MovableChannel):
    """All messages of a plan that NCCL carries, and copies within the rank; see the module. Local."""

    def __init__(
        self,
        world: World,
        job: Job,
        protocols: Mapping[Key, str],
        agreed: Agreed,
        arena: DeviceArena,
    ) -> None:
        super().__init__(arena.device)
        ranks, name = agreed.ranks, agreed.name
        self._ranks, self._arena = ranks, arena
        self._adds = job.operation == "add"
        # The block: a table with the addresses of the received names, then the buffers.
        table_bytes = rounded_up(8 * len(job.receives), _ALIGNMENT)
        self._block = arena.allocate(table_bytes + sum(map(_buffer_bytes, job.messages)))
        table = int(arena.pointer(self._block.place))
        self._next = table + table_bytes  # address of the next message's buffer
        # Sends and receives. For a run in an array: the array's number, and an offset in place of the pointer.
        self._ops: list[tuple[int | None, NcclOp]] = []
        starts: list[int] = []
        packed = [item for m in job.sends for item in self._items(m, protocols[m.key], starts)]
        unpacked = [item for m in job.receives for item in self._items(m, protocols[m.key], starts)]
        sent, received = starts[: len(job.sends)], starts[len(job.sends) :]
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
        self._pointers: Sequence[int] = [array.pointer for array in job.arrays]
        self._group: Callable[[int], None] = self._grouped(self._pointers)
        self._collect()

    def _items(self, message: Message, protocol: str, starts: list[int]) -> list[Item]:
        """Add a message's sends or receives, and return the packed parts with their addresses.

        Appends the address of the message's buffer to ``starts``.
        """
        sends, peer = message.direction == "send", message.peer
        start = self._next
        starts.append(start)
        self._next += _buffer_bytes(message)
        at = [start + AHEAD_BYTES + offset for offset in message.offsets]
        items = [*zip(message.parts, at, strict=True)]
        if protocol == "packed":
            nbytes = AHEAD_BYTES + message.offsets[-1] + message.parts[-1].nbytes
            self._ops.append((None, NcclOp(sends, start, nbytes, peer)))
            return items
        self._ops.append((None, NcclOp(sends, start, NAME_BYTES, peer)))
        packed = []
        for part, address in items:
            run = run_of(part) if sends or not self._adds else None
            if run is None:
                packed.append((part, address))
                self._ops.append((None, NcclOp(sends, address, part.nbytes, peer)))
            else:
                self._ops.append((part.array, NcclOp(sends, run, part.nbytes, peer)))
        return packed

    def _grouped(self, pointers: Sequence[int]) -> Callable[[int], None]:
        return self._ranks.prepared(
            [
                op if array is None else op._replace(pointer=pointers[array] + op.pointer)
                for array, op in self._ops
            ]
        )

    def views(self, memories: Sequence[int]) -> _Views:  # type: ignore[override]
        return super().views(memories), memories

    def bind(self, views: _Views) -> None:  # type: ignore[override]
        launches, pointers = views
        super().bind(launches)
        if pointers != self._pointers and any(array is not None for array, _ in self._ops):
            self._group = self._grouped(pointers)
        self._pointers = pointers
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


def _buffer_bytes(message: Message) -> int:
    return rounded_up(AHEAD_BYTES + message.packed_bytes, _ALIGNMENT)


def _marked(
    mark: Mark | None, packed: Sequence[object], device: int
) -> list[Callable[[int], None]]:
    """Return the launch that sets a mark, if there is a mark and no kernel sets it."""
    return [] if mark is None or packed else [MarkLaunch(mark, device).at]


def run_of(part: Part) -> int | None:
    """Return the offset of a part in its array if the part is one run of bytes, else None."""
    strided = part.strided
    return strided.offset if strided is not None and not strided.counts else None
