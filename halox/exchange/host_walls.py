"""Fills of walls on the host, layer by layer, with NumPy operations on views that have few axes.

NumPy copies operands whose memory interleaves, unless they have one axis. Copies of a layer mostly have one axis of
long words. Sums have one axis of cells, in place or in copies, and are made in parts that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from halox.datatypes import StridedBlocks
from halox.decomposition import AxisFill, WallFill
from halox.packing.host_views import View, block_view, element_view
from halox.runtime.arrays import Array
from halox.runtime.casting import cast

IN_PLACE = ("function", "phase")
"""Kinds of boundaries without a source, whose operations are not here."""

_PART = 4096  # cells of a sum that are computed at once

_Call = tuple[Callable[..., object] | None, tuple[Any, ...]]


class HostFills:
    """Operations that fill the halo of a field at walls, for any array of its layout.

    ``array`` is one of the arrays. Operands in the array are kept as `View`; ``calls`` has for each fill the functions
    with their operands, with None for an assignment.
    """

    def __init__(self, array: Array, fills: Sequence[WallFill]) -> None:
        thinnest = min([array.shape[fill.along.array_axis] for fill in fills])
        self._array, self._start = array, array.__array_interface__["data"][0]
        self._room = np.empty((3, array.size // thinnest), array.dtype)
        self._calls: list[_Call] = []
        self._sums: list[_Call] = []
        self.calls = [self._calls_of(fill) for fill in fills]
        del self._array

    def steps(self, number: int, memory: Any, origin: int) -> Iterator[Callable[[], object]]:
        """Yield the operations of a fill on an array whose element [0, ..., 0] is at ``origin`` of its memory."""
        for function, operands in self.calls[number]:
            views = [
                np.ndarray(x.shape, x.dtype, memory, origin + x.offset, x.strides)
                if isinstance(x, View)
                else x
                for x in operands
            ]
            if function is None:
                yield partial(views[0].__setitem__, ..., views[1])
            else:
                yield partial(function, *views)

    def _calls_of(self, fill: WallFill) -> list[_Call]:
        """Return the operations of a fill, layer by layer."""
        self._calls = []
        kind, mirrors = fill.along.boundary.kind, fill.along.boundary.mirrors
        if kind in IN_PLACE:
            return []
        target, source = self._array[fill.target], self._array[fill.source]
        for layer, depth in enumerate(fill.along.depths):
            at = (slice(None),) * fill.along.array_axis + (slice(layer, layer + 1),)
            into, of = target[at], source[at] if mirrors else source
            if kind in ("edge", "reflect", "symmetric"):
                self._calls.append(
                    (None, (self._flat(into, words=True), self._flat(of, words=True)))
                )
            elif kind == "constant":
                number = cast(fill.along.boundary.number, target.dtype)[()]
                self._calls.append((np.copyto, (self._flat(into), number)))
            else:
                if not layer or mirrors:
                    cells = self._read(of, 0)
                    slope = self._room[1, : into.size]
                    if kind == "extrapolate":
                        inner = self._read(self._array[fill.inner], 1)
                        self._sums.append((np.subtract, (cells, inner, slope)))
                self._write(fill.along, depth, cells, slope, into)
        self._add_up()
        return self._calls

    def _write(
        self, along: AxisFill, depth: int, cells: View | Array, slope: Array, into: Array
    ) -> None:
        """Add the sums that compute a layer from the cells inside, and from their slope."""
        kind, number, dtype = along.boundary.kind, along.boundary.number, into.dtype
        result, copy, words = self._cells_of(into, 2)
        if kind == "extrapolate":
            rise = slope
            if abs(depth) > 1:
                rise = self._room[2, : into.size]
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
            self._calls.append((None, (words, copy)))

    def _flat(self, view: Array, words: bool = False) -> View:
        """View the cells of a view, or with ``words`` their runs, with the fewest axes, in the order of the strides."""
        offset = view.__array_interface__["data"][0] - self._start
        view = view.transpose(sorted(range(view.ndim), key=lambda axis: -abs(view.strides[axis])))
        blocks = StridedBlocks.canonical(offset, view.shape, view.strides, view.itemsize)
        form = block_view(blocks) if words else element_view(blocks, view.dtype)
        if form.shape[-1:] == (1,):
            return View(form.shape[:-1], form.dtype, offset, form.strides[:-1])
        return form

    def _cells_of(self, view: Array, place: int) -> tuple[View | Array, Array | None, View]:
        """Return cells with one axis, in place or in a copy; the copy as words, if it is one; the view as words."""
        cells, words = self._flat(view), self._flat(view, words=True)
        if len(cells.shape) == 1:
            return cells, None, words
        copy = self._room[place, : view.size]
        return copy, np.ndarray(words.shape, words.dtype, copy.data), words

    def _read(self, view: Array, place: int) -> View | Array:
        """Return cells with one axis, which may be copied in each exchange."""
        cells, copy, words = self._cells_of(view, place)
        if copy is not None:
            self._calls.append((None, (copy, words)))
        return cells

    def _add_up(self) -> None:
        """Make the sums part by part."""
        cells = self._sums[0][1][-1].shape[0] if self._sums else 0
        for start in range(0, cells, _PART):
            for function, operands in self._sums:
                self._calls.append((function, tuple(_part(x, start, cells) for x in operands)))
        self._sums.clear()


def _part(operand: Any, start: int, cells: int) -> Any:
    """Return a part of an operand with one axis; numbers are whole."""
    if isinstance(operand, View):
        (stride,), shape = operand.strides, (min(_PART, cells - start),)
        return View(shape, operand.dtype, operand.offset + start * stride, operand.strides)
    return operand[start : start + _PART] if np.ndim(operand) else operand
