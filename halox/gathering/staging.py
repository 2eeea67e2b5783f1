"""Access to parts of a field as contiguous host arrays, for fields on the host and on a GPU.

Messages and files need contiguous host memory. `HostStaging` and `halox.runtime.gpu.staging.DeviceStaging` have the
same methods: `read` yields parts; `next_buffer` and `put`, or `store`, set parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, TypeAlias

import numpy as np

from halox.decomposition import FieldLayout
from halox.gathering.message_queue import as_void
from halox.runtime.arrays import Array, as_ndarray
from halox.runtime.gpu.cuda import is_device_array
from halox.runtime.gpu.devices import as_device_array
from halox.runtime.gpu.staging import DeviceStaging

Index: TypeAlias = tuple[slice | int, ...]

_BUFFERS = 2


def owned_cells(field: object, layout: FieldLayout) -> Any:
    """Return a view of the cells that this rank owns, as an array of NumPy or CuPy."""
    array = as_device_array(field) if is_device_array(field) else as_ndarray(field)
    return array[layout.interior]


def part_shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """Return the shape of a part of an array.

    Examples
    --------
    >>> part_shape((4, 5, 6), (2, slice(1, 9)))
    (4, 6)
    """
    return np.broadcast_to(np.empty((), np.uint8), shape)[index].shape


class HostStaging:
    """Reads and sets parts of a host array; contiguous parts are read in place. Use it in a ``with`` statement.

    Two buffers alternate, as for a GPU: the last part stays valid while the next part is filled.
    """

    def __init__(self, array: Array, part_bytes: int) -> None:
        self._array = as_void(array)
        self._part_bytes = part_bytes
        self._buffers: deque[Array] = deque(maxlen=_BUFFERS)
        self._current: Array | None = None

    def read(self, indices: Iterable[Index]) -> Iterator[Array]:
        """Yield parts as contiguous arrays, each valid until the next part is requested."""
        for index in indices:
            part = self._array[index]
            if part.flags.c_contiguous:
                yield part
            else:
                buffer = self.next_buffer(part.shape)
                np.copyto(buffer, part)
                yield buffer

    def next_buffer(self, shape: tuple[int, ...]) -> Array:
        """Return a contiguous buffer for the next part."""
        if len(self._buffers) < _BUFFERS:
            self._buffers.append(np.empty(self._part_bytes, np.uint8))
        self._buffers.rotate()
        nbytes = prod(shape) * self._array.itemsize
        self._current = self._buffers[0][:nbytes].view(self._array.dtype).reshape(shape)
        return self._current

    def put(self, index: Index) -> None:
        """Copy the buffer of the last `next_buffer` to a part of the array."""
        self._array[index] = self._current

    def store(self, index: Index, values: Array) -> None:
        """Copy values to a part of the array; the caller may change the values afterwards."""
        self._array[index] = values

    def __enter__(self) -> HostStaging:
        """Return the staging itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: all copies have ended."""


Staging = HostStaging | DeviceStaging
"""Parts of one array, on the host or a GPU."""


def staging(cells: Any, part_bytes: int) -> Staging:
    """Return the staging of an array on the host or a GPU, with parts of at most ``part_bytes`` bytes."""
    if is_device_array(cells):
        return DeviceStaging(cells, part_bytes)
    return HostStaging(as_ndarray(cells), part_bytes)
