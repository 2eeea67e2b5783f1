"""The channel of the copy engine: GPUs that map one another's arrays; interprocess events order their streams.

The sender puts a message if the receiver's arrays can be mapped; otherwise the receiver gets it. As on the ``ipc`` path
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

Interprocess events cannot be captured in CUDA graphs. A captured exchange waits for flags in device memory instead
(`halox.paths.scatter_gather.graph_flags`), if the driver can capture such waits; the host takes no part in a replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halox.errors import StateError
from halox.paths.base import Job, Key
from halox.paths.in_place import InPlaceChannel
from halox.paths.messages import Message
from halox.paths.node import NodeLink
from halox.paths.scatter_gather.agreement import AgreeingChannel, Exports, Proposals
from halox.paths.scatter_gather.copy_engine import CopyEngine
from halox.paths.scatter_gather.engine import Direction, Transfer
from halox.paths.scatter_gather.graph_flags import GraphFlags
from halox.paths.scatter_gather.keys import Keys, Memory
from halox.paths.scatter_gather.windows import MessageBlocks
from halox.runtime.arrays import Described, span
from halox.runtime.device_arena import Allocation, DevicePlace
from halox.runtime.gpu.ipc_events import EventPool
from halox.runtime.gpu.pools import SIDE_STREAMS
from halox.runtime.gpu.stream_words import why_not_captured
from halox.runtime.gpu.streams import CallStreams, refuse_loop


@dataclass(frozen=True)
class CopyRecord:
    """Description of a rank for a peer."""

    exports: Exports  # keys of the messages that the peer moves
    segments: dict[Allocation, bytes]  # handles of the memory of these keys
    ready: int  # numbers of this rank's events
    moved: int
    events: dict[int, bytes]  # handles of these events
    # Words that the peer sets in captured exchanges; or the reason why captures are impossible.
    flags: DevicePlace | str


class CopyChannel(InPlaceChannel, AgreeingChannel):
    """Moves arrays between GPUs by copies of the CUDA driver; see the module.

    Local. Streams wait for the peers' streams; the host waits only for the peers' hosts, and during a capture for
    nothing.
    """

    def __init__(
        self,
        job: Job,
        directions: Mapping[Key, Direction],
        keys: Keys,
        engine: CopyEngine,
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
        self._prepare(link.world, keys, job.messages)
        self._directions, self._engine, self._events = directions, engine, events
        self._arrays: Sequence[Described] = job.arrays
        self._numbers = events.acquire(2)
        self._streams = CallStreams("scatter_gather")
        self._stream = 0
        self._side = SIDE_STREAMS.acquire(engine.device)
        self._is_concurrent = self._is_captured = False
        self._transfers: list[Transfer] = []
        self._wait_ready: list[int] = []
        self._wait_moved: list[int] = []
        self._why_not_captured = why_not_captured(engine.device)
        self._flags = GraphFlags(engine.arena, self._accessed, self._accessing)

    def _memory(self, blocks: MessageBlocks) -> list[Memory]:
        memory = []
        for number in blocks.arrays:
            array = self._arrays[number]
            before, behind = span(array.shape, array.strides, array.dtype.itemsize)
            address = array.pointer - before
            memory.append(Memory(array.pointer, address, before + behind, None))
        return memory

    def exports(self, theirs: Mapping[int, Proposals]) -> dict[int, CopyRecord]:
        """Map the keys, and return this rank's description for each peer."""
        self._map(theirs)
        exports = self._exported(self._moved_by_peer)
        ready, moved = self._numbers
        why, flags_memory = self._why_not_captured, self._flags.handles()
        records = {}
        for peer in sorted({m.peer for m in self.messages}):
            segments = dict(flags_memory)
            for _, exported in exports.get(peer, {}).values():
                for key in exported.keys or ():  # old keys: the peer has opened their memory
                    segments |= self._engine.arena.handles(key.blocks[0])
            handles = self._events.handles(self._numbers)
            flags = self._flags.place(peer) if why is None else why
            records[peer] = CopyRecord(
                exports.get(peer, {}), segments, ready, moved, handles, flags
            )
        return records

    def open(self, theirs: Mapping[int, CopyRecord]) -> None:
        """Map the peers' memory and events, and prepare the copies."""
        from halox.runtime.gpu.cuda import cupy

        runtime = cupy().cuda.runtime
        self._record, self._wait = runtime.eventRecord, runtime.streamWaitEvent
        for peer, record in theirs.items():
            self._engine.arena.open(record.segments)
            self._events.open(peer, record.events)
        opened = self._events.opened
        self._wait_ready = [opened(peer, theirs[peer].ready) for peer in self._accessed]
        self._wait_moved = [opened(peer, theirs[peer].moved) for peer in self._accessing]
        self._ready_event, self._moved_event = map(self._events.own, self._numbers)
        flags = {}
        for peer, record in theirs.items():
            if isinstance(record.flags, str):
                self._why_not_captured = self._why_not_captured or f"on rank {peer} {record.flags}"
            else:
                flags[peer] = record.flags
        if self._why_not_captured is None:
            self._flags.open(flags)
        for m in self._moving:
            _, exported = theirs[m.peer].exports[m.opposite]
            remote = self._keys.accept(m.peer, exported)
            self._transfers += [
                self._engine.transfer(self._directions[m.key], key, other, m.peer)
                for key, other in zip(self._own[m.key].keys, remote, strict=True)
            ]

    def check(self) -> None:
        """Refuse captures without driver support or of half an exchange, and calls behind a capture."""
        refuse_loop("the scatter_gather path")
        is_captured = self._why_not_captured is None and self._streams.is_captured
        if self._is_concurrent and is_captured != self._is_captured:
            raise StateError(
                "start() and finish() of an exchange must both be captured in one CUDA graph, or neither; "
                f"call finish() {'in' if self._is_captured else 'after'} the capture"
            )
        if not is_captured:
            self._streams.check(self._why_not_captured or "another stream is captured")
        self._is_captured = is_captured

    def start(self) -> None:
        """Permit access to this rank's arrays after the present work of the stream; copies wait for no later work."""
        before, current = self._side.before.ptr, self._streams.enter()
        self._record(before, current)
        self._wait(self._side.stream.ptr, before)
        self._stream, self._is_concurrent = self._side.stream.ptr, True
        if self._is_captured:
            self._flags.signal_ready(current)
        else:
            super().start()

    def run(self) -> None:
        """Permit access to this rank's arrays after the present work of the stream."""
        if not self._is_concurrent:
            self._stream = self._streams.enter()
        if self._is_captured:
            self._flags.signal_ready(self._stream)
            return
        if self._accessing:
            self._record(self._ready_event, self._stream)
        super().run()

    def finish(self) -> None:
        """Put the copies on their stream, and make the current stream wait for them and for the peers' copies."""
        if not self._is_concurrent:
            self._stream = self._streams.enter()
        if self._is_captured:
            self._flags.consume_ready(self._stream)
            for transfer in self._transfers:
                transfer(self._stream)
            self._flags.end(self._stream)
        else:
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
            transfer(stream)
        self._record(self._moved_event, stream)

    def close(self) -> None:
        """Leave an exchange that is under way, and wait until the streams have finished with the memory."""
        super().close()
        if self.has_ended:
            self.has_ended = self._streams.end(self._world.waiter(), self._side.stream)
        super().release_keys()

    def release_keys(self) -> None:
        """Release the keys, and drop the copies between them, which have already been enqueued."""
        self._transfers = []
        super().release_keys()

    def free(self) -> None:
        """Release the events and the flags."""
        super().free()
        self._flags.free()
        self._events.release(self._numbers)
        self._numbers = []
        if self.has_ended:
            SIDE_STREAMS.release(self._engine.device, self._side)


def _is_mover(message: Message, direction: Direction) -> bool:
    """Whether this rank moves a message."""
    return (message.direction == "send") == (direction == "put")
