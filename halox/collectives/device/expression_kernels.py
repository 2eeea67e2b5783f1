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

from halox.collectives.device.field_plans import (
    kept_levels,
    kernel_defines,
    loops,
    planned,
)
from halox.collectives.device.kernel_plans import ReductionPlan
from halox.collectives.device.kernel_reductions import (
    Address,
    FieldReduction,
    Layout,
    argument,
)
from halox.collectives.expressions import Typed
from halox.collectives.field_operations import FieldOperation
from halox.collectives.operations import element, find_operation
from halox.errors import FieldError
from halox.packing.strided_plan import divisor
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
    """Return definitions for ``field_body.cu``; ``sets`` are the numbers of the operands' strides, -1 for zeros."""
    program = call.program
    loaded, inputs = call.inputs - len(call.axes), call.inputs
    types = [_type(dtype) for dtype in program.dtypes]
    texts = {n: f"in.v{n}" for n in range(inputs)}
    loads, steps, at = [], [], inputs
    for n in range(inputs):
        place = f"cells.operand[{n}]" + (f" + offset[{sets[n]}]" if sets[n] >= 0 else "")
        if n < loaded:
            is_bool = " != 0" if types[n] == "bool" else ""
            place = f"*at_address<const {element(program.dtypes[n])}>({place}){is_bool}"
        loads.append(f"v{n} = {place};")
    for register in program.scalars:
        dtype = program.dtypes[register]
        parts = [f"cells.operand[{at + part}]" for part in range(-(-dtype.itemsize // 8))]
        if types[register] == "bool":
            parts = [f"{parts[0]} != 0"]
        else:
            each = types[register] if len(parts) == 1 else "double"
            parts = [f"numpy::of_bits<{each}>({part})" for part in parts]
        texts[register] = (
            f"Complex<double>{{{', '.join(parts)}}}" if len(parts) == 2 else f"({parts[0]})"
        )
        at += len(parts)
    for register, step in program.steps.items():
        args = [
            texts[arg]
            if program.dtypes[arg] == dtype
            else f"numpy::To<{_type(dtype)}>::of({texts[arg]})"
            for arg, dtype in zip(step.args, step.loop, strict=True)
        ]
        texts[register] = f"t{register}"
        call_text = f"numpy::{step.function}({', '.join(args)})"
        steps.append(f"const {types[register]} t{register} = {call_text};")
    results: dict[str, list[str]] = {
        name: [] for name in ("ACCUMULATORS", "BEGIN", "TAKE", "MERGE", "STORE")
    }
    for n, (operation, register) in enumerate(zip(operations, program.results, strict=True)):
        kind = element(operation.accumulator(program.dtypes[register]))
        value = f"numpy::To<{kind}>::of({texts[register]})"
        if operation.is_exact:
            kind = "Complex<double>" if types[register].startswith("Complex") else "double"
            results["TAKE"] = [f"numpy::To<{kind}>::of({texts[register]})"]
            break
        if operation.local == "Square":
            value = f"numpy::norm2({texts[register]})"
        take = f"take_in<{find_operation(operation.op, np.dtype('f4')).kernel_name}>"
        target = f"cells.operand[{at + n - 1}]" if n else "p.target"
        # Complex totals are pairs: NVRTC 13.0 does not terminate if a loop assigns a complex total as a whole.
        is_pair = kind.startswith("Complex")
        members = (
            {f"r{n}": f"{value}.real", f"i{n}": f"{value}.imag"} if is_pair else {f"r{n}": value}
        )
        for name, part in members.items():
            part_kind = "double" if is_pair else kind
            results["ACCUMULATORS"].append(f"{part_kind} {name};")
            results["BEGIN"].append(f"all.{name} = identity<{part_kind}>(partials, {n});")
            results["TAKE"].append(f"{take}(all.{name}, {part});")
            results["MERGE"].append(f"{take}(all.{name}, other.{name});")
        finished = (
            "sqrt" * (operation.finish == "Root") + f"({', '.join(f'all.{m}' for m in members)})"
        )
        if is_pair:
            finished = f"{kind}{{all.r{n}, all.i{n}}}"
        results["STORE"].append(f"*at_address<{kind}>({target}) = {finished};")
    return {
        "INPUTS": " ".join(f"{types[n]} v{n};" for n in range(inputs)),
        "LOADS": " ".join(loads),
        "STEPS": " ".join(steps),
        **{name: " ".join(lines) for name, lines in results.items()},
    }


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
