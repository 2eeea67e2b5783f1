"""Fills of walls on the host, layer by layer, with NumPy operations on views that have few axes.

NumPy copies operands whose memory interleaves, unless they have one axis. Copies of a layer mostly have one axis of
long words. Sums have one axis of cells, in place or in copies, and are made in parts that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from halox.datatypes import StridedBlocks
from halox.decomposition import AxisFill, WallFill
from halox.packing.host_views import block_view, element_view
from halox.runtime.arrays import Array
from halox.runtime.casting import cast

_PART = 4096  # cells of a sum that are computed at once


class HostFills:
    """Makes the operations that fill the halo of an array, which begins at ``start`` of ``memory``.

    ``room`` has space for three layers.
    """

    def __init__(self, array: Array, memory: Any, start: int, room: Array) -> None:
        self._array, self._memory, self._room = array, memory, room
        self._shift = start - array.__array_interface__["data"][0]
        self._steps: list[Callable[[], object]] = []
        self._sums: list[tuple[np.ufunc, tuple[Any, ...]]] = []

    def steps(self, fill: WallFill) -> list[Callable[[], object]]:
        """Return the operations of a fill."""
        self._steps = []
        kind, mirrors = fill.along.boundary.kind, fill.along.boundary.mirrors
        target, source = self._array[fill.target], self._array[fill.source]
        for layer, depth in enumerate(fill.along.depths):
            at = (slice(None),) * fill.along.array_axis + (slice(layer, layer + 1),)
            into, of = target[at], source[at] if mirrors else source
            if kind in ("edge", "reflect", "symmetric"):
                copy = self._flat(into, words=True).__setitem__
                self._steps.append(partial(copy, ..., self._flat(of, words=True)))
            elif kind == "constant":
                number = cast(fill.along.boundary.number, target.dtype)[()]
                self._steps.append(partial(np.copyto, self._flat(into), number))
            else:
                if not layer or mirrors:
                    cells = self._read(of, 0)
                    slope = self._room[1, : cells.size]
                    if kind == "extrapolate":
                        inner = self._read(self._array[fill.inner], 1)
                        self._sums.append((np.subtract, (cells, inner, slope)))
                self._write(fill.along, depth, cells, slope, into)
        self._add_up()
        return self._steps

    def _write(self, along: AxisFill, depth: int, cells: Array, slope: Array, into: Array) -> None:
        """Add the sums that compute a layer from the cells inside, and from their slope."""
        kind, number, dtype = along.boundary.kind, along.boundary.number, into.dtype
        result, copy, words = self._cells_of(into, 2)
        if kind == "extrapolate":
            rise = slope
            if abs(depth) > 1:
                rise = self._room[2, : cells.size]
                self._sums.append((np.multiply, (slope, dtype.type(abs(depth)), rise)))
            self._sums.append((np.add, (cells, rise, result)))
        elif kind == "gradient":
            change = (depth * cast(number, dtype)).astype(dtype)[()]
            self._sums.append((np.add, (cells, change, result)))
        elif number is None:
            self._sums.append((np.negative, (cells, result)))
        else:
            twice = (2 * cast(number, dtype)).astype(dtype)[()]
            self._sums.append((np.subtract, (twice, cells, result)))
        if copy is not None:
            self._add_up()
            self._steps.append(partial(words.__setitem__, ..., copy))

    def _flat(self, view: Array, words: bool = False) -> Array:
        """View the cells of a view, or with ``words`` their runs, with the fewest axes, in the order of the strides."""
        view = view.transpose(sorted(range(view.ndim), key=lambda axis: -abs(view.strides[axis])))
        blocks = StridedBlocks.canonical(0, view.shape, view.strides, view.itemsize)
        form = block_view(blocks) if words else element_view(blocks, view.dtype)
        shape, strides = form.shape, form.strides
        if shape[-1:] == (1,):
            shape, strides = shape[:-1], strides[:-1]
        offset = self._shift + view.__array_interface__["data"][0]
        return np.ndarray(shape, form.dtype, self._memory, offset, strides)

    def _cells_of(self, view: Array, place: int) -> tuple[Array, Array | None, Array]:
        """Return cells with one axis, in place or in a copy; the copy as words, if it is one; the view as words."""
        cells, words = self._flat(view), self._flat(view, words=True)
        if cells.ndim == 1:
            return cells, None, words
        copy = self._room[place, : cells.size]
        return copy, np.ndarray(words.shape, words.dtype, copy.data), words

    def _read(self, view: Array, place: int) -> Array:
        """Return cells with one axis, which may be copied in each exchange."""
        cells, copy, words = self._cells_of(view, place)
        if copy is not None:
            self._steps.append(partial(copy.__setitem__, ..., words))
        return cells

    def _add_up(self) -> None:
        """Make the sums part by part."""
        for start in range(0, self._sums[0][1][-1].size if self._sums else 0, _PART):
            part = slice(start, start + _PART)
            for function, operands in self._sums:
                cut = (x[part] if np.ndim(x) else x for x in operands)
                self._steps.append(partial(function, *cut))
        self._sums.clear()
