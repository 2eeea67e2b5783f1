"""Steps of a transform: local transforms along whole axes, transposes between them, and copies, in work arrays.

There is a `Pipeline` for each dtype and component shape of fields. Only its first step reads a user's array, and only
its last step writes one. All other steps use work arrays of the pipeline, so that the plans of the transposes are
persistent. A new user array needs only a view, and no communication::

    forward of pencils       u --c2c--> a0 ==transpose==> b1 --c2c--> b1 ==transpose==> b2 --c2c--> out
    backward                 s --c2c--> b2 ==transpose==> b1 --c2c--> b1 ==transpose==> a0 --c2c--> out
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from halox.decomposition import Decomposition, FieldLayout, FieldSpec
from halox.domain import Domain
from halox.fft.cufft import Run
from halox.fft.modes import common_modes, factor
from halox.fft.stages import DividedStage, Schedule
from halox.plans.draft import Draft
from halox.plans.making import make_domain_plan
from halox.plans.runner import Runner
from halox.plans.transpose import transpose_draft, transpose_ends
from halox.runtime.dlpack import DType

if TYPE_CHECKING:
    from halox.plans.report import Report
    from halox.runtime.array_types import XArray

IN, OUT = 0, 1
"""Slots of the user's arrays; the slots of work arrays follow."""


@dataclass(frozen=True)
class Op:
    """One step, from a source to a target array, both with the component axes first.

    Attributes
    ----------
    kind : {"c2c", "r2c", "c2r", "copy", "cut", "pad", "move"}
    axes : tuple of int
        Axes of the arrays.
    forward : bool
    norm : str
        For transforms, the ``norm`` of `numpy.fft`.
    factor : float
        Factor of a copy, cut or pad.
    points : int
        Points of the spectral resolution, to cut or pad.
    half : bool
        Whether the axis that is cut or padded is halved.
    extents : dict of int to int
        Extents of the target by axis, for axes with other extents than in the source.
    plan : Runner or None
        The transpose.
    """

    kind: str
    axes: tuple[int, ...] = ()
    forward: bool = True
    norm: str = "backward"
    factor: float = 1.0
    points: int = 0
    half: bool = False
    extents: dict[int, int] = field(default_factory=dict)
    plan: Runner | None = None


Form: TypeAlias = tuple[tuple[int, ...], DType]
"""Shape and dtype of an array with the component axes first."""

Step: TypeAlias = tuple[Op, int, int]
"""An operation, the slot it reads, and the slot it writes."""


