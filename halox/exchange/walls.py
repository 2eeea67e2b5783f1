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

from halox.decomposition import Boundary, FieldLayout, WallFill, Walls
from halox.errors import FieldError
from halox.exchange.host_walls import HostFills
from halox.exchange.wall_slabs import Call, InPlace, Step, adjoint_steps, slab_steps
from halox.paths.base import Channel, Operation
from halox.runtime.arrays import Array, Described, DType, HostArray
from halox.runtime.casting import cast
from halox.runtime.gpu.cuda import cupy

if TYPE_CHECKING:
    from halox.exchange.wall_launch import FillLaunches
    from halox.runtime.call_guard import CallGuard
    from halox.runtime.gpu.launch import PreparedLaunch

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
        self._steps: list[Step] = []
        self.bind(
            self.views(
                [one.memory if isinstance(one, HostArray) else one.pointer for one in arrays]
            )
        )
        # The user's functions may raise: the first time on all ranks together.
        for step in self._steps:
            if isinstance(step, Call):
                step()

    def views(self, memories: Sequence[Any]) -> list[Step]:
        steps: list[Step] = []
        if self._launches is not None:
            current_stream = cupy().cuda.get_current_stream
            for launch, fills_halos in self._launches.on(memories):
                call = partial if fills_halos else InPlace
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
            signs: list[Step] = []
            for box in walls.walls.negated:
                view = array[box]
                signs.append(InPlace(xp.subtract, -array.dtype.type(0), view, view))
            steps += () if self._adds else signs
            for number, fill in enumerate(fills):
                if not array[fill.target].size:
                    continue
                if self._adds:
                    steps += adjoint_steps(xp, array, fill)
                elif layers is not None and layers.calls[number]:
                    steps += layers.steps(number, memory, start)
                else:
                    steps += slab_steps(xp, array, fill, partial(self._call, walls, fill, xp))
            steps += signs if self._adds else ()
        return steps

    def _call(self, walls: FieldWalls, fill: WallFill, xp: ModuleType, target: Any) -> Step:
        along = fill.along
        function, indices = along.boundary.function, _indices(xp, fill, walls)
        assert function is not None
        return Call(self._guard.call, function, target, along.axis, along.side, indices)

    def _layers_of(self, number: int, array: Array) -> HostFills:
        if number not in self._layers:
            self._layers[number] = HostFills(array, self._fills[number])
        return self._layers[number]

    def bind(self, views: list[Step]) -> None:
        self._steps = views

    def start(self) -> None:
        """Add the halo at the walls to the cells inside, before it is sent."""
        if self._adds:
            for step in self._steps:
                step()

    def finish(self) -> None:
        if not self._adds:
            for step in self._steps:
                step()

    def fill(self) -> None:
        """Fill the halo at the walls without changing what neighbours have sent."""
        for step in self._steps:
            if not isinstance(step, InPlace):
                step()

    def close(self) -> None:
        self._steps = []


def _launch(launch: PreparedLaunch, current_stream: Callable[[], Any]) -> None:
    launch.launch(current_stream().ptr)


def _indices(xp: ModuleType, fill: WallFill, walls: FieldWalls) -> tuple[Any, ...]:
    """Return the global indices of the cells that a fill writes, one array per grid axis; periodic axes wrap."""
    first = fill.along.array_axis - fill.along.axis
    per_axis = []
    for axis, along in enumerate(walls.walls.axes):
        cut = fill.target[first + axis]
        indices = xp.arange(cut.start, cut.stop) + walls.origin[axis]
        per_axis.append(indices % along.points if walls.walls.periodic[axis] else indices)
    return tuple(xp.ix_(*per_axis))
