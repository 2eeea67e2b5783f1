"""Messages of NumPy arrays with many short blocks of an odd size, which Open MPI copies faster than NumPy.

NumPy copies elements of 1, 2, 4, 8 and 16 bytes in a loop. It calls a function for each element of another size, such
as the three floats of a halo. Open MPI takes two thirds of the time (`halox.packing.mpi_copier`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import numpy as np

from halox.datatypes.boxes import contiguous_strides
from halox.packing.blocking import copy_all, tile_of
from halox.packing.host_layout import MPI_BLOCKS
from halox.packing.mpi_copier import MpiCopier, mpi_copier
from halox.paths.messages import Part
from halox.runtime.arrays import Array, DType, span

PartView = tuple[int, tuple[int, ...], DType, int, tuple[int, ...]]
"""A view of a part in the memory of its array: the array's number, shape, dtype, offset in this memory, and strides.

A plain tuple, since tuples are made fastest.
"""

Calls = list[Callable[[], object]]
"""Calls that pack or unpack, to make in sequence."""

_NUMPY_ELEMENTS = (1, 2, 4, 8, 16)
_WIDE_BLOCK = 96  # NumPy copies longer blocks at memory speed in spite of the function calls


def call_all(calls: Calls) -> None:
    """Make some calls in sequence."""
    for call in calls:
        call()


def odd_copier(part: Part, place: PartView) -> MpiCopier | None:
    """Return a copier of a part with many short blocks of an odd size, in ascending order; None if NumPy copies it."""
    _, shape, dtype, _, strides = place
    size = dtype.itemsize
    if size in _NUMPY_ELEMENTS or size >= _WIDE_BLOCK or prod(shape) < MPI_BLOCKS:
        return None
    if min(strides) <= 0 or tile_of(shape, size, contiguous_strides(shape, size), strides):
        return None
    return mpi_copier(part.datatype, part.count, part.datatype.reach(part.count)[0])


def odd_calls(
    copiers: Sequence[MpiCopier | None],
    places: Sequence[PartView],
    views: Sequence[Array],
    packed: Sequence[Array],
    memories: Sequence[memoryview],
    *,
    unpack: bool,
) -> Calls:
    """Return the calls that pack ``views`` of some memories to ``packed``, or unpack, part by part."""
    calls: Calls = []
    for copier, place, view, buffer in zip(copiers, places, views, packed, strict=True):
        if copier is None:
            calls.append(partial(copy_all, [(view, buffer) if unpack else (buffer, view)]))
        else:
            number, shape, dtype, offset, strides = place
            nbytes = span(shape, strides, dtype.itemsize)[1]
            memory = np.ndarray((nbytes,), np.uint8, memories[number], offset)
            calls.append(copier(memory, buffer.reshape(-1).view(np.uint8), unpack))
    return calls
