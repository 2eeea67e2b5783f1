"""Choice of a copier for host memory by layout; what is found out about items is kept with their datatype."""

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

# From this mean block length on, one slice copy a block beats an index entry a word.
_LONG_BLOCK = 4096
# NumPy copies elements of these sizes without a call each, and blocks of this length at the speed of memory.
_NUMPY_ELEMENTS = (1, 2, 4, 8, 16)
_WIDE_BLOCK = 96
# A copy by NumPy takes some 300 ns beside its blocks, as MPI's does.
_FEW_BLOCKS = 8
# Nanoseconds of a copy through an index or by slices from which on the choice matters; of one slice copy.
_LEAST_NS = 300.0
_SLICE_NS = 100.0
_BYTES_A_NS = 16
# Unpacking through an index takes up to twice the time of packing, by MPI about the same.
_BOTH_WAYS = 1.3
# Share of NumPy's time at which MPI is taken.
_MARGIN = 0.9
# Making an MPI datatype takes the time of some calls: whoever packs once makes none until it has been needed so often.
_MANY_USES = 8
# Numbers of items for which a datatype keeps layouts.
_MOST_KEPT = 16


class HostLayout:
    """Items of a datatype in host memory, whatever the array.

    ``first`` is the displacement of the first byte touched, where the memory of the copiers begins, and ``span`` the
    bytes up to the last; regular blocks are ``strided``, relative to the first byte. No reference to the datatype,
    which keeps this.
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
        self._stays = is_even  # with NumPy

    def move(self, memory: Bytes, packed: Bytes, unpack: bool) -> None:
        """Pack some memory into a buffer, or unpack that, once."""
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
        """Whether these items touch some byte twice."""
        if self._overlaps is None:
            self._overlaps = datatype.overlaps(count)
        return self._overlaps

    def copier(self, memory: Bytes, *, lasting: bool) -> Copier:
        """Return the copier for some memory; a ``lasting`` one is worth preparations."""
        self._uses += 1
        is_worth_it = (lasting or self._uses > _MANY_USES) and not self._stays
        if is_worth_it and memory.ctypes.data % self.word == 0:
            made = self._mpi_type()
            if made is not None:
                return partial(by_mpi, memory, made, partial(self.by_numpy, memory))
        return self.by_numpy(memory)

    @property
    def prefers_mpi(self) -> bool:
        """Whether MPI packs these items, in memory that suits it."""
        return self._mpi_type() is not None

    def by_numpy(self, memory: Bytes) -> Copier:
        """Return NumPy's copier."""
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
        """Return MPI's datatype if MPI is the better choice; it is kept."""
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
    """Whether NumPy calls a function for each of many short blocks, and MPI is faster."""
    if not _is_odd(form) or form.n_blocks < _FEW_BLOCKS:
        return False
    shape, dtype, _, strides = block_view(form)
    if tile_of(shape, dtype.itemsize, contiguous_strides(shape, dtype.itemsize), strides):
        return False
    return measured.regular < _MARGIN * measured.element


def _is_odd(form: StridedBlocks) -> bool:
    """Whether NumPy has no loop for blocks of this size; strides are positive."""
    odd = form.block_bytes < _WIDE_BLOCK and form.block_bytes not in _NUMPY_ELEMENTS
    return odd and bool(form.counts) and min(form.strides) > 0


def listed_pays(blocks: BlockList, word: int, measured: Speeds) -> bool:
    """Whether MPI goes through a list of blocks faster than NumPy through words, or through slices."""
    n, nbytes = blocks.n_blocks, blocks.nbytes
    if n > MOST_LISTED:
        return False
    # The bytes of long blocks take the same time by either, those of short blocks are in NumPy's time a word.
    is_long = _is_long(blocks)
    numpy_ns = n * _SLICE_NS if is_long else nbytes // word * measured.word * _BOTH_WAYS
    if numpy_ns < _LEAST_NS:
        return False
    # Blocks of one length, one step apart, are one loop of MPI's.
    changed = np.diff(blocks.offsets, 2) != 0
    loops = 1 + int(np.count_nonzero(changed | (np.diff(blocks.lengths[1:]) != 0)))
    mpi_ns = loops * measured.listed + (n - loops) * min(measured.regular, measured.listed)
    if not is_long:
        mpi_ns += max(nbytes - SHORT_BLOCK * n, 0) / _BYTES_A_NS
    return mpi_ns < _MARGIN * numpy_ns


def _is_long(blocks: BlockList) -> bool:
    return blocks.nbytes >= _LONG_BLOCK * blocks.n_blocks


def host_layout(datatype: Datatype, count: int) -> HostLayout:
    """Return items of a datatype in host memory; kept with the datatype."""
    kept = datatype.kept
    found: HostLayout | None = kept.get(count)
    if found is None:
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        found = kept[count] = HostLayout(datatype, count)
    return found
