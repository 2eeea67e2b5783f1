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


<<<<<<< HEAD
def odd_copier(part: Part, place: PartView) -> MpiCopier | None:
    """Return a copier of a part with many short blocks of an odd size, in ascending order; None if NumPy copies it."""
    _, shape, dtype, _, strides = place
    size = dtype.itemsize
    if size in _NUMPY_ELEMENTS or size >= _WIDE_BLOCK or prod(shape) < MPI_BLOCKS:
=======
class OddBlocks:
    """The parts of one direction's messages, with an MPI datatype for each part that MPI copies faster."""

    def __init__(self, places: Sequence[PartView]) -> None:
        self._places = places
        self._mpi = mpi = usable_mpi()
        self._types = [None if mpi is None else _mpi_type(mpi, place) for place in places]
        for datatype in self._types:
            if mpi is not None and datatype is not None:
                weakref.finalize(self, free, mpi, datatype).atexit = False

    def __bool__(self) -> bool:
        return any(datatype is not None for datatype in self._types)

    def calls(
        self,
        views: Sequence[Array],
        packed: Sequence[Array],
        memories: Sequence[memoryview],
        *,
        unpack: bool,
    ) -> Calls:
        """Return the calls that pack ``views`` of some memories to ``packed``, or unpack, part by part."""
        calls: Calls = []
        parts = zip(self._places, self._types, views, packed, strict=True)
        for place, datatype, view, buffer in parts:
            word = _word(place)
            if datatype is None or view.ctypes.data % word:
                calls.append(partial(copy_all, [(view, buffer) if unpack else (buffer, view)]))
                continue
            mpi = self._mpi
            assert mpi is not None
            number, _, _, offset, _ = place
            memory = np.ndarray((_span(place),), np.uint8, memories[number], offset)
            inside, outside = mpi.buffer(memory), mpi.buffer(buffer.reshape(-1).view(np.uint8))
            if unpack:
                calls.append(partial(datatype.Unpack, outside, 0, inside, mpi.COMM_SELF))
            else:
                calls.append(partial(datatype.Pack, inside, outside, 0, mpi.COMM_SELF))
        return calls


def _is_odd(place: PartView) -> bool:
    """Whether a part has many short blocks of an odd size, in ascending order, that are not copied in tiles."""
    _, shape, dtype, _, strides = place
    size, blocks = dtype.itemsize, int(np.prod(shape))
    if size in _NUMPY_ELEMENTS or size >= _WIDE_BLOCK or blocks < _FEW_BLOCKS:
        return False
    if min(strides) <= 0 or blocks * size > _MOST_BYTES:
        return False
    return tile_of(shape, size, contiguous_strides(shape, size), strides) is None


def _word(place: PartView) -> int:
    """Return the largest word, up to 8 bytes, that divides the length and all strides of the blocks."""
    _, _, dtype, _, strides = place
    return gcd(8, dtype.itemsize, *strides)


def _span(place: PartView) -> int:
    _, shape, dtype, _, strides = place
    return dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def _mpi_type(mpi: ModuleType, place: PartView) -> MPI.Datatype | None:
    """Return a committed MPI datatype of the blocks from their first byte, or None if NumPy copies them.

    The datatype is made of words, because Open MPI copies blocks of bytes up to 4 times slower.
    """
    if not _is_odd(place):
>>>>>>> d02bf65c9a7706b390ce9043d49207032f1c922f
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
