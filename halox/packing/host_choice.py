"""Choice of a copier for host memory by layout; the datatype keeps the result."""

from __future__ import annotations

from functools import partial
from math import gcd
from types import ModuleType

import numpy as np

from halox.datatypes import BlockList, Datatype, StridedBlocks
from halox.datatypes.boxes import contiguous_strides
from halox.packing import host_mpi
from halox.packing.blocking import SMALL_BYTES, tile_of
from halox.packing.host_copiers import (
    Bytes,
    Copier,
    Index,
    gathered,
    places_of,
    sliced,
    strided,
    words_of,
)
from halox.packing.host_mpi import MOST_BYTES, MOST_LISTED, SHORT_BLOCK, MpiType, Speeds, by_mpi
from halox.packing.host_views import block_view

# For a larger mean block length one slice copy per block is faster than one index entry per word.
_LONG_BLOCK = 4096
# NumPy copies elements of these sizes in a loop, and calls a function for each element of another size.
_NUMPY_ELEMENTS = (1, 2, 4, 8, 16)
# NumPy copies longer blocks at memory speed in spite of the function calls.
_WIDE_BLOCK = 96
# Smallest number of blocks for MPI. With fewer blocks the fixed cost of a copy dominates, about 300 ns with both.
_FEW_BLOCKS = 8
# Time of a NumPy copy below which the choice does not matter, in nanoseconds.
_LEAST_NS = 300.0
# Time of one slice copy, in nanoseconds.
_SLICE_NS = 100.0
_BYTES_A_NS = 16
# Unpacking through an index takes up to twice as long as packing. With MPI both take about the same time.
_BOTH_WAYS = 1.3
# MPI is chosen if it takes less than this share of NumPy's time.
_MARGIN = 0.9
# Making an MPI datatype takes as long as several calls. Single calls of `pack` make one only after this many uses.
_MANY_USES = 8
# Largest number of layouts that a datatype keeps, each for another number of items.
_MOST_KEPT = 16


class HostLayout:
    """Layout of a datatype's items in host memory, independent of the array.

    ``first`` is the displacement of the first byte touched, and ``span`` is the number of bytes from the first byte to
    the last. The memory passed to copiers begins at ``first``. ``strided`` holds regular blocks, relative to ``first``,
    or None. The layout has no reference to the datatype, because the datatype keeps the layout.
    """

    def __init__(self, datatype: Datatype, count: int) -> None:
        layout = datatype.items(count)
        self.first, stop = datatype.reach(count)
        self.span, self._nbytes = stop - self.first, datatype.size * count
        self.strided: StridedBlocks | None = None
        self._blocks: BlockList | None = None
        if layout.strided is not None:
            self.strided = form = layout.strided.shifted(-self.first)
            self._view = block_view(form)
            self.word = gcd(8, form.block_bytes, form.offset, *form.strides)
        else:
            self._blocks = blocks = layout.block_list().shifted(-self.first)
            self.word = gcd(8, *(int(np.gcd.reduce(v)) for v in (blocks.offsets, blocks.lengths)))
        self._places: list[tuple[slice, slice]] | None = None
        self._index: Index | None = None
        self._overlaps: bool | None = None
        is_even = self.strided is not None and not _is_odd(self.strided)
        self._is_simple = is_even and self._nbytes < SMALL_BYTES
        self._uses = 0
        self._type: MpiType | None = None
        self._stays = is_even  # whether the choice of NumPy is final

    def move(self, memory: Bytes, packed: Bytes, unpack: bool) -> None:
        """Pack ``memory`` into ``packed``, or unpack ``packed`` into ``memory``, once."""
        if not self._is_simple:
            self.copier(memory, lasting=False)(packed, unpack)()
            return
        shape, word, offset, strides = self._view
        inside = np.ndarray(shape, word, memory, offset, strides)
        outside = np.ndarray(shape, word, packed)
        if unpack:
            inside[...] = outside
        else:
            outside[...] = inside

    def overlaps(self, datatype: Datatype, count: int) -> bool:
        """Whether the items touch a byte twice."""
        if self._overlaps is None:
            self._overlaps = datatype.overlaps(count)
        return self._overlaps

    def copier(self, memory: Bytes, *, lasting: bool) -> Copier:
        """Return the copier for some memory; ``lasting`` means that the copier will be used many times."""
        self._uses += 1
        is_worth_it = (lasting or self._uses > _MANY_USES) and not self._stays
        if is_worth_it and memory.ctypes.data % self.word == 0:
            made = self._mpi_type()
            if made is not None:
                return partial(by_mpi, memory, made, partial(self.by_numpy, memory))
        return self.by_numpy(memory)

    @property
    def prefers_mpi(self) -> bool:
        """Whether MPI packs these items, if the memory is aligned."""
        return self._mpi_type() is not None

    def by_numpy(self, memory: Bytes) -> Copier:
        """Return the copier that uses NumPy."""
        blocks = self._blocks
        if blocks is None:
            if self.strided is not None and not self.strided.counts:
                return partial(sliced, memory, [(slice(0, self._nbytes),) * 2])
            shape, word, offset, strides = self._view
            view = np.ndarray(shape, word, memory.data, offset, strides)
            return partial(strided, view)
        if _is_long(blocks):
            if self._places is None:
                self._places = places_of(blocks)
            return partial(sliced, memory, self._places)
        if self._index is None:
            self._index = Index(blocks, self.word, self.word)
        return partial(gathered, words_of(memory, self.word), self._index)

    def _mpi_type(self) -> MpiType | None:
        """Return an MPI datatype if MPI is the better choice, else None; the datatype is kept."""
        if self._type is None:
            mpi = None if self._stays else host_mpi.usable_mpi()
            if mpi is None:
                return None
            if not 0 < self._nbytes <= MOST_BYTES or not self._pays(mpi):
                self._stays = True
                return None
            layout = self._blocks or self.strided
            assert layout is not None
            self._type = MpiType(mpi, layout, self.word, self.span)
        return self._type if self._type.is_alive else None

    def _pays(self, mpi: ModuleType) -> bool:
        measured = host_mpi.speeds(mpi)
        if measured is None:
            return False
        if self._blocks is not None:
            return listed_pays(self._blocks, self.word, measured)
        return self.strided is not None and regular_pays(self.strided, measured)


