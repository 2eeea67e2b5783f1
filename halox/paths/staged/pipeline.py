"""Packs, sends and unpacks large messages stage by stage, so that these three steps overlap.

A stage is one fragment of every large message (`halox.paths.fragments`). All stages are packed in sequence on the
user's stream. The host posts each stage as soon as its packing has ended, and enqueues the unpacking of each stage that
arrives on a separate stream of the channel, since stores to host memory and loads from it do not slow each other down::

    user's stream | pack 0 | pack 1 | pack 2 | pack 3 |                                        | user's kernels
    host            post 0 ->  post 1 ->  post 2 -> post 3
    MPI                       | 0 there ...| 1 there ...| 2 there ...| 3 there ...|
    own stream                              | unpack 0 | | unpack 1 | | unpack 2 | | unpack 3 |

`Work` has the GPU work of the pipeline; a test without a GPU replaces `Work`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from halox.paths.base import Job
from halox.paths.buffers import TransportBuffers
from halox.paths.launches import (
    MovableChannel,
    MovableLaunches,
    clearing_of,
    fragmented,
    packed_items,
    unpacking,
)
from halox.runtime.gpu import cuda
from halox.runtime.gpu.streams import Stream, refuse_capture
from halox.runtime.waiting import Waiter
from halox.runtime.world import World


class StreamedJob:
    """The packing and unpacking of a job, and the stream of the most recent work."""

    def __init__(self, job: Job, buffers: TransportBuffers, device: int, path: str) -> None:
        self._current_stream = cuda.cupy().cuda.get_current_stream
        self._path = path
        self._stream: Stream | None = None
        outgoing, incoming = buffers.device_pointers()
        self._outgoing = [packed_items(job.sends, row) for row in outgoing]
        self._incoming = [packed_items(job.receives, row) for row in incoming]
        self._clear = clearing_of(job, device)

    def check(self) -> None:
        """Refuse a stream that is being captured."""
        refuse_capture(self._current_stream(), self._path)

    def _enter(self) -> Stream:
        """Return the current stream; first wait for the last unpacking if it was put on another stream."""
        stream: Stream = self._current_stream()
        last = self._stream
        if last is not None and last.ptr != stream.ptr:
            last.synchronize()
        return stream


class Work(StreamedJob):
    """GPU work of a pipeline: kernels, events and a separate stream. Stages are packed and unpacked in ascending order.

    Additions are made in the order of the parts, whichever fragment arrives first, so that equal values give equal
    bits. All additions follow the last stage, in the same launches as in an exchange without fragments.
    """

    movable: Sequence[MovableLaunches] = ()
    """All launches over the arrays."""

    def __init__(self, job: Job, buffers: TransportBuffers, device: int, path: str) -> None:
        super().__init__(job, buffers, device, path)
        stages_out, stages_in = buffers.stages_out, buffers.stages_in
        sent, received = (job.sends, buffers.outgoing_ends), (job.receives, buffers.incoming_ends)
        self._packs = [
            fragmented(job, items, *sent, stages_out, device, unpack=False)
            for items in self._outgoing
        ]
        # Number of the stage at which an accumulation makes all its additions.
        self._adds_in = stages_in - 1 if job.operation == "add" else None
        self._unpacks = [
            fragmented(job, items, *received, stages_in, device, unpack=True)
            if self._adds_in is None
            else unpacking(job, items, device)
            for items in self._incoming
        ]
        self.movable = [*self._packs, *self._unpacks, *self._clear]
        cp = cuda.cupy().cuda
        with cp.Device(device):
            self._own = cp.Stream(non_blocking=True)
            self._begun, self._read, *self._packed = (
                cp.Event(disable_timing=True) for _ in range(2 + stages_out)
            )

    def begin(self, slot: int) -> None:
        """Put the packing of all stages on the current stream, and order later unpacking after its present work."""
        self._stream = stream = self._enter()
        self._begun.record(stream)
        self._own.wait_event(self._begun)
        if self._packed:
            for stage, event in zip(self._packs[slot].stages, self._packed, strict=True):
                for launch, source, target in stage:
                    launch(stream.ptr, source, target)
                event.record(stream)
        for clear in self._clear:
            clear.launch(stream.ptr)

    def is_packed(self, stage: int) -> bool:
        """Return whether the packing of a stage has ended."""
        return bool(self._packed[stage].done)

    def unpack(self, slot: int, stage: int) -> None:
        """Put the unpacking of a stage on the separate stream."""
        if self._adds_in is not None:
            if stage < self._adds_in:
                return
            stage = 0
        for launch, source, target in self._unpacks[slot].stages[stage]:
            launch(self._own.ptr, source, target)

    def end(self) -> None:
        """Make the current stream wait for all unpacking."""
        self._read.record(self._own)
        stream = self._current_stream()
        stream.wait_event(self._read)
        self._stream = stream

    def wait_until_read(self) -> None:
        """Wait on the host for all unpacking that was put on the separate stream before the last `end`."""
        self._read.synchronize()  # returns at once if the event was never recorded

    def wait_for_all(self) -> None:
        """Wait on the host for all packing and unpacking put on streams so far."""
        if self._stream is not None:
            self._stream.synchronize()
        self._own.synchronize()


class FragmentPipeline(MovableChannel):
    """Moves arrays on this rank's GPU through transport buffers, fragment by fragment.

    `start` returns when all stages have been packed and posted. It waits for the packing on this rank's GPU, but for no
    peer, except for a receiver that sends nothing back and has not read the message before the last one. When `start`
    returns, stages that have arrived are already being unpacked; `finish` waits for the remaining stages.
    """

    def __init__(self, world: World, buffers: TransportBuffers, work: Work) -> None:
        self._world, self._buffers, self._work = world, buffers, work
        self._movable = work.movable
        self._waiter: Waiter = world.waiter()
        self._crowded = world.crowded
        self._epoch = 0
        self._unpacked = 0

    def check(self) -> None:
        """Refuse a stream that is being captured."""
        self._work.check()

    def start(self) -> None:
        """Pack everything, and post each stage as soon as it is packed."""
        buffers, work = self._buffers, self._work
        epoch = self._epoch + 1
        buffers.open(epoch)
        work.begin(epoch % buffers.slots)
        # The packing waits on the stream for the last unpacking, so that this wait costs no additional time.
        work.wait_until_read()
        buffers.release(self._epoch)
        self._epoch, self._unpacked = epoch, 0
        buffers.expect(epoch)
        for stage in range(buffers.stages_out):
            # No time limit: the user's earlier work on the stream may take any time.
            while not work.is_packed(stage):
                if not self._unpack_next() and self._crowded:
                    os.sched_yield()
            buffers.post_stage(epoch, stage)

    def finish(self) -> None:
        """Enqueue the unpacking of each remaining stage when it arrives; make the current stream wait for it."""
        buffers = self._buffers
        while self._unpacked < buffers.stages_in:
            self._waiter.until(
                self._unpack_next,
                lambda: (
                    f"rank {self._world.rank} has waited for messages with ranks "
                    f"{buffers.awaited(self._epoch)}"
                ),
                lambda: buffers.awaited(self._epoch),
            )
        self._work.end()
        buffers.complete(self._epoch)

    def _unpack_next(self) -> bool:
        """Unpack the next stage if it has arrived; return whether it has."""
        stage = self._unpacked
        if stage >= self._buffers.stages_in or not self._buffers.arrived(self._epoch, stage):
            return False
        self._work.unpack(self._epoch % self._buffers.slots, stage)
        self._unpacked += 1
        return True

    def close(self) -> None:
        """Wait for the GPU, which may be in the middle of an exchange, then close the buffers."""
        self._work.wait_for_all()
        self._buffers.close()

    def free(self) -> None:
        """Free the buffers."""
        self._buffers.free()
