"""Access to parts of a field as contiguous host arrays, for fields on the host and on a GPU.

Files need contiguous host memory. `HostStaging` and `halox.runtime.gpu.staging.DeviceStaging` have the same methods:
`read` yields parts, and `store` sets them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

from halox.decomposition import FieldLayout
from halox.io.message_queue import as_void
from halox.runtime.arrays import Array, as_ndarray
from halox.runtime.gpu.cuda import is_device_array
from halox.runtime.gpu.devices import as_device_array
from halox.runtime.gpu.staging import DeviceStaging

Index: TypeAlias = tuple[slice | int, ...]


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
    """Reads and sets parts of a host array. Use it in a ``with`` statement, as one for a GPU."""

    def __init__(self, array: Array) -> None:
        self._array = as_void(array)

    def read(self, indices: Iterable[Index]) -> Iterator[Array]:
        """Yield parts as contiguous arrays."""
        for index in indices:
            yield np.ascontiguousarray(self._array[index])

    def store(self, index: Index, values: Array) -> None:
        """Copy values to a part of the array; the caller may change the values afterwards."""
        self._array[index] = values

    def __enter__(self) -> HostStaging:
        return self

    def __exit__(self, *_: object) -> None:
        pass


Staging = HostStaging | DeviceStaging
"""Parts of one array, on the host or a GPU."""


def staging(cells: Any, part_bytes: int) -> Staging:
    """Return the staging of an array on the host or a GPU, whose parts there have at most ``part_bytes`` bytes."""
    if is_device_array(cells):
        return DeviceStaging(cells, part_bytes)
    return HostStaging(as_ndarray(cells))
