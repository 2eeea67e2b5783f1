"""The protocol ``copy_engine``: the CUDA driver copies between GPUs of a node, or within a shared GPU, by no kernel.

The sender puts a message if the receiver's arrays can be mapped; otherwise the receiver gets it. The rank that moves it
gets the block list of the other end, and the places of the arrays, when a plan is made. It cuts both lists alike
(`halox.packing.common_blocks`) and prepares 2D and 3D copies (`halox.packing.copy_boxes`). As on the ``ipc`` path
(`halox.paths.ipc`) the host never waits for a GPU: flags say that an event *has been recorded*, and streams wait for
the events::

    put  B: ready | flag |                                       wait for A's flag | stream waits for moved
         A:       | flag | stream waits for ready | copy -> B's array | moved | flag
    get  A: ready | flag |                                       wait for B's flag | stream waits for moved
         B:       | flag | stream waits for ready | copy <- A's array | moved | flag

`run` puts the copies on the current stream. `start` puts them on a separate stream, behind the present work of the
current stream, so that they run concurrently with the work between `start` and `finish`.

One event of each kind is enough, since an event is recorded again only after all its waits have been enqueued. "ready"
is recorded again in the next exchange. By then this exchange has ended with the "read" flags of the ranks that access
this rank's arrays, and these ranks signal "read" after they have enqueued their waits for "ready". "moved" is recorded
again after the next "ready" flags of the ranks with arrays that this rank accesses. These ranks signal them after they
have ended this exchange, and with it enqueued their waits for "moved".

Interprocess events cannot be captured in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from halox.packing.common_blocks import BlockColumns, common_blocks
from halox.packing.copy_boxes import PreparedCopies, boxes_of
from halox.paths.base import Job, Key
from halox.paths.in_place import InPlaceChannel
from halox.paths.messages import Message
from halox.paths.node import NodeLink
from halox.paths.scatter_gather.blocks import blocks_of
from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu.ipc_events import EventPool
from halox.runtime.gpu.pools import SIDE_STREAMS
from halox.runtime.gpu.streams import CallStreams
from halox.runtime.handshake import connect
from halox.runtime.segments import Place, SegmentKey
from halox.runtime.world import World

Direction = Literal["put", "get"]


class MappedBlocks(NamedTuple):
    """One end of a message in memory that peers map: its blocks, and for each array the place of its first element."""

    blocks: BlockColumns
    places: dict[int, Place]


@dataclass(frozen=True)
class CopyRecord:
    """Description of a rank for a peer."""

    # Ends of the messages that the peer moves, by direction and tag.
    ends: dict[tuple[str, int], MappedBlocks]
    segments: dict[SegmentKey, bytes]  # handles of the memory that the peer accesses
    ready: int  # numbers of this rank's events
    moved: int
    events: dict[int, bytes]  # handles of these events


class CopyChannel(InPlaceChannel):
    """Moves arrays between GPUs by copies of the CUDA driver; see the module.

    Local. Streams wait for the peers' streams; the host waits only for the peers' hosts.
    """

    def __init__(
        self,
        job: Job,
        directions: Mapping[Key, Direction],
        arena: DeviceArena,
        events: EventPool,
        link: NodeLink,
    ) -> None:
        # Messages that this rank moves, and messages that its peers move.
        self._moving = [m for m in job.messages if _is_mover(m, directions[m.key])]
        self._moved_by_peer = [m for m in job.messages if not _is_mover(m, directions[m.key])]
        # Ranks whose arrays this rank accesses, and ranks that access this rank's arrays.
        self._accessed, self._accessing = (
            sorted({m.peer for m in messages}) for messages in (self._moving, self._moved_by_peer)
        )
        super().__init__(link, self._accessed, self._accessing)
        self._job, self._arena, self._events, self.messages = job, arena, events, job.messages
        self._streams = CallStreams("scatter_gather")
        self._stream = 0
        self._is_concurrent = False
        self._transfers: list[PreparedCopies] = []
        self._wait_ready: list[int] = []
        self._wait_moved: list[int] = []
        with ExitStack() as undo:
            self._numbers = events.acquire(2)
            undo.callback(events.release, self._numbers)
            self._side = SIDE_STREAMS.acquire(arena.device)
            undo.callback(SIDE_STREAMS.release, arena.device, self._side)
            undo.pop_all()

    def records(self) -> dict[int, CopyRecord]:
        ends: dict[int, dict[tuple[str, int], MappedBlocks]] = {}
        for m in self._moved_by_peer:
            ends.setdefault(m.peer, {})[m.direction, m.tag] = self._mapped(m)
        ready, moved = self._numbers
        records = {}
        for peer in self._job.peers:
            theirs = ends.get(peer, {})
            places = [place for end in theirs.values() for place in end.places.values()]
            segments = self._arena.handles(places)
            handles = self._events.handles(self._numbers)
            records[peer] = CopyRecord(theirs, segments, ready, moved, handles)
        return records

    def _mapped(self, message: Message) -> MappedBlocks:
        blocks, places = blocks_of(message), {}
        for number in np.unique(blocks.arrays).tolist():
            mine, pointer = blocks.arrays == number, self._job.arrays[number].pointer
            first = int(blocks.offsets[mine].min())
            end = int((blocks.offsets[mine] + blocks.lengths[mine]).max())
            place = self._arena.locate(pointer + first, pointer + end)
            assert place is not None, "a peer moves messages only of memory that it maps"
            places[number] = place.at(-first)
        return MappedBlocks(blocks, places)

    def open(self, theirs: Mapping[int, CopyRecord]) -> CopyChannel:
        """Map the peers' memory and events, prepare the copies, and return the channel."""
        from halox.runtime.gpu.cuda import cupy

        runtime = cupy().cuda.runtime
        self._record, self._wait = runtime.eventRecord, runtime.streamWaitEvent
        for peer, record in theirs.items():
            self._arena.open(record.segments)
            self._events.open(peer, record.events)
        opened = self._events.opened
        self._wait_ready = [opened(peer, theirs[peer].ready) for peer in self._accessed]
        self._wait_moved = [opened(peer, theirs[peer].moved) for peer in self._accessing]
        self._ready_event, self._moved_event = map(self._events.own, self._numbers)
        self._transfers = [self._prepared(m, theirs[m.peer].ends[m.opposite]) for m in self._moving]
        return self

    def _prepared(self, message: Message, theirs: MappedBlocks) -> PreparedCopies:
        """Prepare the copies of a message that this rank moves."""
        own = [array.pointer for array in self._job.arrays]
        other = [0] * (max(theirs.places) + 1)
        for number, place in theirs.places.items():
            other[number] = self._arena.pointer(place)
        ends = (blocks_of(message), own), (theirs.blocks, other)
        (source, sources), (target, targets) = ends if message.direction == "send" else ends[::-1]
        blocks = common_blocks(source, target).at(sources, targets)
        return PreparedCopies(boxes_of(blocks), self._arena.device)

    def abandon(self) -> None:
        self.close()
        self.free()

    def check(self) -> None:
        self._streams.check()

    def start(self) -> None:
        """Permit access to this rank's arrays after the present work of the stream; copies wait for no later work."""
        before, current = self._side.before.ptr, self._streams.enter()
        self._record(before, current)
        self._wait(self._side.stream.ptr, before)
        self._stream, self._is_concurrent = self._side.stream.ptr, True
        super().start()

    def run(self) -> None:
        """Permit access to this rank's arrays after the present work of the stream."""
        if not self._is_concurrent:
            self._stream = self._streams.enter()
        if self._accessing:
            self._record(self._ready_event, self._stream)
        super().run()

    def finish(self) -> None:
        """Put the copies on their stream, and make the current stream wait for them and for the peers' copies."""
        if not self._is_concurrent:
            self._stream = self._streams.enter()
        super().finish()
        for event in self._wait_moved:
            self._wait(self._stream, event)
        if self._is_concurrent:
            self._is_concurrent = False
            after = self._side.after.ptr
            self._record(after, self._stream)
            self._wait(self._streams.enter(), after)

    def _move(self) -> None:
        if not self._transfers:
            return
        stream = self._stream
        for event in self._wait_ready:
            self._wait(stream, event)
        for transfer in self._transfers:
            transfer.launch(stream)
        self._record(self._moved_event, stream)

    def close(self) -> None:
        """Leave an exchange that is under way, and wait until the streams have finished with the memory."""
        super().close()
        if self.has_ended:
            self.has_ended = self._streams.end(self._world.waiter(), self._side.stream)
        self._transfers = []

    def free(self) -> None:
        super().free()
        self._events.release(self._numbers)
        self._numbers = []
        if self.has_ended:
            SIDE_STREAMS.release(self._arena.device, self._side)


def make_channel(
    world: World,
    job: Job,
    directions: Mapping[Key, Direction],
    memory: tuple[DeviceArena, EventPool] | None,
    link: NodeLink | None,
) -> CopyChannel | None:
    """Make the channel of a job together with its peers, None on a rank without messages; collective over the world."""

    def begin() -> CopyChannel:
        assert memory is not None and link is not None
        return CopyChannel(job, directions, *memory, link)

    return connect(world, job.peers, begin, CopyChannel.records, CopyChannel.open)


def _is_mover(message: Message, direction: Direction) -> bool:
    return (message.direction == "send") == (direction == "put")
