"""Channels of the ``staged`` path: arrays on a GPU, through page-locked host memory that it reads and writes itself.

One kernel packs all messages of the rank straight into transport buffers in host memory; the host waits for
it, posts the messages, waits for those of the peers, and launches one kernel that unpacks them::

    stream  ...user's kernels | pack -> host memory |                    | unpack <- host memory | user's kernels...
    host                        launch ... wait ->    post ... collect -> launch

Between ranks of a node the buffers are memory that both GPUs map, so that nothing is copied on the host.
Large messages go fragment by fragment instead (`halox.paths.staged.pipeline`). With buffers in device memory,
which MPI takes itself, the same channels serve GPU-aware MPI.

The host takes part in every exchange, so that none of this can be captured into a graph.
"""

from __future__ import annotations

from halox.paths.base import Channel, Job
from halox.paths.buffers import TransportBuffers
from halox.paths.launches import (
    MovableChannel,
    clearing_of,
    fragmented,
    packed_items,
    packing,
    unpacking,
)
from halox.paths.staged.pipeline import Pipeline, Work
from halox.runtime.gpu.streams import Stream, refuse_capture
from halox.runtime.world import World


def staged_channel(
    world: World, job: Job, buffers: TransportBuffers, device: int, path: str = "staged"
) -> Channel:
    """Return the channel of messages that transport buffers carry for arrays on a GPU.

    Not collective.
    """
    if max(buffers.stages_out, buffers.stages_in) > 1:
        return Pipeline(world, buffers, _StagedWork(job, buffers, device, path))
    return StagedChannel(job, buffers, device, path)


class _Stream:
    """The packing and unpacking of a job, and the stream that was given the last of it."""

    def __init__(self, job: Job, buffers: TransportBuffers, device: int, path: str) -> None:
        from halox.runtime.gpu.cuda import cupy

        self._current_stream = cupy().cuda.get_current_stream
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
        """Return the current stream, when the last unpacking has ended if it went to another one."""
        stream: Stream = self._current_stream()
        last = self._stream
        if last is not None and last.ptr != stream.ptr:
            last.synchronize()
        return stream


class StagedChannel(_Stream, MovableChannel):
    """Moves arrays on this rank's GPU through transport buffers, all at once.

    The receiver's kernel may still read a buffer when `finish` returns. It has ended by the time `start` has
    waited for its own packing on the same stream, and only then are the last buffers released.
    """

    def __init__(
        self, job: Job, buffers: TransportBuffers, device: int, path: str = "staged"
    ) -> None:
        super().__init__(job, buffers, device, path)
        self._buffers, self._epoch = buffers, 0
        self._pack = [packing(job, items, device) for items in self._outgoing if items]
        self._unpack = [unpacking(job, items, device) for items in self._incoming if items]
        self._movable = [*self._pack, *self._unpack, *self._clear]

    def start(self) -> None:
        """Pack into the buffers, wait for that, and post the messages; blocks the host for the packing."""
        epoch = self._epoch + 1
        stream = self._enter()
        self._buffers.open(epoch)
        self._stream = stream
        if self._pack:
            for launch, source, target in self._pack[epoch % len(self._pack)].stages[0]:
                launch(stream.ptr, source, target)
        stream.synchronize()
        self._buffers.release(self._epoch)
        for clear in self._clear:
            clear.launch(stream.ptr)
        self._buffers.post(epoch)
        self._epoch = epoch

    def finish(self) -> None:
        """Wait on the host for the messages, and put the unpacking on the current stream."""
        self._buffers.collect(self._epoch)
        if not self._unpack:
            return
        stream = self._current_stream()
        for launch, source, target in self._unpack[self._epoch % len(self._unpack)].stages[0]:
            launch(stream.ptr, source, target)
        if self._stream is None or stream.ptr != self._stream.ptr:
            self._stream = stream

    def close(self) -> None:
        """Wait for the last packing and unpacking, then close the buffers."""
        if self._stream is not None:
            self._stream.synchronize()
        self._buffers.close()

    def free(self) -> None:
        """Free the buffers."""
        self._buffers.free()


class _StagedWork(_Stream, Work):
    """Kernels, events and a stream of the channel's own.

    What is added to is added in the order of the parts, whichever fragment comes first, so that equal values give
    equal bits: all of it with the last stage, in the launches that an uncut exchange would have made.
    """

    def __init__(self, job: Job, buffers: TransportBuffers, device: int, path: str) -> None:
        from halox.runtime.gpu.cuda import cupy

        super().__init__(job, buffers, device, path)
        stages_out, stages_in = buffers.stages_out, buffers.stages_in
        sent, received = (job.sends, buffers.outgoing_ends), (job.receives, buffers.incoming_ends)
        self._packs = [
            fragmented(job, items, *sent, stages_out, device, unpack=False)
            for items in self._outgoing
        ]
        self._adds_in = stages_in - 1 if job.operation == "add" else None
        self._unpacks = [
            fragmented(job, items, *received, stages_in, device, unpack=True)
            if self._adds_in is None
            else unpacking(job, items, device)
            for items in self._incoming
        ]
        self.movable = [*self._packs, *self._unpacks, *self._clear]
        cuda = cupy().cuda
        with cuda.Device(device):
            self._own = cuda.Stream(non_blocking=True)
            self._begun, self._read, *self._packed = (
                cuda.Event(disable_timing=True) for _ in range(2 + stages_out)
            )

    def begin(self, slot: int) -> None:
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
        return bool(self._packed[stage].done)

    def unpack(self, slot: int, stage: int) -> None:
        if self._adds_in is not None:
            if stage < self._adds_in:
                return
            stage = 0
        for launch, source, target in self._unpacks[slot].stages[stage]:
            launch(self._own, source, target)

    def end(self) -> None:
        self._read.record(self._own)
        stream = self._current_stream()
        stream.wait_event(self._read)
        self._stream = stream

    def wait_until_read(self) -> None:
        self._read.synchronize()  # an event that was never recorded has passed

    def wait_for_all(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._own.synchronize()