def regular_pays(form: StridedBlocks, measured: Speeds) -> bool:
    """Whether MPI is faster than NumPy for regular blocks: NumPy calls a function for each of many short blocks."""
    if not _is_odd(form) or form.n_blocks < _FEW_BLOCKS:
        return False
    shape, dtype, _, strides = block_view(form)
    if tile_of(shape, dtype.itemsize, contiguous_strides(shape, dtype.itemsize), strides):
        return False
    return measured.regular < _MARGIN * measured.element


def _is_odd(form: StridedBlocks) -> bool:
    """Whether NumPy has no loop for blocks of this size, and all strides are positive."""
    odd = form.block_bytes < _WIDE_BLOCK and form.block_bytes not in _NUMPY_ELEMENTS
    return odd and bool(form.counts) and min(form.strides) > 0


def listed_pays(blocks: BlockList, word: int, measured: Speeds) -> bool:
    """Whether MPI copies a list of blocks faster than NumPy copies words through an index, or slices."""
    n, nbytes = blocks.n_blocks, blocks.nbytes
    if n > MOST_LISTED:
        return False
    # NumPy and MPI copy the bytes of long blocks equally fast, so these bytes do not count. For short blocks, NumPy's
    # time per word includes the bytes.
    is_long = _is_long(blocks)
    numpy_ns = n * _SLICE_NS if is_long else nbytes // word * measured.word * _BOTH_WAYS
    if numpy_ns < _LEAST_NS:
        return False
    # MPI copies consecutive blocks of one length at equal steps in one loop.
    changed = np.diff(blocks.offsets, 2) != 0
    loops = 1 + int(np.count_nonzero(changed | (np.diff(blocks.lengths[1:]) != 0)))
    mpi_ns = loops * measured.listed + (n - loops) * min(measured.regular, measured.listed)
    if not is_long:
        mpi_ns += max(nbytes - SHORT_BLOCK * n, 0) / _BYTES_A_NS
    return mpi_ns < _MARGIN * numpy_ns


def _is_long(blocks: BlockList) -> bool:
    return blocks.nbytes >= _LONG_BLOCK * blocks.n_blocks


def host_layout(datatype: Datatype, count: int) -> HostLayout:
    """Return the layout of ``count`` items of a datatype in host memory; the datatype keeps it."""
    kept = datatype.kept
    found: HostLayout | None = kept.get(count)
    if found is None:
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        found = kept[count] = HostLayout(datatype, count)
    return found
