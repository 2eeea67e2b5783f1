"""Plans for the kernel that reduces fields over ranks: loops over a rank's cells, and the launch shape.

This module touches no GPU. All ranks make equal plans of the memory in which their kernels synchronize
(`plan_memory`). The loops and the number of blocks may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from halox.collectives.device.kernel_plans import (
    THREADS,
    ReductionPlan,
    block_threads,
    check_operation,
)
from halox.collectives.operations import REPRODUCIBLE, element, find_operation, wide_dtype
from halox.errors import FieldError
from halox.packing.refine import Level
from halox.packing.strided_plan import MAX_LEVELS, MAX_WORDS, StridedRow
from halox.runtime.arrays import Described, DType

CELLS_IN_FLIGHT = 4
"""Cells that a thread loads before it combines the first cell."""

BLOCKS_PER_SM = 4
"""Most blocks per multiprocessor that read a field: they all run at once, and each reads its share of the field."""

WORDS_OF = "words of "
"""Prefix of the name of a reproducible reduction: the words of this rank's sum, without the other ranks."""

EXACT_WORDS = 57
"""Words of a real sum, as in ``exact_field.cu``; a complex sum has twice as many."""

EXACT_CELLS = 1 << 21
"""Most cells per block of an exact sum, on average: the words of a block then cannot overflow."""


@dataclass(frozen=True)
class FieldOperation:
    """A field reduction in the words of the kernel."""

    op: str  # operation that combines the cells, and the ranks
    local: str = "Value"  # function of a cell
    finish: str = "Plain"  # last function, applied to the result
    is_exact: bool = False  # sums are exact, and rounded once (exact_field.cu)

    def accumulator(self, dtype: DType) -> DType:
        """Return the dtype of the accumulator: 64 bits for sums, the field's dtype for min and max."""
        if self.local == "Placed":
            return np.dtype([("value", dtype), ("index", "u8")], align=True)
        if self.op in ("min", "max"):
            return dtype
        if self.local == "Deviation":
            return np.dtype("c16")
        return np.dtype("f8") if self.local == "Square" else wide_dtype(dtype)

    def identity(self, dtype: DType) -> Any:
        """Return the identity element of the operation, in the accumulator's dtype."""
        accumulator = self.accumulator(dtype)
        if self.local == "Placed":
            value = replace(self, local="Value").identity(dtype)
            return np.array((value, np.iinfo("u8").max), accumulator)
        if self.op not in ("min", "max"):
            return accumulator.type(0)
        if accumulator.kind == "f":
            return accumulator.type(np.inf if self.op == "min" else -np.inf)
        if accumulator.kind == "b":
            return accumulator.type(self.op == "min")
        limits = np.iinfo(accumulator)
        return accumulator.type(limits.max if self.op == "min" else limits.min)


FIELD_REDUCTIONS: dict[str, FieldOperation] = {
    "sum": FieldOperation("sum"),
    "min": FieldOperation("min"),
    "max": FieldOperation("max"),
    "norm": FieldOperation("sum", "Square", "Root"),
    "dot": FieldOperation("sum", "Product"),
    "squares": FieldOperation("sum", "Square"),
    "moments": FieldOperation("sum", "Deviation"),
    "argmin": FieldOperation("min", "Placed"),
    "argmax": FieldOperation("max", "Placed"),
}
"""Field reductions, by the name of the grid's method; "norm" is the square root of "squares".

"moments" adds the differences from one cell and their squares; the cell is the second field, with strides of 0. For
"argmin" and "argmax" the second field is a contiguous one at address 0, whose addresses tell the cells' numbers.
"""

for _name in ("sum", "norm", "dot"):
    _exact = replace(FIELD_REDUCTIONS[_name], is_exact=True)
    FIELD_REDUCTIONS[REPRODUCIBLE + _name] = _exact
    FIELD_REDUCTIONS[WORDS_OF + REPRODUCIBLE + _name] = replace(_exact, finish="Words")


def plan_memory(name: str, dtype: DType, ranks: int, *, sms: int) -> ReductionPlan:
    """Plan the memory in which launches of :func:`plan_field` synchronize, for any field of a dtype.

    Parameters and errors are the same as for :func:`plan_field`.
    """
    return _planned_field(name, FIELD_REDUCTIONS[name], dtype, 1, 0, ranks, sms)


def plan_value(name: str, dtype: DType, ranks: int, *, sms: int) -> ReductionPlan:
    """Plan the launch for a rank whose cells have already been combined, to one accumulator.

    Parameters and errors are the same as for :func:`plan_field`. The launch synchronizes with
    launches of :func:`plan_field`.
    """
    operation = FIELD_REDUCTIONS[name]
    of_values = replace(operation, local="Words" if operation.is_exact else "Value")
    return _planned_field(name, of_values, operation.accumulator(dtype), 1, 0, ranks, sms)


def plan_field(name: str, dtype: DType, row: StridedRow, ranks: int, *, sms: int) -> ReductionPlan:
    """Plan the launch of a field reduction."""
    operation = FIELD_REDUCTIONS[name]
    return _planned_field(name, operation, dtype, row.words, len(row.levels), ranks, sms)


