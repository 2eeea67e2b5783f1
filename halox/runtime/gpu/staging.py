"""Access to parts of GPU arrays through page-locked memory, with copies that overlap host work.

::

    GPU    copy 0 | copy 1 | copy 2 |
    host            work 0 | work 1 | work 2

Gathers, scatters and checkpoints use it. Two buffers are used alternately. A part that is not contiguous is packed on
the GPU first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

from halox.runtime.dlpack import Array, DType
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.devices import as_device_array
from halox.runtime.gpu.pools import SIDE_STREAMS, acquire_buffer, release_buffer

Index: TypeAlias = tuple[slice | int, ...]

_BUFFERS = 2


class DeviceStaging:
    """Two page-locked buffers for the parts of one array on a GPU, and the stream that copies them.

    All earlier work on the array must be on the current stream. ``part_bytes`` is the size of the largest part in
    bytes. Not collective. Use this class in a ``with`` statement; its end waits for all copies.
    """

    def __init__(self, array: Any, part_bytes: int) -> None:
        self._array = as_words(as_device_array(array))
        self._dtype: DType = array.dtype
        self._device = int(self._array.device.id)
        self._runtime = cupy().cuda.runtime
        with cupy().cuda.Device(self._device):
            self._events = [cupy().cuda.Event(disable_timing=True) for _ in range(_BUFFERS)]
        self._buffers = [acquire_buffer(part_bytes, self._device) for _ in range(_BUFFERS)]
        self._side = SIDE_STREAMS.acquire(self._device)
        self._used = 0
        self._packed: list[Any] = [None] * _BUFFERS

    def read(self, indices: Iterable[Index]) -> Iterator[Array]:
        """Yield the parts as contiguous host arrays; each part is valid until the next iteration."""
        pending: deque[tuple[int, tuple[int, ...]]] = deque()
        for index in indices:
            pending.append(self._start_read(index))
            if len(pending) == _BUFFERS:
                yield self._end_read(*pending.popleft())
        while pending:
            yield self._end_read(*pending.popleft())

    def next_buffer(self, shape: tuple[int, ...]) -> Array:
        """Return the buffer for the next `put`; blocks until the previous copy from this buffer has ended."""
        slot = self._used % _BUFFERS
        self._events[slot].synchronize()
        return self._host(slot, shape)

    def put(self, index: Index) -> None:
        """Start the copy of the buffer from the last `next_buffer` to a part of the array."""
        slot = self._used % _BUFFERS
        self._used += 1
        target = self._array[index]
        with cupy().cuda.Device(self._device), self._side.stream:
            packed = cupy().empty(target.shape, target.dtype)
            self._copy(int(packed.data.ptr), self._address(slot), packed.nbytes, "HostToDevice")
            target[...] = packed
        self._packed[slot] = packed
        self._events[slot].record(self._side.stream)

    def store(self, index: Index, values: Array) -> None:
        """Start the copy of values to a part of the array; ``values`` may be changed afterwards."""
        buffer = self.next_buffer(values.shape)
        buffer.view(values.dtype)[...] = values
        self.put(index)

    def _start_read(self, index: Index) -> tuple[int, tuple[int, ...]]:
        slot = self._used % _BUFFERS
        self._used += 1
        with cupy().cuda.Device(self._device), self._side.stream:
            packed = cupy().ascontiguousarray(self._array[index])
            self._copy(self._address(slot), int(packed.data.ptr), packed.nbytes, "DeviceToHost")
        self._packed[slot] = packed
        self._events[slot].record(self._side.stream)
        words = self._array.ndim - len(self._shape)
        return slot, tuple(packed.shape[: packed.ndim - words])

    def _end_read(self, slot: int, shape: tuple[int, ...]) -> Array:
        self._events[slot].synchronize()
        return self._host(slot, shape)

    @property
    def _shape(self) -> tuple[int, ...]:
        extra = self._array.dtype.itemsize != self._dtype.itemsize
        return tuple(self._array.shape[:-1] if extra else self._array.shape)

    def _host(self, slot: int, shape: tuple[int, ...]) -> Array:
        nbytes = int(np.prod(shape, dtype=np.int64)) * self._dtype.itemsize
        return self._buffers[slot].array[:nbytes].view(self._dtype).reshape(shape)

    def _address(self, slot: int) -> int:
        return int(self._buffers[slot].array.ctypes.data)

    def _copy(self, target: int, source: int, nbytes: int, kind: str) -> None:
        stream = self._side.stream.ptr
        self._runtime.memcpyAsync(
            target, source, nbytes, getattr(self._runtime, f"memcpy{kind}"), stream
        )

    def __enter__(self) -> DeviceStaging:
        """Order the copies after the work on the current stream."""
        with cupy().cuda.Device(self._device):
            self._side.before.record(cupy().cuda.get_current_stream())
        self._side.stream.wait_event(self._side.before)
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for all copies, and release the buffers; after an error do not pool them: a message may still arrive."""
        self._side.stream.synchronize()
        SIDE_STREAMS.release(self._device, self._side)
        for buffer in self._buffers:
            if error[0] is None:
                release_buffer(buffer, self._device)
            else:
                buffer.close()


def as_words(array: Any) -> Any:
    """View elements for which CuPy has no kernels as bytes, with one more axis."""
    if array.dtype.kind in "biufc":
        return array
    shape, strides = (*array.shape, array.dtype.itemsize), (*array.strides, 1)
    return cupy().ndarray(shape, np.uint8, array.data, strides)
