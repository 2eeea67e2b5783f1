"""Operations of NumPy or CuPy that fill the halo at walls, and their adjoints: for all boundaries and dtypes.

On a GPU, `wall_launch` replaces them by one kernel launch for most boundaries.

On the host an operation writes one layer, as a view with few axes: NumPy first copies the source of an assignment if
its memory interleaves with the target's, unless the views have one axis, and copies of a layer mostly have one axis of
long words. On a GPU an operation writes all layers whose sources are a constant step apart, in few launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from halox.datatypes import StridedBlocks
from halox.decomposition import AxisFill, Boundary, WallFill, Walls
from halox.packing.host_views import View, block_view, element_view
from halox.runtime.arrays import Array, Described, DType
from halox.runtime.casting import cast
from halox.runtime.gpu.cuda import cupy

Step = Callable[[], object]


class Call(partial):  # type: ignore[type-arg]
    """A call of a user's function."""


class InPlace(partial):  # type: ignore[type-arg]
    """A call that multiplies a halo that neighbours have sent, and so must run once in an exchange."""


class ArrayOperation(NamedTuple):
    """A function and its operands, of which those in the array are `View`; None assigns the second to the first."""

    function: Callable[..., object] | None
    operands: tuple[Any, ...]
    kind: type[partial[object]] = partial

    def step(self, view: Callable[[View], Any]) -> Step:
        """Return the operation on an array; ``view`` returns views of it."""
        operands = [view(one) if isinstance(one, View) else one for one in self.operands]
        if self.function is None:
            target, source = operands
            return partial(target.__setitem__, ..., source)
        return self.kind(self.function, *operands)


@dataclass(frozen=True)
class FieldWalls:
    """Walls of the field with this number in a plan."""

    number: int
    origin: tuple[int, ...]  # global index of the array's first point, per grid axis
    walls: Walls
    is_whole: bool = True  # not only the cells of one parity

    def indices(self, xp: ModuleType, fill: WallFill) -> tuple[Any, ...]:
        """Return the global indices of the cells that a fill writes, one array per grid axis; periodic axes wrap."""
        first = fill.along.array_axis - fill.along.axis
        per_axis = []
        for axis, points in enumerate(self.walls.extents):
            cut = fill.box[first + axis]
            indices = xp.arange(cut.start, cut.stop) + self.origin[axis]
            per_axis.append(indices % points if self.walls.periodic[axis] else indices)
        return tuple(xp.ix_(*per_axis))


def box_view(box: Sequence[slice], described: Described) -> View:
    """View a box of an array."""
    cuts = [range(extent)[cut] for cut, extent in zip(box, described.shape, strict=True)]
    pairs = [*zip(cuts, described.strides, strict=True)]
    offset = sum(cut.start * stride for cut, stride in pairs)
    strides = tuple(cut.step * stride for cut, stride in pairs)
    return View(tuple(map(len, cuts)), described.dtype, offset, strides)


def view_in(memory: Any, origin: int, view: View, device: int | None) -> Any:
    """View an array whose first element is at ``origin`` of some memory of the host, or of an address on a GPU."""
    shape, dtype, offset, strides = view
    if device is None:
        return np.ndarray(shape, dtype, memory, origin + offset, strides)
    from halox.runtime.gpu.memory import device_view

    return device_view(memory + origin + offset, shape, dtype, strides, device)


def twice_mirror(boundary: Boundary, dtype: DType) -> Array:
    """Return the number from which a mirror image of the opposite sign is subtracted, as an array of shape ()."""
    # -0 - x is -x for zeros, too. NumPy 2.4 computes negative(x) wrongly for some strides.
    number = boundary.number
    return np.asarray(-dtype.type(0) if number is None else 2 * cast(number, dtype)).astype(dtype)


