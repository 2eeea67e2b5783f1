"""Channels of the ``staged`` path: arrays on a GPU, through page-locked host memory that the GPU reads and writes.

A kernel packs all messages of the rank straight into transport buffers in host memory, and a kernel unpacks straight
from them. Between ranks of a node the buffers are memory that both GPUs map, so that the host copies nothing (zero
copy: Wu et al. 2016, section 4). With buffers in device memory, the same channel serves the ``cuda_aware`` path.

Large messages travel in stages, so that packing, sending and unpacking overlap. A stage is one fragment of every large
message (`halox.paths.fragments`); small messages have one stage. All stages are packed in sequence on the user's
stream. The host posts each stage as soon as its packing has ended, and enqueues the unpacking of each stage that
arrives on a separate stream of the channel, since stores to host memory and loads from it do not slow each other down::

    user's stream | pack 0 | pack 1 | pack 2 | pack 3 |                                        | user's kernels
    host            post 0 ->  post 1 ->  post 2 -> post 3
    MPI                       | 0 there ...| 1 there ...| 2 there ...| 3 there ...|
    own stream                              | unpack 0 | | unpack 1 | | unpack 2 | | unpack 3 |

The host takes part in every exchange, so that no exchange can be captured in a CUDA graph. `Work` has the GPU work of a
`StagedPipeline`; a test without a GPU replaces `Work`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from halox.paths.base import Job
from halox.paths.buffers import TransportBuffers
from halox.paths.launches import (
    ArrayLaunches,
    MovableChannel,
    clearing_of,
    fragmented,
    packed_items,
    unpacking,
)
from halox.runtime.gpu import cuda
from halox.runtime.gpu.streams import Stream, refuse_capture
from halox.runtime.waiting import Waiter
from halox.runtime.world import World


class Work:
    """GPU work of a pipeline: kernels, events and a separate stream. Stages are packed and unpacked in ascending order.

    Additions are made in the order of the parts, whichever fragment arrives first, so that equal values give equal
    bits. All additions follow the last stage, in the same launches as in an exchange without fragments.
    """

    movable: Sequence[ArrayLaunches] = ()
    """All launches over the arrays."""

    def __init__(self, job: Job, buffers: TransportBuffers, device: int, path: str) -> None:
        self._path = path
        self._stream: Stream | None = None  # of the most recent packing or `end`
        stages_out, stages_in = buffers.stages_out, buffers.stages_in
        outgoing, incoming = (
            [packed_items(messages, starts) for starts in slots]
            for messages, slots in zip(
                (job.sends, job.receives), buffers.device_pointers(), strict=True
            )
        )
        sent, received = (job.sends, buffers.outgoing_ends), (job.receives, buffers.incoming_ends)
        self._packs = [
            fragmented(job, items, *sent, stages_out, device, unpack=False) for items in outgoing
        ]
        # Number of the stage at which an accumulation makes all its additions.
        self._adds_in = stages_in - 1 if job.operation == "add" else None
        self._unpacks = [
            fragmented(job, items, *received, stages_in, device, unpack=True)
            if self._adds_in is None
            else unpacking(job, items, device)
            for items in incoming
        ]
        self._clear = clearing_of(job, device)
        self.movable = [*self._packs, *self._unpacks, *self._clear]
        cp = cuda.cupy().cuda
        self._current_stream = cp.get_current_stream
        with cp.Device(device):
            self._own = cp.Stream(non_blocking=True)
            self._begun, self._read = (cp.Event(disable_timing=True) for _ in range(2))
            # The end of each stage's packing; all unpacking follows the first of them.
            self._packed = [self._begun]
            self._packed += [cp.Event(disable_timing=True) for _ in range(stages_out - 1)]

    def check(self) -> None:
        refuse_capture(self._current_stream(), self._path)

    def begin(self, slot: int) -> None:
        """Put the packing of all stages on the current stream, and order later unpacking after its present work."""
        stream: Stream = self._current_stream()
        if self._stream is not None and self._stream.ptr != stream.ptr:
            self._stream.synchronize()
        self._stream = stream
        stages = self._packs[slot].stages
        for stage, event in zip(stages, self._packed, strict=False):
            stage(stream.ptr)
            event.record(stream)
        if not stages:
            self._begun.record(stream)
        self._own.wait_event(self._begun)
        for clear in self._clear:
            clear.launch(stream.ptr)

    def is_packed(self, stage: int) -> bool:
        return bool(self._packed[stage].done)

    def unpack(self, slot: int, stage: int) -> None:
        if self._adds_in is not None:
            if stage < self._adds_in:
                return
            stage = 0
        self._unpacks[slot].stages[stage](self._own.ptr)

    def end(self) -> None:
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


class StagedPipeline(MovableChannel):
    """Moves arrays on this rank's GPU through transport buffers, stage by stage.

    `start` returns when all stages have been packed and posted. It waits for the packing on this rank's GPU, but for no
    peer, except for a receiver that sends nothing back and has not read the message before the last one. When `start`
    returns, stages that have arrived are already being unpacked; `finish` waits for the remaining stages.
    """

    timeline = (
        ("start", "pack and send"),
        ("_buffers.post_stage", "send"),
        ("finish", "wait and unpack"),
    )

    def __init__(self, world: World, buffers: TransportBuffers, work: Work) -> None:
        self._world, self._buffers, self._work = world, buffers, work
        self._movable = work.movable
        self._waiter: Waiter = world.waiter()
        self._crowded = world.crowded
        self._epoch = 0
        self._unpacked = 0

    def check(self) -> None:
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
        self._buffers.free()
