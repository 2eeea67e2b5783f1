"""Choice of the copies of a datatype's items in host memory, by the form of their layout.

The choice does not depend on the array. It is made once for each datatype and count, and cached in the datatype.
"""

from __future__ import annotations

from functools import cache, partial
from math import gcd, prod

import numpy as np

from halox.datatypes import Datatype, Layout
from halox.datatypes.boxes import contiguous_strides
from halox.datatypes.layout import spread
from halox.packing.blocking import SMALL_BYTES, tile_of
from halox.packing.host_copiers import (
    Bytes,
    Call,
    Copier,
    Pair,
    gathered,
    places_of,
    sliced,
    strided,
)
from halox.packing.host_views import View, block_view, common_views

# For a larger mean block length one slice copy per block is faster than one index entry per word.
_LONG_BLOCK = 4096
# An index copies this many words in about the time that a strided copy takes to start.
_PART_WORDS = 512
_MOST_PARTS = 64
# If the greatest common divisor of the block lengths is this many words or more, it is the element of an index. NumPy
# copies an element in about 5 ns.
_BLOCK_WORDS = 10
# NumPy copies longer elements at the speed of memory in spite of the function calls.
_WIDE_BLOCK = 96
# Least number of blocks that MPI copies faster than NumPy, and their least mean length in bytes if they need an index.
MPI_BLOCKS, _MPI_BLOCK_BYTES = 64, 64
# Uses of a layout by single calls before MPI's type is made.
_FIRST_USES = 4
# Largest number of layouts that a datatype caches, each for another number of items.
_MOST_LAYOUTS = 16


class HostLayout:
    """Layout of a datatype's items in host memory, independent of the array.

    ``first`` is the displacement of the first byte touched. The memory passed to copies begins at ``first``. The layout
    has no reference to the datatype, because the datatype has a reference to the layout.
    """

    def __init__(self, datatype: Datatype, count: int) -> None:
        layout, nbytes = datatype.items(count), datatype.size * count
        self.first = first = datatype.reach(count)[0]
        self._overlaps: bool | None = None
        self._view: View | None = None  # of a small layout with regular blocks
        self._copier: Copier
        self._is_by_mpi = False
        self._uses_before_mpi = 0  # of NumPy's copier, before MPI's is made; 0 if MPI is not faster
        form = layout.strided
        if form is not None:
            view = block_view(form.shifted(-first))
            if nbytes < SMALL_BYTES:
                self._view = view
            if form.counts:
                steps = contiguous_strides(view.shape, view.dtype.itemsize)
                packed = View(view.shape, view.dtype, 0, steps)
                self._copier = partial(strided, [(view, packed)])
                self._uses_before_mpi = _FIRST_USES * _are_odd([(view, packed)])
            else:
                self._copier = partial(sliced, [(slice(0, nbytes),) * 2])
            return
        blocks = layout.block_list().shifted(-first)
        word = gcd(8, *(int(np.gcd.reduce(v)) for v in (blocks.offsets, blocks.lengths)))
        if blocks.nbytes >= _LONG_BLOCK * blocks.n_blocks:
            self._copier = partial(sliced, places_of(blocks))
            return
        parts = _parts(layout, first, min(_MOST_PARTS, nbytes // word // _PART_WORDS))
        if parts is not None:
            self._copier = partial(strided, parts)
            self._uses_before_mpi = _FIRST_USES * _are_odd(parts)
            return
        block = int(np.gcd.reduce(blocks.lengths))
        itemsize = block if block >= _BLOCK_WORDS * word else word
        index = partial(
            spread, blocks.offsets // word, blocks.lengths // itemsize, itemsize // word
        )
        self._copier = partial(gathered, cache(index), itemsize, word)
        is_long = blocks.nbytes >= _MPI_BLOCK_BYTES * blocks.n_blocks
        self._uses_before_mpi = _FIRST_USES * (is_long and blocks.n_blocks >= MPI_BLOCKS)

    def is_by_mpi(self, datatype: Datatype, count: int) -> bool:
        """Whether MPI copies the items faster, from now on; see `move`."""
        if self._uses_before_mpi:
            self._use_mpi(datatype, count)
        return self._is_by_mpi

    def move(
        self, memory: Bytes, packed: Bytes, unpack: bool, datatype: Datatype, count: int
    ) -> None:
        """Pack ``memory`` into ``packed``, or unpack ``packed`` into ``memory``, once.

        ``datatype`` and ``count`` are the same as for the constructor.
        """
        if self._uses_before_mpi:
            self._uses_before_mpi -= 1
            if not self._uses_before_mpi:
                self._use_mpi(datatype, count)
        view = self._view
        if view is None:
            self._copier(memory, packed, unpack)()
            return
        inside, outside = view.of(memory), np.ndarray(view.shape, view.dtype, packed)
        if unpack:
            inside[...] = outside
        else:
            outside[...] = inside

    def _use_mpi(self, datatype: Datatype, count: int) -> None:
        """Let MPI copy from now on, if it can; it needs some 100 us to make a type."""
        self._uses_before_mpi = 0
        from halox.packing.mpi_copier import mpi_copier

        copier = mpi_copier(datatype, count, self.first)
        if copier is not None:
            self._copier, self._view, self._is_by_mpi = copier, None, True

    def prepared(
        self, memory: Bytes, packed: Bytes, unpack: bool, datatype: Datatype, count: int
    ) -> Call:
        """Return a call that packs ``memory`` into ``packed``, or unpacks, whenever it is made; see `move`."""
        self.is_by_mpi(datatype, count)
        return self._copier(memory, packed, unpack)

    def overlaps(self, datatype: Datatype, count: int) -> bool:
        if self._overlaps is None:
            self._overlaps = datatype.overlaps(count)
        return self._overlaps


def _are_odd(pairs: list[Pair]) -> bool:
    """Whether NumPy would call a function for each of many elements of memory, in the order of the packed bytes."""
    return sum(prod(view.shape) for view, _ in pairs) >= MPI_BLOCKS and all(
        view.dtype.kind == "V"
        and view.dtype.itemsize < _WIDE_BLOCK
        and min(view.strides) > 0
        and tile_of(view.shape, view.dtype.itemsize, packed.strides, view.strides) is None
        for view, packed in pairs
    )


def _parts(layout: Layout, first: int, limit: int) -> list[Pair] | None:
    """Return the views of a layout's regular parts, for example boxes of several fields.

    Memory begins at displacement ``first``. None if there are more than ``limit`` parts, or if one copy cannot move a
    part in order.
    """
    pairs = []
    for part in layout.parts(limit) or ():
        views = common_views(part.packed, part.memory.shifted(-first))
        if views is None:
            return None
        packed, memory = views
        pairs.append((memory, packed))
    return pairs or None


def host_layout(datatype: Datatype, count: int) -> HostLayout:
    """Return the layout of ``count`` items of a datatype in host memory; the datatype caches it."""
    layouts = datatype.host_layouts
    layout: HostLayout | None = layouts.get(count)
    if layout is None:
        if len(layouts) >= _MOST_LAYOUTS:
            layouts.clear()
        layout = layouts[count] = HostLayout(datatype, count)
    return layout