class Pipeline:
    """Steps of both directions for fields of one dtype and component shape, on one rank.

    ``domain`` gives the memory of the work arrays, and owns the plans. ``engine`` has the transforms (`HostTransforms`
    or `CuFFT`). ``complex_dtype`` is the spectral dtype. ``real_dtype`` is the dtype of real fields, None for complex
    transforms. ``components`` has the extents of the component axes. `connect` must precede the first `bind` of a
    direction.
    """

    def __init__(
        self,
        schedule: Schedule,
        domain: Domain,
        engine: Any,
        complex_dtype: DType,
        real_dtype: DType | None,
        components: tuple[int, ...],
    ) -> None:
        self._schedule, self._domain, self._engine = schedule, domain, engine
        self._xp = domain.xp
        self._complex, self._real = complex_dtype, real_dtype
        self._components = components
        self._work: list[Any] = [None, None]
        # Layouts and dtypes of the work arrays between stages, which have the first slots.
        self._fields: list[tuple[FieldLayout, DType]] = []
        self._plans: dict[bool, list[Runner]] = {}
        self._steps: dict[bool, list[Step]] = {}
        # Runs with the slots of their sources and targets, by direction and layouts of the user's arrays.
        self._bound: dict[object, list[tuple[Run, int, int]]] = {}
        self.ready: set[bool] = set()
        """Directions with steps on all ranks."""
        stages = schedule.stages
        # Slots of the arrays before and after each stage, in the forward direction.
        self._before, self._after = [IN], []
        is_complex = False  # whether the halved axis has been transformed
        for number, stage in enumerate(stages):
            if number:
                self._before.append(self._field(stage.before, is_complex))
            same = stage.before is stage.after and (is_complex or schedule.half not in stage.axes)
            is_complex |= schedule.half in stage.axes
            if number == len(stages) - 1:
                self._after.append(OUT)
            elif number and same:
                self._after.append(self._before[-1])
            else:
                self._after.append(self._field(stage.after, is_complex))

    def _field(self, division: Decomposition, is_complex: bool) -> int:
        """Add a work array that a transpose reads or writes, and return its slot."""
        spec = FieldSpec(((0, 0),) * division.ndim, self._components)
        layout = FieldLayout(division, self._domain.world.rank, spec)
        dtype = self._complex if is_complex or self._real is None else self._real
        self._fields.append((layout, dtype))
        return len(self._fields) + 1

    def has_plans(self, forward: bool) -> bool:
        """Whether a direction has its plans."""
        return forward in self._plans

    def connect(self, forward: bool, path: str | None) -> None:
        """Make the plans of a direction, and for the first direction also the work arrays; collective."""
        stages, allocate = self._schedule.stages, None
        if self._fields and len(self._work) == 2:
            forms = [(layout.padded_shape, dtype) for layout, dtype in self._fields]
            allocate = self._domain.allocation.reserve(forms)

        def draft(k: int) -> Draft:
            """Return the transpose between stages ``k`` and ``k + 1``."""
            if len(self._work) == 2 and allocate is not None:
                self._work += allocate()
            i, j = self._after[k], self._before[k + 1]
            orders = stages[k].order, stages[k + 1].order
            axes = tuple(orders[0].index(axis) for axis in orders[1])
            (of_u, _), (of_v, _) = self._fields[i - 2], self._fields[j - 2]
            sides = transpose_ends(self._work[i], of_u, self._work[j], of_v, axes)
            walk = range(len(sides[0].axes))  # all work arrays are in C order
            return transpose_draft(*(sides if forward else sides[::-1]), walk)

        self._plans[forward] = [
            make_domain_plan(
                self._domain, partial(draft, k), keep=True, path=path, call="start of a plan"
            )
            for k in range(len(stages) - 1)
        ]

    def reports(self, forward: bool) -> list[Report]:
        """Return the reports of a direction's transposes, empty before `connect`."""
        return [plan.report for plan in self._plans.get(forward, ())]

    def run(self, forward: bool, source: XArray, target: XArray) -> None:
        """Transform a view of a field's cells into another view, both with the component axes first."""
        bound = self.bind(forward, source, target)
        arrays = [source, target, *self._work[2:]]
        for run, i, j in bound:
            run(arrays[i], arrays[j])

    def bind(self, forward: bool, source: XArray, target: XArray) -> list[tuple[Run, int, int]]:
        """Return the steps for arrays of a layout; made in the first call with this layout. Local."""
        engine = self._engine
        key = forward, engine.key(source), engine.key(target)
        bound = self._bound.get(key)
        if bound is None:
            steps = self._steps.get(forward)
            if steps is None:
                steps = self._steps[forward] = self._forward() if forward else self._backward()
            arrays = [source, target, *self._work[2:]]
            bound = [(self._make(op, arrays[i], arrays[j]), i, j) for op, i, j in steps]
            self._bound[key] = bound
        return bound

    # Steps

    def _forward(self) -> list[Step]:
        steps = list[Step]()
        for number, stage in enumerate(self._schedule.stages):
            if number:
                plan = self._plans[True][number - 1]
                steps.append((Op("move", plan=plan), self._after[number - 1], self._before[number]))
            form = None if number else self._user_form(stage.before, self._real or self._complex)
            ops = self._ops(stage, True)
            self._emit(steps, ops, self._before[number], self._after[number], form)
        return self._scaled(steps, True)

    def _backward(self) -> list[Step]:
        stages, steps = self._schedule.stages, list[Step]()
        # The user's input is the array at the end of the forward transform.
        swapped = {IN: OUT, OUT: IN}
        for number in reversed(range(len(stages))):
            stage = stages[number]
            start = swapped.get(self._after[number], self._after[number])
            end = swapped.get(self._before[number], self._before[number])
            form = self._user_form(stage.after, self._complex) if start == IN else None
            self._emit(steps, self._ops(stage, False), start, end, form)
            if number:
                plan = self._plans[False][number - 1]
                steps.append((Op("move", plan=plan), end, self._after[number - 1]))
        return self._scaled(steps, False)

    def _user_form(self, division: Decomposition, dtype: DType) -> Form:
        return (*self._components, *division.rank_shape(self._domain.world.rank)), dtype

    def _ops(self, stage: DividedStage, forward: bool) -> list[Op]:
        """Return the operations of a stage, between transposes."""
        schedule, first = self._schedule, len(self._components)

        def place(axis: int) -> int:
            return first + stage.order.index(axis)

        def transform(axes: Sequence[int], norm: str) -> Op:
            if schedule.half not in axes:
                return Op("c2c", tuple(map(place, axes)), forward, norm)
            n = schedule.padded[axes[-1]]
            kind, extent = ("r2c", n // 2 + 1) if forward else ("c2r", n)
            at = place(axes[-1])
            return Op(kind, tuple(map(place, axes)), forward, norm, extents={at: extent})

        plain = "backward" if forward else "forward"  # numpy.fft's norms without a factor
        if not stage.axes:
            return []
        if not schedule.dealias:
            return [transform(stage.axes, schedule.norm if self._engine.scales else plain)]
        pairs = []
        for axis in reversed(stage.axes):  # the halved axis, the last one, first
            n, m, half = schedule.points[axis], schedule.padded[axis], axis == schedule.half
            scale = factor(schedule.norm, forward, n, m)
            extent = n if forward else m
            if half:
                extent = extent // 2 + 1
            kind = "cut" if forward else "pad"
            at = place(axis)
            change = Op(kind, (at,), forward, "", scale, n, half, {at: extent})
            pairs.append((transform((axis,), plain), change))
        ordered = [op for pair in pairs for op in pair]
        return ordered if forward else ordered[::-1]

    def _emit(
        self, steps: list[Step], ops: list[Op], start: int, end: int, form: Form | None
    ) -> None:
        """Add steps for operations from one slot to another, with work arrays in between if there are several.

        ``form`` is the form of the user's array if the steps start from it.
        """
        if form is None:
            form = self._work[start].shape, self._work[start].dtype
        # Whether steps may overwrite the current array: not the user's input.
        current, owned = start, start != IN
        if not ops and start != end:
            ops = [Op("copy")]
        for number, op in enumerate(ops):
            if op.kind == "c2r" and not owned and self._engine.destroys(op.axes):
                copy = self._temporary(form)
                steps.append((Op("copy"), current, copy))
                current = copy
            form = self._after_op(op, form)
            if number == len(ops) - 1:
                following = end
            elif op.kind == "c2c" and owned:
                following = current
            else:
                following = self._temporary(form)
            steps.append((op, current, following))
            current, owned = following, True

    def _after_op(self, op: Op, form: Form) -> Form:
        """Return the form of an operation's target, from the form of its source."""
        shape = tuple(op.extents.get(axis, n) for axis, n in enumerate(form[0]))
        if op.kind == "c2r" and self._real is not None:
            return shape, self._real
        return shape, self._complex if op.kind == "r2c" else form[1]

    def _scaled(self, steps: list[Step], forward: bool) -> list[Step]:
        """Add the normalization to a copy step, or else scale the result in place, unless other steps normalize."""
        schedule = self._schedule
        if self._engine.scales or schedule.dealias:
            return steps
        points = math.prod(
            schedule.points[axis] for stage in schedule.stages for axis in stage.axes
        )
        scale = factor(schedule.norm, forward, points, points)
        if scale == 1.0:
            return steps
        for number, (op, i, j) in enumerate(steps):
            if op.kind == "copy":
                steps[number] = replace(op, factor=scale), i, j
                return steps
        return [*steps, (Op("copy", factor=scale), OUT, OUT)]

    # Arrays

    def _temporary(self, form: Form) -> int:
        """Allocate a work array of this rank alone; local."""
        self._work.append(self._engine.empty(*form))
        return len(self._work) - 1

    # Bound steps

    def _make(self, op: Op, source: XArray, target: XArray) -> Run:
        engine = self._engine
        if op.plan is not None:
            plan = op.plan
            return lambda source, target: plan.run()
        if op.kind == "c2c":
            run: Run = engine.c2c(source, target, op.axes, forward=op.forward, norm=op.norm)
            return run
        if op.kind in ("r2c", "c2r"):
            make = engine.r2c if op.kind == "r2c" else engine.c2r
            run = make(source, target, op.axes, norm=op.norm)
            return run
        makers = {"copy": self._copy, "cut": self._cut, "pad": self._pad}
        return makers[op.kind](op)

    def _copy(self, op: Op) -> Run:
        multiply, scale = self._xp.multiply, op.factor
        if scale != 1.0:
            return lambda source, target: multiply(source, scale, out=target)

        def run(source: XArray, target: XArray) -> None:
            target[...] = source

        return run

    def _cut(self, op: Op) -> Run:
        """Return a run that copies only the modes of the spectral resolution; it may change the source."""
        n, copy = op.points, self._copy(op)
        at, pieces = _index(op.axes[0]), common_modes(n)
        nyquist = n // 2 if n % 2 == 0 else None
        if op.half:

            def cut_half(source: XArray, target: XArray) -> None:
                copy(source[at(slice(0, n // 2 + 1))], target)
                if nyquist is not None:
                    plane = target[at(slice(nyquist, None))]
                    plane.imag = 0
                    plane *= 2

            return cut_half

        def cut(source: XArray, target: XArray) -> None:
            if nyquist is not None:
                lower = source[at(slice(-nyquist, 1 - nyquist or None))]
                lower += source[at(slice(nyquist, nyquist + 1))]
            for inner, outer in pieces:
                copy(source[at(outer)], target[at(inner)])

        return cut

    def _pad(self, op: Op) -> Run:
        """Return a run that copies the modes of the spectral resolution, and sets all other modes to zero."""
        n, copy = op.points, self._copy(op)
        at, pieces = _index(op.axes[0]), common_modes(n)
        nyquist = n // 2 if n % 2 == 0 else None
        if op.half:

            def pad_half(source: XArray, target: XArray) -> None:
                copy(source, target[at(slice(0, n // 2 + 1))])
                target[at(slice(n // 2 + 1, None))] = 0
                if nyquist is not None:
                    plane = target[at(slice(nyquist, nyquist + 1))]
                    plane.imag = 0
                    plane *= 0.5

            return pad_half

        def pad(source: XArray, target: XArray) -> None:
            for inner, outer in pieces:
                copy(source[at(inner)], target[at(outer)])
            target[at(slice((n + 1) // 2, -(n // 2) or None))] = 0
            if nyquist is not None:
                lower = target[at(slice(-nyquist, 1 - nyquist or None))]
                lower *= 0.5
                target[at(slice(nyquist, nyquist + 1))] = lower

        return pad


def _index(axis: int) -> Callable[[slice], tuple[slice, ...]]:
    """Return a function that makes an array index from a slice along one axis."""
    return lambda cut: (*(slice(None),) * axis, cut)
