"""The ``mlx5_umr`` channel's arrays on a GPU: their memory for the adapter, and the order with the caller's stream.

The adapter reads and writes the arrays independently of all streams. So this rank posts nothing, and permits no peer to
write, before the stream has reached the exchange. In `finish` the host waits until everything has arrived.
"""

from __future__ import annotations

from typing import Any

from halox.paths.scatter_gather.mlx5.keys import Memory
from halox.runtime.arrays import Described, span
from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.dmabuf import flush_writes
from halox.runtime.gpu.streams import CallStreams


class GpuArrays:
    """Arrays on this rank's GPU, the device of ``arena``."""

    def __init__(self, arena: DeviceArena) -> None:
        self._arena, self._streams = arena, CallStreams("scatter_gather")
        with cupy().cuda.Device(arena.device):
            self._event: Any = cupy().cuda.Event(disable_timing=True)

    def memory(self, array: Described) -> Memory:
        """Return the whole segment of a grid's field; otherwise only the array's bytes, registered for each plan."""
        before, behind = span(array.shape, array.strides, array.dtype.itemsize)
        start, end = array.pointer - before, array.pointer + behind
        segment = self._arena.around(start, end) or (start, end - start, None)
        return Memory(array.pointer, *segment, self._arena.device)

    def check(self) -> None:
        self._streams.check()

    def begin(self) -> None:
        """Record the point that the current stream must reach."""
        self._streams.enter()
        self._event.record(cupy().cuda.get_current_stream())

    @property
    def is_reached(self) -> bool:
        return bool(self._event.done)

    def end(self) -> None:
        """Make received data visible to later work."""
        flush_writes(self._arena.device)