def _planned_field(
    name: str,
    reduction: FieldOperation,
    dtype: DType,
    words: int,
    levels: int,
    ranks: int,
    sms: int,
) -> ReductionPlan:
    # Sums of cells are computed in 64 bits, so that bools can be counted.
    check_operation(np.dtype("i8") if dtype.kind == "b" else dtype, reduction.op, ranks)
    accumulator = reduction.accumulator(dtype)
    defines = [
        ("ELEMENT", element(dtype)),
        *kernel_defines(reduction, dtype),
        ("MAX_LEVELS", str(kept_levels(levels))),
        ("IN_FLIGHT", str(CELLS_IN_FLIGHT)),
    ]
    if not reduction.is_exact:
        is_place = reduction.local == "Placed"
        operation = find_operation(reduction.op, dtype if is_place else accumulator)
        text = f"Place<{element(dtype)}>" if is_place else element(accumulator)
        defines += [("ACCUMULATOR", text), ("OP", operation.kernel_name)]
    size = accumulator.itemsize
    return planned(name, defines, words, ranks, sms, size, is_exact=reduction.is_exact)


def kept_levels(levels: int) -> int:
    """Return the levels of a kernel's parameter: few values, because each is compiled."""
    return 3 if levels <= 3 else MAX_LEVELS


def kernel_defines(reduction: FieldOperation, dtype: DType) -> list[tuple[str, str]]:
    """Return the definitions for the functions of a cell and of the result."""
    defines = [
        ("LOCAL", reduction.local),
        ("FINISH", reduction.finish),
        ("MAX_THREADS", str(THREADS)),
    ]
    if reduction.is_exact:
        has_products = dtype.kind == "c" and reduction.local in ("Square", "Product")
        defines += [
            ("PARTS", str(reduction.accumulator(dtype).itemsize // 8)),
            ("ADDENDS", "2" if has_products else "1"),
        ]
    return defines


def planned(
    name: str,
    defines: Sequence[tuple[str, str]],
    words: int,
    ranks: int,
    sms: int,
    accumulator_bytes: int,
    *,
    is_exact: bool,
    in_flight: int = CELLS_IN_FLIGHT,
) -> ReductionPlan:
    """Plan the launch for ``words`` cells, with accumulators of so many bytes."""
    threads = block_threads(words)
    most = BLOCKS_PER_SM * sms
    blocks = max(1, min(-(-words // (threads * in_flight)), most))
    if is_exact:
        function, threads, blocks = "exact_field", THREADS, max(blocks, -(-words // EXACT_CELLS))
        partial_bytes = EXACT_WORDS * accumulator_bytes
        unit_bytes = 2 * partial_bytes
    else:
        function, partial_bytes = "allreduce_field", most * accumulator_bytes
        unit_bytes = 16 * -(-accumulator_bytes // 8)
    return ReductionPlan(
        *(name, function, tuple(defines)),
        *(ranks, 1, 1, 1),
        *(threads, blocks),
        *(unit_bytes, ranks * unit_bytes),
        partial_bytes=partial_bytes,
    )


def field_row(
    pointer: int,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    other: tuple[int, Sequence[int]] | None = None,
) -> StridedRow | None:
    """Return the cells of a field, or of two fields, as loops over elements; None if the kernel does not support them.

    The kernel supports 1 to MAX_WORDS cells, in at most MAX_LEVELS loops.

    Examples
    --------
    >>> field_row(0, (4, 6, 8), (640, 80, 8), 8).levels
    (Level(steps=4, source_stride=640, target_stride=0), Level(steps=6, source_stride=80, target_stride=0), \
Level(steps=8, source_stride=8, target_stride=0))
    >>> field_row(0, (4, 6, 8), (384, 64, 8), 8).levels
    (Level(steps=192, source_stride=8, target_stride=0),)
    """
    other_pointer, other_strides = (0, [0] * len(shape)) if other is None else other
    levels = loops(shape, strides, other_strides)
    if levels is None:
        return None
    return StridedRow(pointer, other_pointer, itemsize, tuple(Level(*level) for level in levels))


def check_aligned(field: Described) -> None:
    """Raise `FieldError` unless a field's cells are aligned for the loads of a GPU."""
    part = field.dtype.itemsize // (2 if field.dtype.kind == "c" else 1)
    strides = (stride for n, stride in zip(field.shape, field.strides, strict=True) if n > 1)
    if field.pointer % part or any(stride % part for stride in strides):
        raise FieldError(
            f"a field's address and strides must be multiples of {part} bytes to be reduced on a GPU, got address "
            f"{field.pointer:#x} and strides {field.strides}; copy it first"
        )


def loops(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Return loops over the cells of several fields, outermost first: steps, and a stride for each field.

    Loops without a gap between them are merged. None if the kernels do not support them.
    """
    levels: list[tuple[int, ...]] = []
    for steps, *each in zip(shape, *strides, strict=True):
        if steps == 1:
            continue
        if levels and list(levels[-1][1:]) == [stride * steps for stride in each]:
            levels[-1] = (levels[-1][0] * steps, *each)
        else:
            levels.append((steps, *each))
    return levels if 0 < prod(shape) <= MAX_WORDS and len(levels) <= MAX_LEVELS else None
