"""Kernels that reduce expressions: C++ text and launches of a `Program`.

The kernels are those of field reductions, with an expression in place of a cell. A launch has operands, 64-bit words:
the addresses of fields and of arrays of shape (), the first values of indices, the bits of scalars, and the addresses
of all results but the first. Each has strides along the axes of the fields; they are 0 for all but fields and indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from halox.errors import FieldError
from halox.packing.strided_plan import divisor
from halox.reductions.device.field_plans import (
    kept_levels,
    kernel_defines,
    loops,
    planned,
)
from halox.reductions.device.kernel_plans import ReductionPlan
from halox.reductions.device.kernel_reductions import (
    Address,
    FieldReduction,
    Layout,
    argument,
)
from halox.reductions.expressions import Typed
from halox.reductions.field_operations import FieldOperation
from halox.reductions.operations import element, find_operation, wide_dtype
from halox.runtime.arrays import Described, DType
from halox.runtime.device_arena import DeviceArena
from halox.runtime.world import World
from halox.values import rounded_up

_WORD = np.dtype("u1")  # dtype of operands that are not loaded


def operands(call: Typed, values: Sequence[Any], targets: Sequence[int]) -> list[Described]:
    """Return the operands of a launch, in order; ``targets`` are the addresses of all results but the first."""
    fields = [cells.described for cells in call.cells]
    shape = fields[0].shape
    zeros = (0,) * len(shape)

    def word(pointer: int, dtype: DType = _WORD, strides: tuple[int, ...] = zeros) -> Described:
        return Described(pointer, shape, strides, dtype, fields[0].device, writable=False)

    pointers = [word(array.data.ptr, np.dtype(array.dtype)) for array in call.arrays]
    indices = [
        word(start, strides=tuple(int(n == axis) for n in range(len(shape))))
        for axis, start in call.axes
    ]
    return [*fields, *pointers, *indices, *map(word, [*words_of(values), *targets])]


def words_of(values: Sequence[Any]) -> list[int]:
    """Return the bits of scalars, each in whole words."""
    bits = b"".join([each.tobytes().ljust(-(-each.nbytes // 8) * 8, b"\0") for each in values])
    words: list[int] = np.frombuffer(bits, "u8").tolist()
    return words


def _type(dtype: DType) -> str:
    return "bool" if dtype.kind == "b" else element(dtype)


def code_of(
    call: Typed, operations: Sequence[FieldOperation], sets: Sequence[int]
) -> dict[str, str]:
    """Return the definitions of expressions.cu; ``sets`` are the numbers of the operands' strides, -1 for zeros."""
    program, inputs = call.program, []
    types = [_type(dtype) for dtype in program.dtypes]
    loaded = call.inputs - len(call.axes)
    for n, number in enumerate(sets[: call.inputs]):
        kind = f"Index<{number}>" if n >= loaded else f"Field<{types[n]}, {number}>"
        kind = f"Pointer<{types[n]}>" if n < loaded and number < 0 else kind
        inputs.append(f"X({n}, numpy::{kind})")
    texts, at = {n: f"in.v{n}.value" for n in range(call.inputs)}, call.inputs
    for register in program.scalars:
        words = range(at, at + -(-program.dtypes[register].itemsize // 8))
        bits = ", ".join(f"cells.operand[{word}]" for word in words)
        texts[register] = f"numpy::of_bits<{types[register]}>({bits})"
        at = words.stop
    steps = []
    for register, step in program.steps.items():
        args = ", ".join(
            texts[arg] if program.dtypes[arg] == dtype else _converted(texts[arg], _type(dtype))
            for arg, dtype in zip(step.args, step.loop, strict=True)
        )
        steps.append(f"const {types[register]} t{register} = numpy::{step.function}({args});")
        texts[register] = f"t{register}"
    results = []
    for n, (operation, register) in enumerate(zip(operations, program.results, strict=True)):
        dtype = program.dtypes[register]
        # The kernel of exact sums computes the addends of a norm from its values.
        wide = wide_dtype(dtype) if operation.is_exact else operation.accumulator(dtype)
        is_square = operation.local == "Square" and not operation.is_exact
        text = texts[register]
        value = f"numpy::norm2({text})" if is_square else _converted(text, element(wide))
        combine = find_operation(operation.op, np.dtype("f4")).kernel_name
        results.append(f"X({n}, {combine}, {element(wide)}, {operation.finish}, {value})")
    return {
        "INPUTS(X)": " ".join(inputs),
        "STEPS": " ".join(steps),
        "RESULTS_OF(X)": " ".join(results),
    }


def _converted(text: str, type_: str) -> str:
    return f"numpy::To<{type_}>::of({text})"


class ExpressionKernel(FieldReduction):
    """One launch for all expressions of a call, with an operation for each result."""

    def __init__(
        self,
        world: World,
        arena: DeviceArena,
        call: Typed,
        operations: Sequence[FieldOperation],
        ranks: int,
    ) -> None:
        self._call, self._operations = call, operations
        super().__init__(world, arena, operations[0], call.dtypes[0], ranks)

    def _memory(self) -> ReductionPlan:
        return self._planned(1, 1, [-1] * (len(self._call.program.dtypes)), 1)

    def _planned(self, words: int, levels: int, sets: Sequence[int], count: int) -> ReductionPlan:
        program, first, fields = self._call.program, self._operations[0], len(self._call.cells)
        values = [program.dtypes[register] for register in program.results]
        in_flight = 4 if fields <= 2 else 2 if fields <= 4 else 1  # loads 4 to 8 values
        defines = code_of(self._call, self._operations, sets) | {
            **dict(kernel_defines(first, values[0])),
            "MAX_LEVELS": str(levels),
            "IN_FLIGHT": str(in_flight),
            "RESULTS": str(len(values)),
            "OPERANDS": str(count),
            "SETS": str(max(1, 1 + max(sets))),
        }
        members = [
            (f"r{n}", operation.accumulator(value))
            for n, (operation, value) in enumerate(zip(self._operations, values, strict=True))
        ]
        size = rounded_up(np.dtype(members, align=True).itemsize, 8)
        return planned(
            *("reduction", list(defines.items()), words, self._ranks, self._sms, size),
            is_exact=first.is_exact,
            in_flight=in_flight,
        )

    def _identities(self) -> list[Any]:
        values = [self._call.program.dtypes[register] for register in self._call.program.results]
        return [each.identity(value) for each, value in zip(self._operations, values, strict=True)]

    def _layout(self, cells: Sequence[Described]) -> Layout:
        strides = [field.strides for field in cells]
        levels = loops(cells[0].shape, *strides)
        if levels is None:
            raise FieldError(
                f"expression: a kernel does not support {cells[0].shape} cells of a rank with strides {strides[0]}; "
                "use more ranks, or copy the fields"
            )
        numbers: dict[Sequence[int], int] = {}
        sets = [numbers.setdefault(each, len(numbers)) if any(each) else -1 for each in strides]
        firsts = [sets.index(number) for number in range(len(numbers))] or [0]
        kept = kept_levels(len(levels))
        counts = [("count", "u4"), ("magic", "u4"), ("shift", "u4"), ("unused", "u4")]
        level = np.dtype([("stride", "i8", (len(firsts),)), *counts])
        head = [("operand", "u8", (len(cells),)), ("words", "u4"), ("unused", "u4")]
        data = np.zeros(1, [*head, ("level", level, (kept,))])
        data["words"] = words = prod(cells[0].shape)
        for position, (steps, *each) in enumerate(reversed(levels)):
            last = position == len(levels) - 1
            magic = (0, 0) if last else divisor(steps)
            data[0]["level"][position] = ([each[n] for n in firsts], steps, *magic, 0)
        plan, memory = self._planned(words, kept, sets, len(cells)), argument(data)
        places = [Address.from_buffer(memory, 8 * n) for n in range(len(cells))]
        return places, self._prepared_for(plan, memory)