class WallOperations:
    """The operations that fill the walls of a field; with ``adds`` their adjoints, which add a halo to its sources.

    ``call`` calls a user's function.
    """

    def __init__(
        self,
        walls: FieldWalls,
        described: Described,
        call: Callable[..., object],
        *,
        adds: bool,
    ) -> None:
        self._walls, self._described, self._call, self._adds = walls, described, call, adds
        self._dtype, self._is_host = described.dtype, described.device is None
        self._xp: ModuleType = np if self._is_host else cupy()

    def all(self) -> list[ArrayOperation]:
        signs, operations = list[ArrayOperation](), list[ArrayOperation]()
        for box in self._walls.walls.negated:
            view = self._cells(box)
            zero = -self._dtype.type(0)
            signs.append(ArrayOperation(self._xp.subtract, (zero, view, view), InPlace))
        fills = self._walls.walls.fills()
        for fill in reversed(fills) if self._adds else fills:
            if prod(box_view(fill.box, self._described).shape):
                operations += self._adjoint(fill) if self._adds else self._fill(fill)
        return [*operations, *signs] if self._adds else [*signs, *operations]

    def _fill(self, fill: WallFill) -> Iterator[ArrayOperation]:
        xp, boundary, dtype = self._xp, fill.along.boundary, self._dtype
        kind, number = boundary.kind, boundary.number
        if kind == "function":
            slab, indices = box_view(fill.box, self._described), self._walls.indices(xp, fill)
            operands: tuple[Any, ...] = slab, fill.along.axis, fill.along.side, indices
            if boundary.takes_field:
                whole = (slice(None),) * len(self._described.shape)
                operands = (*operands, box_view(whole, self._described))
            yield ArrayOperation(self._call, (boundary.function, *operands), Call)
            return
        if kind == "phase":
            yield self._turned(fill)
            return
        for part in self._parts(fill.along):
            target = self._layers(fill, part.target)
            if kind == "constant":
                yield ArrayOperation(None, (target, self._scalar(cast(number, dtype))))
                continue
            source = self._layers(fill, _source(part))
            if kind == "gradient":
                change = np.array(part.depths).astype(dtype) * cast(number, dtype)
                yield ArrayOperation(xp.add, (source, self._by_layer(part, change), target))
            elif kind == "extrapolate":
                distances = abs(np.array(part.depths))
                inner = self._layers(fill, slice(part.inner, part.inner + 1))
                yield ArrayOperation(xp.subtract, (source, inner, target))
                if max(distances) > 1:
                    yield ArrayOperation(
                        xp.multiply, (target, self._by_layer(part, distances), target)
                    )
                yield ArrayOperation(xp.add, (target, source, target))
            elif kind in ("antireflect", "antisymmetric"):
                twice = self._scalar(twice_mirror(boundary, dtype))
                yield ArrayOperation(xp.subtract, (twice, source, target))
            else:
                cuts = part.target, _source(part)
                cells = [self._layers(fill, cut, words=True) for cut in cuts]
                yield ArrayOperation(None, tuple(cells))

    def _adjoint(self, fill: WallFill) -> Iterator[ArrayOperation]:
        """Yield the adjoint of one fill: add the halo to its sources, and clear it."""
        xp, kind = self._xp, fill.along.boundary.kind
        if kind == "phase":
            yield self._turned(fill)
            return
        for part in self._parts(fill.along) if kind != "constant" else ():
            target = self._layers(fill, part.target)
            source = self._layers(fill, _source(part))
            sign = xp.subtract if kind in ("antireflect", "antisymmetric") else xp.add
            yield ArrayOperation(sign, (source, target, source))
            if kind == "extrapolate":
                inner = self._layers(fill, slice(part.inner, part.inner + 1))
                distances = self._by_layer(part, abs(np.array(part.depths)))
                yield ArrayOperation(xp.multiply, (target, distances, target))
                yield ArrayOperation(xp.add, (source, target, source))
                yield ArrayOperation(xp.subtract, (inner, target, inner))
        yield ArrayOperation(None, (self._cells(fill.box), self._scalar(np.zeros((), self._dtype))))

    def _turned(self, fill: WallFill) -> ArrayOperation:
        """Return the multiplication by a phase, beyond the low side by its inverse, or by the conjugates."""
        number = fill.along.boundary.number
        assert number is not None
        phase = cast(number if fill.along.side == "high" else 1 / number, self._dtype)[()]
        target = self._cells(fill.box)
        factor = np.conj(phase) if self._adds else phase
        return ArrayOperation(self._xp.multiply, (target, factor, target), InPlace)

    def _parts(self, along: AxisFill) -> Iterator[AxisFill]:
        """Yield a fill in the parts that one operation can do."""
        for run in along.runs():
            # Layers with the same source are added to it one after the other.
            one_by_one = self._is_host or (self._adds and not run.step)
            yield from run.layers() if one_by_one else [run]

    def _scalar(self, number: Array) -> Any:
        """Return a number as an operand: NumPy takes arrays of shape () faster than scalars."""
        return number if self._is_host else number[()]

    def _by_layer(self, part: AxisFill, numbers: Array) -> Any:
        """Return one number per layer of a part, in a shape that broadcasts along the other axes."""
        numbers = numbers.astype(self._dtype)
        if self._is_host:
            return numbers[0, ...]
        shape = [1] * len(self._described.shape)
        shape[part.array_axis] = -1
        return self._xp.asarray(numbers.reshape(shape))

    def _layers(self, fill: WallFill, layers: slice, *, words: bool = False) -> View:
        """View some layers of the array within the box of a fill."""
        axis = fill.along.array_axis
        return self._cells((*fill.box[:axis], layers, *fill.box[axis + 1 :]), words=words)

    def _cells(self, box: Sequence[slice], *, words: bool = False) -> View:
        """View a box; on the host with the fewest axes, in the order of the strides, with ``words`` as long words."""
        view = box_view(box, self._described)
        if not self._is_host:
            return view
        loops = sorted(zip(view.shape, view.strides, strict=True), key=lambda loop: -abs(loop[1]))
        shape, strides = zip(*loops, strict=True)
        blocks = StridedBlocks.canonical(view.offset, shape, strides, self._dtype.itemsize)
        form = block_view(blocks) if words else element_view(blocks, self._dtype)
        if len(form.shape) > 1 and form.shape[-1] == 1:
            return View(form.shape[:-1], form.dtype, view.offset, form.strides[:-1])
        return form


def _source(part: AxisFill) -> slice:
    """Return the layers from which a part is computed; all its layers may have one source."""
    first, stop = part.sources[0], part.sources[-1] + (part.step or 1)
    return slice(first, stop if stop >= 0 else None, part.step or 1)
