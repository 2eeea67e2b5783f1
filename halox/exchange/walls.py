"""Channel of a plan that fills the halo at the walls of the grid, or adds it to the cells from which it was filled.

An exchange fills the walls after all other channels have finished, since the fills read the halos that the neighbours
have sent. An accumulation is the adjoint: it runs the adjoint of each fill, in reverse, before any halo is sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from halox.decomposition import AxisFill, Boundary, FieldLayout, WallFill, Walls
from halox.errors import FieldError
from halox.paths.base import Channel, Operation
from halox.runtime.arrays import Array, Described, DType, HostArray
from halox.runtime.casting import cast
from halox.runtime.gpu.cuda import cupy

if TYPE_CHECKING:
    from halox.exchange.host_walls import HostFills
    from halox.exchange.wall_launch import FillLaunches
    from halox.runtime.call_guard import CallGuard
    from halox.runtime.gpu.launch import PreparedLaunch

_Step = Callable[[], object]

_SIGNED, _NUMERIC = "ifc", "iufc"


@dataclass(frozen=True)
class FieldWalls:
    """Walls of the field with this number in a plan."""

    number: int
    origin: tuple[int, ...]  # global index of the array's first point, per grid axis
    walls: Walls
    is_whole: bool = True  # not only the cells of one parity

    def notes(self) -> list[str]:
        """Return a sentence for each wall and boundary, for a report."""
        fills = [fill.along for fill in self.walls.fills()]
        sides = dict.fromkeys((one.axis, one.side, str(one.boundary)) for one in fills)
        return [
            f"wall of field {self.number}: the halo beyond the {side} side of axis {axis} has the boundary {boundary}"
            for axis, side, boundary in sides
        ]


def check_boundaries(layout: FieldLayout, dtype: DType, operation: Operation) -> None:
    """Raise `FieldError` if a field's dtype, or an accumulation, does not suit its boundaries.

    Warns of mirrors that are half a cell outside a wall.
    """
    if (layout.spec.signs or layout.spec.is_vector) and dtype.kind not in _SIGNED:
        raise FieldError(f"sign: -1 needs a field of signed numbers, got dtype {dtype}")
    for _, sides in layout.spec.boundary:
        for boundary in {side for pair in sides for side in pair if side is not None}:
            _check(boundary, dtype, operation)
        for axis, (pair, is_staggered) in enumerate(zip(sides, layout.spec.staggered, strict=True)):
            for kind in {side.kind for side in pair if is_staggered and side is not None}:
                if kind in ("symmetric", "antisymmetric"):
                    warnings.warn(
                        f"boundary: {kind!r} along axis {axis}, where the field is staggered, mirrors half a cell "
                        f"outside the wall; {kind.replace('symmetric', 'reflect')!r} mirrors at the points on the wall",
                        stacklevel=2,
                    )


def _check(boundary: Boundary, dtype: DType, operation: Operation) -> None:
    kind, number = boundary.kind, boundary.number
    if kind == "function":
        if operation == "add":
            raise FieldError(
                f"boundary: the function {boundary} has no adjoint, so that the field cannot be accumulated"
            )
        return
    needed = {"antireflect": _SIGNED, "antisymmetric": _SIGNED, "extrapolate": _SIGNED}
    needed |= {"gradient": _NUMERIC, "phase": _NUMERIC}
    if dtype.kind not in needed.get(kind, dtype.kind):
        raise FieldError(
            f"boundary: {boundary} needs a field of {'signed ' * (needed[kind] == _SIGNED)}numbers, got dtype {dtype}"
        )
    if number is not None:
        try:
            value = cast(number, dtype)
            exact = kind == "constant" or dtype.kind not in "iu" or value == number
        except Exception as error:  # NumPy raises several types
            raise FieldError(
                f"boundary: {boundary} does not fit the dtype {dtype}: {error}"
            ) from error
        if not exact:
            raise FieldError(f"boundary: {boundary} does not fit the dtype {dtype}")


class _Call(partial):  # type: ignore[type-arg]
    """A call of a user's function."""


class _InPlace(partial):  # type: ignore[type-arg]
    """A call that multiplies a halo that neighbours have sent, and so must run once in an exchange."""


