"""Channel of a plan that fills the halo at the walls of the grid, or adds it to the cells from which it was filled.

`wall_operations` does both with NumPy or CuPy, `wall_launch` fills with one kernel launch on a GPU.

An exchange fills the walls after all other channels have finished, since the fills read the halos that the neighbours
have sent. An accumulation is the adjoint: it runs the adjoint of each fill, in reverse, before any halo is sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from halox.decomposition import Boundary, FieldLayout
from halox.errors import FieldError
from halox.paths.base import Channel, Operation
from halox.plans.wall_operations import (
    ArrayOperation,
    Call,
    FieldWalls,
    InPlace,
    Step,
    WallOperations,
    view_in,
)
from halox.runtime.arrays import Described, DType, HostArray
from halox.runtime.casting import cast
from halox.runtime.gpu.cuda import cupy

if TYPE_CHECKING:
    from halox.plans.wall_launch import FillLaunch
    from halox.runtime.call_guard import CallGuard
    from halox.runtime.gpu.launch import PreparedLaunch

_SIGNED, _NUMERIC = "ifc", "iufc"


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
    timeline = (
        ("start", "walls"),
        ("finish", "walls"),
        ("fill", "walls"),
    )

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
        self._adds, self._device = operation == "add", described[0].device
        self.needs_host = self._device is None
        self._origins = [one.origin if isinstance(one, HostArray) else 0 for one in arrays]
        self._launches: list[FillLaunch] | None = None
        self.has_copies = False
        if self._device is not None and not self._adds:
            from halox.plans.wall_launch import launches_of

            self._launches, self.has_copies = launches_of(
                [(one.number, one.walls) for one in walls],
                described,
                self._device,
                wraps=is_alone and all(one.is_whole for one in walls),
            )
        # By the number of a field.
        self._operations: list[tuple[int, list[ArrayOperation]]] = []
        if self._launches is None:
            for one in walls:
                of_field = WallOperations(one, described[one.number], guard.call, adds=self._adds)
                self._operations.append((one.number, of_field.all()))
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
        if self._launches is not None:
            stream = cupy().cuda.get_current_stream
            return [
                (partial if one.fills else InPlace)(_launch, one.on(memories), stream)
                for one in self._launches
            ]
        steps: list[Step] = []
        for number, operations in self._operations:
            view = partial(view_in, memories[number], self._origins[number], device=self._device)
            steps += [operation.step(view) for operation in operations]
        return steps

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
