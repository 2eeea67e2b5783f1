"""The ``mlx5_umr`` channel's arrays on a GPU: their memory for the adapter, and the order with the caller's stream.

The adapter reads and writes the arrays independently of all streams. So this rank posts nothing, and permits no peer to
write, before the stream has reached the exchange. In `finish` the host waits until everything has arrived.
"""

from __future__ import annotations

from typing import Any

from halox.errors import DeviceError
from halox.paths.scatter_gather.mlx5.keys import Memory
from halox.runtime.arrays import Described, span
from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.dmabuf import exported, flush_writes
from halox.runtime.gpu.streams import CallStreams
from halox.runtime.mlx5 import Adapter

_TRIED_BYTES = 1 << 16


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


def why_not_registered(adapter: Adapter, device: int) -> str | None:
    """Return why an adapter cannot register memory of a GPU, None if it can; registers some memory as a test."""
    with cupy().cuda.Device(device):
        try:
            memory = cupy().cuda.Memory(_TRIED_BYTES)
            with exported(int(memory.ptr), _TRIED_BYTES, device) as dmabuf:
                offset = int(memory.ptr) - dmabuf.address
                adapter.register_dmabuf(dmabuf.descriptor, _TRIED_BYTES, offset).close()
        except (DeviceError, MemoryError, RuntimeError) as error:  # CuPy raises all of them
            return f"its GPU's memory cannot be exported as a dmabuf: {error}"
        except adapter.verbs.PyverbsError as error:
            return f"its adapter {adapter.name} does not register a dmabuf of its GPU: {error}"
    return None