class WallChannel(Channel):
    """Fills or adjoint fills of all fields of a plan, with operations on array slices; sends nothing.

    ``is_alone`` means that all messages of the plan are of this rank to itself. `has_copies` says whether the launch
    that fills the walls on a GPU also copies these messages.
    """

    is_movable = True

    def __init__(
        self,
        walls: Sequence[FieldWalls],
        described: Sequence[Described],
        arrays: Sequence[HostArray] | Sequence[Described],
        operation: Operation,
        guard: CallGuard,
        *,
        is_alone: bool = False,
    ) -> None:
        self._walls, self._described, self._adds = walls, described, operation == "add"
        self._guard = guard
        self.needs_host = described[0].device is None
        self._origins = [one.origin if isinstance(one, HostArray) else 0 for one in arrays]
        self._launches: FillLaunches | None = None
        self.has_copies = False
        if described[0].device is not None and not self._adds:
            from halox.exchange.wall_launch import launches_of

            fields = [(one.number, one.walls) for one in walls]
            self._launches, self.has_copies = launches_of(
                fields,
                described,
                described[0].device,
                wraps=is_alone and all(one.is_whole for one in walls),
            )
        self._layers: dict[int, HostFills] = {}  # by field
        self._fills = {one.number: one.walls.fills() for one in walls}
        if self._adds:
            self._fills = {number: fills[::-1] for number, fills in self._fills.items()}
        self._steps: list[_Step] = []
        self.bind(
            self.views(
                [one.memory if isinstance(one, HostArray) else one.pointer for one in arrays]
            )
        )
        # The user's functions may raise: the first time on all ranks together.
        for step in self._steps:
            if isinstance(step, _Call):
                step()

    def views(self, memories: Sequence[Any]) -> list[_Step]:
        """Return the steps on other arrays."""
        steps: list[_Step] = []
        if self._launches is not None:
            current_stream = cupy().cuda.get_current_stream
            for launch, fills_halos in self._launches.on(memories):
                call = partial if fills_halos else _InPlace
                steps.append(call(_launch, launch, current_stream))
            return steps
        for walls in self._walls:
            described, memory = self._described[walls.number], memories[walls.number]
            fills = self._fills[walls.number]
            layers: HostFills | None = None
            if described.device is None:
                xp: ModuleType = np
                start = self._origins[walls.number]
                array = np.ndarray(
                    described.shape, described.dtype, memory, start, described.strides
                )
                if fills and not self._adds:
                    layers = self._layers_of(walls.number, array)
            else:
                from halox.runtime.gpu.memory import device_view

                xp = cupy()
                array = device_view(
                    memory, described.shape, described.dtype, described.strides, described.device
                )
            signs: list[_Step] = []
            for box in walls.walls.negated:
                view = array[box]
                signs.append(_InPlace(xp.subtract, -array.dtype.type(0), view, view))
            steps += () if self._adds else signs
            for number, fill in enumerate(fills):
                if not array[fill.target].size:
                    continue
                if self._adds:
                    steps += _adjoint_steps(xp, array, fill)
                elif layers is not None and layers.calls[number]:
                    steps += layers.steps(number, memory, start)
                else:
                    steps += _steps(xp, array, fill, partial(self._call, walls, fill, xp))
            steps += signs if self._adds else ()
        return steps

    def _call(self, walls: FieldWalls, fill: WallFill, xp: ModuleType, target: Any) -> _Step:
        """Return the call of a user's function that fills a slab."""
        along = fill.along
        function, indices = along.boundary.function, _indices(xp, fill, walls)
        assert function is not None
        return _Call(self._guard.call, function, target, along.axis, along.side, indices)

    def _layers_of(self, number: int, array: Array) -> HostFills:
        from halox.exchange.host_walls import HostFills

        if number not in self._layers:
            self._layers[number] = HostFills(array, self._fills[number])
        return self._layers[number]

    def bind(self, views: list[_Step]) -> None:
        """Use the arrays of these steps."""
        self._steps = views

    def start(self) -> None:
        """Add the halo at the walls to the cells inside, before it is sent."""
        if self._adds:
            for step in self._steps:
                step()

    def finish(self) -> None:
        """Fill the halo at the walls."""
        if not self._adds:
            for step in self._steps:
                step()

    def fill(self) -> None:
        """Fill the halo at the walls without changing what neighbours have sent."""
        for step in self._steps:
            if not isinstance(step, _InPlace):
                step()

    def close(self) -> None:
        """Drop the arrays."""
        self._steps = []


def _launch(launch: PreparedLaunch, current_stream: Callable[[], Any]) -> None:
    launch.launch(current_stream().ptr)


