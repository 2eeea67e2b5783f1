"""Packing of host memory with ``MPI_Pack`` and ``MPI_Unpack``, if MPI is in use and faster than NumPy.

NumPy copies elements of 1, 2, 4, 8 and 16 bytes at memory speed. It calls a function for each element of another size,
and needs an index entry per word for irregular blocks. MPI has fast loops for short blocks of any number of words, and
for lists of blocks.

The MPI datatype is made from the canonical layout, in words and relative to the first byte. It is flat and has no
negative displacements, no empty parts and no inner bounds, because MPI implementations disagree about these. Open MPI
5.0 misreads a stride of -1 byte. MPICH 5.0 packs other bytes if an inner extent is not positive.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from halox.datatypes import BlockList, StridedBlocks
from halox.packing.host_copiers import Bytes, Call, Copier
from halox.runtime.finalizing import before_finalize

if TYPE_CHECKING:
    from mpi4py import MPI

MOST_BYTES = (1 << 31) - 1
"""Largest number of packed bytes, because MPI counts them in an int."""

MOST_LISTED = 1 << 20
"""Longest list of blocks to pass to MPI; implementations keep 32 bytes or more per block."""

_TRIALS = 9
_BLOCKS = 512
_WORDS_A_BLOCK = 3
SHORT_BLOCK = 4 * _WORDS_A_BLOCK
"""Bytes of the blocks in the measurement."""


def usable_mpi() -> ModuleType | None:
    """Return ``mpi4py.MPI`` if it is initialized and any thread may call it, else None; never imports it."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    return mpi if mpi.Query_thread() == mpi.THREAD_MULTIPLE else None


class Speeds(NamedTuple):
    """Measured times in nanoseconds: per block of three 4-byte words, or per word."""

    regular: float  # MPI, per block at equal strides
    listed: float  # MPI, per block of a list
    element: float  # NumPy, per block as one element
    word: float  # NumPy, per word through an index


@cache
def speeds(mpi: ModuleType) -> Speeds | None:
    """Measure the speed of NumPy and MPI, once per process, in about 100 us; None if MPI packs wrong bytes."""
    rng = np.random.default_rng(0)
    element = np.dtype(f"V{SHORT_BLOCK}")
    memory = rng.integers(0, 256, 2 * _BLOCKS * element.itemsize, np.uint8)
    starts = np.sort(rng.permutation(2 * _BLOCKS)[:_BLOCKS]) * element.itemsize
    lengths = np.full(_BLOCKS, element.itemsize)
    regular = StridedBlocks(0, (_BLOCKS,), (2 * element.itemsize,), element.itemsize)
    index = (starts[:, None] // 4 + np.arange(_WORDS_A_BLOCK)).ravel()
    outs = [np.empty(_BLOCKS * element.itemsize, np.uint8) for _ in range(4)]
    types = [
        MpiType(mpi, regular, 4, memory.size),
        MpiType(mpi, BlockList(starts, lengths), 4, memory.size),
    ]
    calls: list[Call] = [
        partial(types[0].handle.Pack, memory, outs[0], 0, mpi.COMM_SELF),
        partial(types[1].handle.Pack, memory, outs[1], 0, mpi.COMM_SELF),
        partial(np.copyto, outs[2].view(element), memory.view(element)[::2]),
        partial(memory.view("u4").take, index, None, outs[3].view("u4"), "clip"),
    ]
    regular_ns, listed_ns, element_ns, word_ns = [_least_ns(call) / _BLOCKS for call in calls]
    for one in types:
        one.free()
    if (outs[0] != outs[2]).any() or (outs[1] != outs[3]).any():
        return None
    return Speeds(regular_ns, listed_ns, element_ns, word_ns / _WORDS_A_BLOCK)


def _least_ns(call: Call) -> float:
    call()
    found = []
    for _ in range(_TRIALS):
        begin = time.perf_counter_ns()
        call()
        found.append(time.perf_counter_ns() - begin)
    return min(found)


_living: weakref.WeakSet[MpiType] = weakref.WeakSet()


def _free_all() -> None:
    for one in list(_living):
        one.free()


class MpiType:
    """A committed MPI datatype of a layout, freed with this object or before MPI is finalized.

    The layout is relative to the first byte of a memory of ``span`` bytes, and its strides are positive. ``word`` is 1,
    2, 4 or 8 and divides all displacements, strides and lengths. The ``handle`` is valid while ``is_alive`` is True.
    ``calls`` holds the prepared calls that use the handle.
    """

    def __init__(
        self, mpi: ModuleType, layout: StridedBlocks | BlockList, word: int, span: int
    ) -> None:
        words = {1: mpi.UINT8_T, 2: mpi.UINT16_T, 4: mpi.UINT32_T, 8: mpi.UINT64_T}[word]
        made = _strided if isinstance(layout, StridedBlocks) else _listed
        flat = made(words, word, layout)  # type: ignore[arg-type]
        self.mpi = mpi
        self.handle: MPI.Datatype = flat.Create_resized(0, span).Commit()
        flat.Free()
        self.is_alive = True
        self.calls: weakref.WeakSet[_Prepared] = weakref.WeakSet()
        self._free = weakref.finalize(self, _free, mpi, self.handle)
        self._free.atexit = False
        before_finalize(mpi, _free_all)
        _living.add(self)

    def free(self) -> None:
        """Free the handle, and switch the prepared calls to NumPy; may be called again."""
        self.is_alive = False
        for call in list(self.calls):
            call.switch()
        self._free()


def _free(mpi: ModuleType, handle: MPI.Datatype) -> None:
    if not mpi.Is_finalized():
        with suppress(mpi.Exception):
            handle.Free()


def _strided(words: MPI.Datatype, word: int, blocks: StridedBlocks) -> MPI.Datatype:
    *outer, (count, stride) = zip(blocks.counts, blocks.strides, strict=True)
    made = words.Create_hvector(count, blocks.block_bytes // word, stride)
    for count, stride in reversed(outer):
        made = _replaced(made, made.Create_hvector(count, 1, stride))
    return _replaced(made, made.Create_hindexed_block(1, [blocks.offset]))


def _replaced(old: MPI.Datatype, made: MPI.Datatype) -> MPI.Datatype:
    old.Free()
    return made


def _listed(words: MPI.Datatype, word: int, blocks: BlockList) -> MPI.Datatype:
    starts, lengths = blocks.offsets.tolist(), (blocks.lengths // word).tolist()
    if len(set(lengths)) == 1:
        return words.Create_hindexed_block(lengths[0], starts)
    return words.Create_hindexed(lengths, starts)


class _Prepared:
    """A prepared MPI call, and the ``other`` call that replaces it when MPI is finalized."""

    def __init__(self, call: Call, other: Callable[[], Call]) -> None:
        self._call, self._other = call, other

    def __call__(self) -> None:
        self._call()

    def switch(self) -> None:
        """Prepare the other call and replace the MPI call with it."""
        self._call = self._other()


def by_mpi(
    memory: Bytes, datatype: MpiType, other: Callable[[], Copier], packed: Bytes, unpack: bool
) -> Call:
    """Copy with MPI, or with another copier after MPI is finalized."""
    mpi, handle = datatype.mpi, datatype.handle
    inside, outside, comm = mpi.buffer(memory), mpi.buffer(packed), mpi.COMM_SELF
    if unpack:
        call = partial(handle.Unpack, outside, 0, inside, comm)
    else:
        call = partial(handle.Pack, inside, outside, 0, comm)
    prepared = _Prepared(call, lambda: other()(packed, unpack))
    datatype.calls.add(prepared)
    return prepared
