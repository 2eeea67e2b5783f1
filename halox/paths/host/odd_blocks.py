"""Messages of NumPy arrays with many short blocks of an odd size, which Open MPI copies faster than NumPy.

NumPy copies elements of 1, 2, 4, 8 and 16 bytes in a loop. It calls a function for each element of another size, such
as the three floats of a halo. Open MPI copies any number of words in a loop, in two thirds of the time; MPICH is slower
than NumPy (docs/performance/log.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from halox.datatypes.boxes import contiguous_strides
from halox.packing.blocking import copy_all, tile_of
from halox.packing.host_layout import MPI_BLOCKS
from halox.packing.mpi_copier import free, usable_mpi
from halox.runtime.arrays import Array, DType

if TYPE_CHECKING:
    from mpi4py import MPI

PartView = tuple[int, tuple[int, ...], DType, int, tuple[int, ...]]
"""A view of a part in the memory of its array: the array's number, shape, dtype, offset in this memory, and strides.

A plain tuple, since tuples are made fastest.
"""

Calls = list[Callable[[], object]]
"""Calls that pack or unpack, to make in sequence."""

_NUMPY_ELEMENTS = (1, 2, 4, 8, 16)
# NumPy copies longer blocks at memory speed in spite of the function calls.
_WIDE_BLOCK = 96
_FEW_BLOCKS = MPI_BLOCKS
_MOST_BYTES = (1 << 31) - 1  # MPI counts packed bytes in an int


def call_all(calls: Calls) -> None:
    """Make some calls in sequence."""
    for call in calls:
        call()


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
        """Whether MPI copies any of the parts."""
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
    """Return the bytes from the first byte of the blocks to the last."""
    _, shape, dtype, _, strides = place
    return dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def _mpi_type(mpi: ModuleType, place: PartView) -> MPI.Datatype | None:
    """Return a committed MPI datatype of the blocks from their first byte, or None if NumPy copies them.

    The datatype is made of words, because Open MPI copies blocks of bytes up to 4 times slower.
    """
    if not _is_odd(place):
        return None
    _, shape, dtype, _, strides = place
    word = _word(place)
    words = {1: mpi.UINT8_T, 2: mpi.UINT16_T, 4: mpi.UINT32_T, 8: mpi.UINT64_T}[word]
    datatype = words.Create_contiguous(dtype.itemsize // word)
    for count, stride in zip(reversed(shape), reversed(strides), strict=True):
        datatype = _freeing(datatype, datatype.Create_hvector(count, 1, stride))
    # With the extent of the whole memory, mpi4py passes a count of one item.
    return _freeing(datatype, datatype.Create_resized(0, _span(place))).Commit()


def _freeing(old: MPI.Datatype, new: MPI.Datatype) -> MPI.Datatype:
    """Free a datatype, and return another one that was derived from it."""
    old.Free()
    return new
