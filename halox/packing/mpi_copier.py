"""Copies of layouts that Open MPI packs faster than NumPy, by `MPI_Pack` of the same type.

NumPy copies elements of 1, 2, 4, 8 and 16 bytes in a loop, and calls a function for each element of another size. An
index costs it as much for each word of a block as for a block of one word. Open MPI takes some 14 ns for a block of any
length, and then copies at the speed of memory; MPICH is slower than NumPy (docs/performance/log.md).
"""

from __future__ import annotations

import sys
import weakref
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from halox.datatypes import Datatype, contiguous, resized
from halox.packing.host_copiers import Bytes, Call

if TYPE_CHECKING:
    from mpi4py import MPI

_WORDS = (4, 8, 16)  # Open MPI copies bytes up to 4 times slower
_ALL_MEMORY = 1 << 46  # an extent beyond any array, so that mpi4py passes a count of one item
_MOST_BYTES = (1 << 31) - 1  # MPI counts packed bytes in an int


def usable_mpi() -> ModuleType | None:
    """Return ``mpi4py.MPI`` if it is Open MPI and any thread may call it, else None; never imports it."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    is_fast = mpi.get_vendor()[0] == "Open MPI" and mpi.Query_thread() == mpi.THREAD_MULTIPLE
    return mpi if is_fast else None


class MpiCopier:
    """Copies items of a datatype by `MPI_Pack` and `MPI_Unpack`; made by `mpi_copier`."""

    def __init__(self, mpi: ModuleType, datatype: Datatype, count: int, first: int) -> None:
        items = datatype if count == 1 else contiguous(count, datatype)
        self._mpi, self._first = mpi, first
        self._type: MPI.Datatype = resized(items, 0, _ALL_MEMORY).to_mpi()
        weakref.finalize(self, free, mpi, self._type).atexit = False

    def __call__(self, memory: Bytes, packed: Bytes, unpack: bool) -> Call:
        """Return a call that packs memory, which begins at the first byte touched, or unpacks; a `Copier`."""
        mpi = self._mpi
        inside = mpi.buffer.fromaddress(memory.ctypes.data - self._first, _ALL_MEMORY)
        outside = mpi.buffer(packed)
        if unpack:
            call = _Call(self._type.Unpack, outside, 0, inside, mpi.COMM_SELF)
        else:
            call = _Call(self._type.Pack, inside, outside, 0, mpi.COMM_SELF)
        call.kept = memory, self
        return call


class _Call(partial[object]):
    """A call of MPI that keeps the memory and the type alive."""

    kept: object


def mpi_copier(datatype: Datatype, count: int, first: int) -> MpiCopier | None:
    """Return a copier of some items of a datatype whose first byte is ``first``; None if MPI would not be faster."""
    mpi, element = usable_mpi(), datatype.uniform
    if mpi is None or element is None or element.itemsize not in _WORDS:
        return None
    if datatype.size * count > _MOST_BYTES:
        return None
    return MpiCopier(mpi, datatype, count, first)


def free(mpi: ModuleType, handle: MPI.Datatype) -> None:
    """Free an MPI type, unless MPI was finalized."""
    if not mpi.Is_finalized():
        with suppress(mpi.Exception):
            handle.Free()
