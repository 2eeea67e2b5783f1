"""Channels of the ``staged`` path: arrays on a GPU, through page-locked host memory that the GPU reads and writes.

One kernel packs all messages of the rank straight into transport buffers in host memory. The host waits for the kernel,
posts the messages, waits for the messages of the peers, and launches one kernel that unpacks them::

    stream  ...user's kernels | pack -> host memory |                    | unpack <- host memory | user's kernels...
    host                        launch ... wait ->    post ... collect -> launch

Between ranks of a node the buffers are memory that both GPUs map, so that the host copies nothing. Large messages
travel fragment by fragment instead (`halox.paths.staged.pipeline`). With buffers in device memory, which CUDA-aware MPI
accepts, the same channels serve the ``cuda_aware`` path.

The host takes part in every exchange, so that no exchange can be captured in a CUDA graph.
"""

from __future__ import annotations

from halox.paths.base import Channel, Job
from halox.paths.buffers import TransportBuffers
from halox.paths.launches import MovableChannel, packing, unpacking
from halox.paths.staged.pipeline import FragmentPipeline, StreamedJob, Work
from halox.runtime.world import World


def staged_channel(
    world: World, job: Job, buffers: TransportBuffers, device: int, path: str = "staged"
) -> Channel:
    """Return the channel of messages for arrays on a GPU, through the given transport buffers.

    Not collective.
    """
    if max(buffers.stages_out, buffers.stages_in) > 1:
        return FragmentPipeline(world, buffers, Work(job, buffers, device, path))
    return StagedChannel(job, buffers, device, path)


class StagedChannel(StreamedJob, MovableChannel):
    """Moves arrays on this rank's GPU through transport buffers, without fragments.

    The unpacking kernel of this rank may still read a buffer when `finish` returns. It has ended when the next `start`
    has waited for the packing on the same stream, and only then does `start` release the incoming buffers.
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
        """Pack into the buffers, wait for the packing, and post the messages; blocks the host for the packing."""
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
