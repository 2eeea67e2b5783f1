"""Reductions of expressions on GPUs: in one launch, or by a launch per rank and an allreduce of each result."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from halox.collectives.device.device_algorithms import DeviceAlgorithm, make_algorithm
from halox.collectives.device.expression_kernels import ExpressionKernel, operands, words_of
from halox.collectives.device.field_plans import EXACT_WORDS, FIELD_REDUCTIONS, WORDS_OF
from halox.collectives.device.kernel_reductions import FieldReduction, make_kernel_reduction
from halox.collectives.expressions import Request, Typed
from halox.collectives.operations import REPRODUCIBLE
from halox.collectives.prepared import Launch
from halox.errors import StateError
from halox.runtime.context import Context
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.streams import is_capturing

if TYPE_CHECKING:
    from halox.runtime.array_types import CupyArray

_MAKING = "the making of a reduction"


class ExpressionReduction:
    """Reductions of the expressions of a call; collective to make.

    ``in_one_launch``: the kernels of all ranks can signal to one another.
    """

    def __init__(self, context: Context, device: int, call: Typed, *, in_one_launch: bool) -> None:
        world, arena = context.world, context.use_device(device)
        self._current_stream = cupy().cuda.get_current_stream
        self._ops = call.ops
        self._kernel: FieldReduction
        self._rounding: FieldReduction | None = None
        self._allreduces: list[DeviceAlgorithm] = []
        new = partial(ExpressionKernel, world, arena, call.without_arrays())
        if in_one_launch:
            self._kernel = make_kernel_reduction(world, partial(new, call.ops, world.size))
            return
        is_exact = call.ops[0].startswith(REPRODUCIBLE)
        kinds = [
            (np.dtype("i8"), EXACT_WORDS * dtype.itemsize // 8) if is_exact else (dtype, 1)
            for dtype in call.dtypes
        ]
        for op, kind in zip(call.ops, kinds, strict=True):
            algorithm, self._algorithm, _ = make_algorithm(
                context, device, (FIELD_REDUCTIONS[op].op, *kind)
            )
            self._allreduces.append(algorithm)

        def make() -> tuple[list[FieldReduction], list[CupyArray]]:
            names = [
                WORDS_OF + op if is_exact else op.replace("norm", "squares") for op in call.ops
            ]
            steps: list[FieldReduction] = [new(names, 1)]
            if is_exact:
                steps.append(FieldReduction(world, arena, call.ops[0], call.dtypes[0], 1))
            for step in steps:
                step.open_alone()
            return steps, [cupy().empty(count, dtype) for dtype, count in kinds]

        # Replays of captured calls write the values again, so that they must not be temporaries.
        steps, self._values = world.attempt(make, _MAKING)
        self._kernel, self._rounding = steps[0], steps[-1] if is_exact else None

    def __call__(self, call: Typed, values: Sequence[Any], outs: Sequence[CupyArray]) -> None:
        """Launch; blocks if an allreduce blocks."""
        stream = self._current_stream()
        targets = self._values if self._allreduces else outs
        try:
            if not all(each.captures for each in self._allreduces) and is_capturing(stream):
                raise StateError(
                    f"a reduce cannot be captured in a CUDA graph here: the ranks are combined by the "
                    f"{self._algorithm!r} algorithm, which needs the host; it can where every rank has a GPU of its own"
                )
            cells = operands(call, values, [each.data.ptr for each in targets[1:]])
            self._kernel(cells, targets[0].data.ptr, stream)
        except Exception as error:
            self.refuse(error)
            raise
        for op, allreduce, value, out in zip(
            self._ops, self._allreduces, targets, outs, strict=False
        ):
            allreduce.reduce(value.data.ptr, value.data.ptr, stream, None)
            if self._rounding is not None:
                self._rounding.of_value(value.data.ptr, out.data.ptr, stream)
            elif op == "norm":
                cupy().sqrt(value.reshape(out.shape), out=out)
            else:
                out[...] = value.reshape(out.shape)

    def bind(self, request: Request, call: Typed, outs: Sequence[CupyArray]) -> Launch | None:
        """Return the launch for later calls with these arrays, None if the reduction takes several steps."""
        if self._allreduces:
            return None
        names, keys, program, dtypes = tuple(request.named), request.keys, call.program, call.dtypes
        cells = operands(call, call.program.values(request.named), [0] * (len(outs) - 1))
        go = self._kernel.of_words(cells)
        fixed = [each.pointer for each in cells[: call.inputs]]
        given = [out.data.ptr for out in outs] if request.outs else []
        current_stream, empty = self._current_stream, cupy().empty

        def launch(arguments: Sequence[Any]) -> Any:
            stream = current_stream()
            try:
                scalars = words_of(program.values(dict(zip(names, arguments, strict=False))))
                results = arguments[len(names) :] or [empty((), dtype) for dtype in dtypes]
            except Exception as error:
                self.refuse(error)
            target, *others = given or [result.data.ptr for result in results]
            go([*fixed, *scalars, *others], target, stream)
            return results[0] if keys is None else dict(zip(keys, results, strict=True))

        return launch

    def refuse(self, error: Exception) -> None:
        """Raise the error: on all ranks if the host takes part in an allreduce, else only here."""
        stream = self._current_stream()
        if not self._allreduces:
            self._kernel.refuse(error, stream)
        self._allreduces[0].reduce(0, 0, stream, error)

    def close(self) -> None:
        """Release the resources of all steps; collective."""
        for step in (self._kernel, self._rounding, *self._allreduces):
            if step is not None:
                step.close()
