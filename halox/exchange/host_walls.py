"""Fills of walls on the host, layer by layer, with NumPy operations on views that have few axes.

NumPy copies the source of an assignment first if its memory interleaves with the target's, unless the views have one
axis. Copies of a layer mostly have one axis of long words. Ufuncs take numbers faster as arrays of shape () than as
scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from halox.datatypes import StridedBlocks
from halox.decomposition import WallFill
from halox.exchange.wall_slabs import changes, twice_mirror
from halox.packing.host_views import View, block_view, element_view
from halox.runtime.arrays import Array
from halox.runtime.casting import cast

IN_PLACE = ("function", "phase")
"""Kinds of boundaries without a source, whose operations are not here."""

_Call = tuple[Callable[..., object] | None, tuple[Any, ...]]


class HostFills:
    """Operations that fill the halo of a field at walls, for any array of its layout; ``array`` is one of the arrays.

    ``calls`` has for each fill the functions with their operands, of which those in the array are `View`; None assigns.
    """

    def __init__(self, array: Array, fills: Sequence[WallFill]) -> None:
        self._start = array.__array_interface__["data"][0]
        self.calls = [self._calls_of(array, fill) for fill in fills]

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

    def _calls_of(self, array: Array, fill: WallFill) -> list[_Call]:
        along, dtype, calls = fill.along, array.dtype, list[_Call]()
        kind, number, mirrors = along.boundary.kind, along.boundary.number, along.boundary.mirrors
        target, source = array[fill.target], array[fill.source]
        for layer, depth in enumerate(() if kind in IN_PLACE else along.depths):
            at = (slice(None),) * along.array_axis + (slice(layer, layer + 1),)
            into, of = target[at], source[at] if mirrors else source
            result, cells = self._flat(into), self._flat(of)
            if kind in ("edge", "reflect", "symmetric"):
                calls.append((None, (self._flat(into, words=True), self._flat(of, words=True))))
            elif kind == "constant":
                calls.append((np.copyto, (result, cast(number, dtype)[()])))
            elif kind == "extrapolate":
                calls.append((np.subtract, (cells, self._flat(array[fill.inner]), result)))
                if abs(depth) > 1:
                    calls.append((np.multiply, (result, dtype.type(abs(depth)), result)))
                calls.append((np.add, (result, cells, result)))
            elif kind == "gradient":
                calls.append((np.add, (cells, changes(along, dtype)[layer, ...], result)))
            else:
                calls.append((np.subtract, (twice_mirror(along.boundary, dtype), cells, result)))
        return calls

    def _flat(self, view: Array, words: bool = False) -> View:
        """View the cells of a view, or with ``words`` their runs, with the fewest axes, in the order of the strides."""
        offset = view.__array_interface__["data"][0] - self._start
        view = view.transpose(sorted(range(view.ndim), key=lambda axis: -abs(view.strides[axis])))
        blocks = StridedBlocks.canonical(offset, view.shape, view.strides, view.itemsize)
        form = block_view(blocks) if words else element_view(blocks, view.dtype)
        if len(form.shape) > 1 and form.shape[-1] == 1:
            return View(form.shape[:-1], form.dtype, offset, form.strides[:-1])
        return form