def twice_mirror(boundary: Boundary, dtype: DType) -> Array:
    """Return the number from which a mirror image of the opposite sign is subtracted, as an array of shape ()."""
    # -0 - x is -x for zeros, too. NumPy 2.4 computes negative(x) wrongly for some strides.
    number = boundary.number
    return np.asarray(-dtype.type(0) if number is None else 2 * cast(number, dtype)).astype(dtype)


def changes(along: AxisFill, dtype: DType) -> Array:
    """Return the number that a gradient adds to each target layer; integers wrap around."""
    return np.array(along.depths).astype(dtype) * cast(along.boundary.number, dtype)


def _by_layer(xp: ModuleType, array: Any, along: AxisFill, numbers: Array) -> Any:
    """Return one number per target layer, in a shape that broadcasts along the other axes."""
    shape = [1] * array.ndim
    shape[along.array_axis] = -1
    return xp.asarray(numbers.astype(array.dtype).reshape(shape))


def _indices(xp: ModuleType, fill: WallFill, walls: FieldWalls) -> tuple[Any, ...]:
    """Return the global indices of the cells that a fill writes, one array per grid axis; periodic axes wrap."""
    first = fill.along.array_axis - fill.along.axis
    per_axis = []
    for axis, along in enumerate(walls.walls.axes):
        cut = fill.target[first + axis]
        indices = xp.arange(cut.start, cut.stop) + walls.origin[axis]
        per_axis.append(indices % along.points if walls.walls.periodic[axis] else indices)
    return tuple(xp.ix_(*per_axis))


def _steps(xp: ModuleType, array: Any, fill: WallFill, call: Callable[[Any], _Step]) -> list[_Step]:
    """Return the operations of one fill with whole slabs; ``call`` returns that of a user's function."""
    along, boundary = fill.along, fill.along.boundary
    target, source = array[fill.target], array[fill.source]
    kind = boundary.kind
    if kind == "function":
        return [call(target)]
    if kind == "constant":
        return [partial(xp.copyto, target, cast(boundary.number, array.dtype)[()])]
    if kind == "phase":
        return [_InPlace(xp.multiply, target, _phase(along, array.dtype), target)]
    if kind == "gradient":
        change = _by_layer(xp, array, along, changes(along, array.dtype))
        return [partial(xp.add, source, change, target)]
    if kind == "extrapolate":
        steps: list[_Step] = [partial(xp.subtract, source, array[fill.inner], target)]
        if len(along.depths) > 1:
            distances = _by_layer(xp, array, along, abs(np.array(along.depths)))
            steps.append(partial(xp.multiply, target, distances, target))
        return [*steps, partial(xp.add, target, source, target)]
    if kind in ("antireflect", "antisymmetric"):
        return [partial(xp.subtract, twice_mirror(boundary, array.dtype)[()], source, target)]
    return [partial(target.__setitem__, ..., source)]


def _phase(along: AxisFill, dtype: DType) -> Any:
    """Return the factor of a halo: the phase beyond the high side, its inverse beyond the low side."""
    number = along.boundary.number
    assert number is not None
    return cast(number if along.side == "high" else 1 / number, dtype)[()]


def _adjoint_steps(xp: ModuleType, array: Any, fill: WallFill) -> list[_Step]:
    """Return the operations of the adjoint of one fill: add the halo to its sources, and clear it."""
    along, target, source = fill.along, array[fill.target], array[fill.source]
    kind = along.boundary.kind
    if kind == "phase":
        return [partial(xp.multiply, target, np.conj(_phase(along, array.dtype)), target)]
    clear = partial(target.fill, 0)
    if kind == "constant":
        return [clear]
    native = array.dtype.newbyteorder("=")  # NumPy adds in no other
    layers: dict[str, Any] = {"axis": along.array_axis, "keepdims": True, "dtype": native}

    def add_layers() -> None:
        source[...] += target.sum(**layers)

    def add_extrapolated() -> None:
        distances = _by_layer(xp, array, along, abs(np.array(along.depths)))
        weighted = (target * distances).sum(**layers)
        source[...] += target.sum(**layers) + weighted
        array[fill.inner] -= weighted

    if kind in ("edge", "gradient"):
        return [add_layers, clear]
    if kind == "extrapolate":
        return [add_extrapolated, clear]
    combine = xp.subtract if kind in ("antireflect", "antisymmetric") else xp.add
    return [partial(combine, source, target, source), clear]
