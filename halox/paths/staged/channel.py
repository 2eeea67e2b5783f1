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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from halox.paths.base import Channel, Job
from halox.paths.buffers import TransportBuffers
from halox.paths.fragments import shares_of
from halox.paths.messages import Message
from halox.paths.staged.pipeline import Pipeline, Work
from halox.runtime.world import World

if TYPE_CHECKING:
    from halox.packing.device import Move


def staged_channel(
    world: World, job: Job, buffers: TransportBuffers, device: int, path: str = "staged"
) -> Channel:
    """Return the channel of messages that transport buffers carry for arrays on a GPU.

    Not collective.
    """
    if max(buffers.stages_out, buffers.stages_in) > 1:
        return Pipeline(world, buffers, _StagedWork(job, buffers, device, path))
    return StagedChannel(job, buffers, device, path)


def _moves(job: Job, messages: Sequence[Message], pointers: Sequence[int]) -> list[Move]:
    """Pair each part of some messages with the address of its packed bytes."""
    return [
        (job.endpoint(part), pointer + offset)
        for message, pointer in zip(messages, pointers, strict=True)
        for part, offset in zip(message.parts, message.offsets, strict=True)
    ]


def _clearing(job: Job, device: int) -> Any:
    from halox.packing.device import Zeroing

    return Zeroing([job.endpoint(p) for p in job.cleared], device) if job.cleared else None


class StagedChannel(Channel):
    """Moves arrays on this rank's GPU through transport buffers, all at once.

    The receiver's kernel may still read a buffer when `finish` returns. It has ended by the time `start` has
    waited for its own packing on the same stream, and only then are the last buffers released.
    """

    def __init__(
        self, job: Job, buffers: TransportBuffers, device: int, path: str = "staged"
    ) -> None:
        from halox.packing.device import launch_add, launch_pack, launch_unpack
        from halox.runtime.gpu.capture import refuse_capture
        from halox.runtime.gpu.cuda import cupy

        self._current_stream = cupy().cuda.get_current_stream
        self._refuse_capture = refuse_capture
        self._buffers, self._path = buffers, path
        self._epoch = 0
        self._stream: Any = None
        outgoing, incoming = buffers.device_pointers()
        unpack = launch_add if job.operation == "add" else launch_unpack
        self._pack = (
            [launch_pack(_moves(job, job.sends, row), device) for row in outgoing]
            if job.sends
            else []
        )
        self._unpack = (
            [unpack(_moves(job, job.receives, row), device) for row in incoming]
            if job.receives
            else []
        )
        self._clear = _clearing(job, device)

    def check(self) -> None:
        """Refuse a stream that is being captured."""
        self._refuse_capture(self._current_stream(), self._path)

    def start(self) -> None:
        """Pack into the buffers, wait for that, and post the messages; blocks the host for the packing."""
        epoch = self._epoch + 1
        stream = self._current_stream()
        if self._stream is not None and self._stream.ptr != stream.ptr:
            self._stream.synchronize()  # the last unpacking went to another stream
        self._buffers.open(epoch)
        self._stream = stream
        if self._pack:
            self._pack[epoch % len(self._pack)].launch(stream)
        stream.synchronize()
        self._buffers.release(self._epoch)
        if self._clear is not None:
            self._clear.launch(stream)
        self._buffers.post(epoch)
        self._epoch = epoch

    def finish(self) -> None:
        """Wait on the host for the messages, and put the unpacking on the current stream."""
        self._buffers.collect(self._epoch)
        if not self._unpack:
            return
        stream = self._current_stream()
        self._unpack[self._epoch % len(self._unpack)].launch(stream)
        if stream.ptr != self._stream.ptr:
            self._stream = stream

    def close(self) -> None:
        """Wait for the last packing and unpacking, then close the buffers."""
        if self._stream is not None:
            self._stream.synchronize()
        self._buffers.close()

    def free(self) -> None:
        """Free the buffers."""
        self._buffers.free()


class _StagedWork(Work):
    """Kernels, events and a stream of the channel's own.

    What is added to is added in the order of the parts, whichever fragment comes first, so that equal values give
    equal bits: all of it with the last stage, in the launches that an uncut exchange would have made.
    """

    def __init__(self, job: Job, buffers: TransportBuffers, device: int, path: str) -> None:
        from halox.packing.device import Launches, fragment_launches, launch_add
        from halox.runtime.gpu.capture import refuse_capture
        from halox.runtime.gpu.cuda import cupy

        cuda = cupy().cuda
        self._current_stream = cuda.get_current_stream
        self._refuse_capture = refuse_capture
        self._path = path
        self._stream: Any = None
        outgoing, incoming = buffers.device_pointers()

        def fragmented(
            messages: Sequence[Message], row: Sequence[int], ends: Any, stages: int, unpack: bool
        ) -> list[Any]:
            shares = shares_of(messages, ends, stages)
            moves = zip(_moves(job, messages, row), shares, strict=True)
            return fragment_launches(
                [(*move, share) for move, share in moves], stages, device, unpack=unpack
            )

        stages_out, stages_in = buffers.stages_out, buffers.stages_in
        self._packs = [
            fragmented(job.sends, row, buffers.outgoing_ends, stages_out, False) for row in outgoing
        ]
        if job.operation == "add":
            self._unpacks = [
                [Launches([])] * (stages_in - 1)
                + [launch_add(_moves(job, job.receives, row), device)]
                for row in incoming
            ]
        else:
            self._unpacks = [
                fragmented(job.receives, row, buffers.incoming_ends, stages_in, True)
                for row in incoming
            ]
        self._clear = _clearing(job, device)
        with cuda.Device(device):
            self._own = cuda.Stream(non_blocking=True)
            self._begun, self._read = (
                cuda.Event(disable_timing=True),
                cuda.Event(disable_timing=True),
            )
            self._packed = [cuda.Event(disable_timing=True) for _ in range(stages_out)]

    def check(self) -> None:
        """Refuse a stream that is being captured."""
        self._refuse_capture(self._current_stream(), self._path)

    def begin(self, slot: int) -> None:
        """Put the packing of all stages on the current stream, each with an event behind it."""
        stream = self._current_stream()
        if self._stream is not None and self._stream.ptr != stream.ptr:
            self._stream.synchronize()
        self._stream = stream
        self._begun.record(stream)
        self._own.wait_event(self._begun)
        if self._packed:
            for launch, event in zip(self._packs[slot], self._packed, strict=True):
                launch.launch(stream)
                event.record(stream)
        if self._clear is not None:
            self._clear.launch(stream)

    def is_packed(self, stage: int) -> bool:
        """Return whether the event behind a stage's packing has passed."""
        return bool(self._packed[stage].done)

    def unpack(self, slot: int, stage: int) -> None:
        """Put the unpacking of a stage on the channel's own stream."""
        self._unpacks[slot][stage].launch(self._own)

    def end(self) -> None:
        """Make the current stream wait for all unpacking."""
        self._read.record(self._own)
        stream = self._current_stream()
        stream.wait_event(self._read)
        self._stream = stream

    def wait_until_read(self) -> None:
        """Wait for the event behind the last unpacking; one that was never recorded has passed."""
        self._read.synchronize()

    def wait_for_all(self) -> None:
        """Wait for both streams: one packs, and one unpacks without an event behind it before `end`."""
        if self._stream is not None:
            self._stream.synchronize()
        self._own.synchronize()
