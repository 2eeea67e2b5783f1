"""The ``staged`` path: arrays on a GPU, through page-locked host memory that the GPU reads and writes itself.

One kernel packs all messages of the rank straight into the carrier's buffers in host memory; the host waits for
it, posts the messages, waits for those of the peers, and launches one kernel that unpacks them::

    stream  ...user's kernels | pack -> host memory |                    | unpack <- host memory | user's kernels...
    host                        launch ... wait ->    post ... collect -> launch

Between ranks of a node the carrier's buffers are memory that both GPUs map, so that nothing is copied on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halox.messages import Message
from halox.transports.base import Channel, Job
from halox.transports.carriers import Carrier


class StagedChannel(Channel):
    """Moves arrays on this rank's GPU through a carrier's host buffers.

    The receiver's kernel may still read a buffer when `finish` returns. It has ended by the time `start` has
    waited for its own packing on the same stream, and only then are the last buffers released.
    """

    def __init__(self, job: Job, carrier: Carrier, device: int) -> None:
        from halox.engine.cuda import cupy
        from halox.engine.packers.device import Zeroing, launch_add, launch_pack, launch_unpack

        self._current_stream = cupy().cuda.get_current_stream
        self._carrier = carrier
        self._epoch = 0
        self._stream: Any = None
        outgoing, incoming = carrier.device_pointers()

        def moves(messages: Sequence[Message], pointers: Sequence[int]) -> list[tuple[Any, int]]:
            return [
                ((job.arrays[part.array], part.datatype, part.count), pointer + offset)
                for message, pointer in zip(messages, pointers, strict=True)
                for part, offset in zip(message.parts, message.offsets, strict=True)
            ]

        unpack = launch_add if job.operation == "add" else launch_unpack
        self._pack = (
            [launch_pack(moves(job.sends, row), device) for row in outgoing] if job.sends else []
        )
        self._unpack = (
            [unpack(moves(job.receives, row), device) for row in incoming] if job.receives else []
        )
        cleared = [(job.arrays[p.array], p.datatype, p.count) for p in job.cleared]
        self._clear = Zeroing(cleared, device) if cleared else None

    def start(self) -> None:
        """Pack into host memory, wait for that, and post the messages; blocks the host for the packing."""
        epoch = self._epoch + 1
        stream = self._current_stream()
        if self._stream is not None and self._stream.ptr != stream.ptr:
            self._stream.synchronize()  # the last unpacking went to another stream
        self._carrier.open(epoch)
        if self._pack:
            self._pack[epoch % len(self._pack)].launch(stream)
        stream.synchronize()
        self._carrier.release(self._epoch)
        if self._clear is not None:
            self._clear.launch(stream)
        self._carrier.post(epoch)
        self._epoch, self._stream = epoch, stream

    def finish(self) -> None:
        """Wait on the host for the messages, and put the unpacking on the current stream."""
        self._carrier.collect(self._epoch)
        if not self._unpack:
            return
        stream = self._current_stream()
        self._unpack[self._epoch % len(self._unpack)].launch(stream)
        if stream.ptr != self._stream.ptr:
            self._stream = stream

    def close(self) -> None:
        """Wait for the last unpacking, then close the carrier."""
        if self._stream is not None:
            self._stream.synchronize()
        self._carrier.close()
