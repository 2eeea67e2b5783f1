"""Plans for the kernel that reduces fields over ranks: loops over a rank's cells, and the launch shape.

This module touches no GPU. All ranks make equal plans of the memory in which their kernels synchronize
(that of `ONE_VALUE`). The loops and the number of blocks may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from halox.errors import FieldError
from halox.packing.refine import Level
from halox.packing.strided_plan import MAX_LEVELS, MAX_WORDS, StridedRow
from halox.reductions.device.kernel_plans import (
    THREADS,
    ReductionPlan,
    block_threads,
    check_operation,
)
from halox.reductions.field_operations import FieldOperation
from halox.reductions.operations import element, find_operation
from halox.runtime.arrays import Described, DType

CELLS_IN_FLIGHT = 4
"""Cells that a thread loads before it combines the first cell."""

BLOCKS_PER_SM = 4
"""Most blocks per multiprocessor that read a field: they all run at once, and each reads its share of the field."""

EXACT_WORDS = 57
"""Words of a real sum, as in ``exact_field.cu``; a complex sum has twice as many."""

EXACT_CELLS = 1 << 21
"""Most cells per block of an exact sum, on average: the words of a block then cannot overflow."""


ONE_VALUE = StridedRow(0, 0, 1, ())
"""A rank whose cells have already been combined, to one accumulator; its plan has the memory of plans for any field."""


def plan_field(
    operation: FieldOperation, dtype: DType, row: StridedRow, ranks: int, *, sms: int
) -> ReductionPlan:
    """Plan the launch of a field reduction."""
    # Sums of cells are computed in 64 bits, so that bools can be counted.
    check_operation(np.dtype("i8") if dtype.kind == "b" else dtype, operation.op, ranks)
    accumulator = operation.accumulator(dtype)
    defines = [
        ("ELEMENT", element(dtype)),
        *kernel_defines(operation, dtype),
        ("MAX_LEVELS", str(kept_levels(len(row.levels)))),
        ("IN_FLIGHT", str(CELLS_IN_FLIGHT)),
    ]
    if not operation.is_exact:
        combine = find_operation(operation.op, accumulator)
        defines += [("ACCUMULATOR", element(accumulator)), ("OP", combine.kernel_name)]
    size = accumulator.itemsize
    return planned(
        str(operation), defines, row.words, ranks, sms, size, is_exact=operation.is_exact
    )


def kept_levels(levels: int) -> int:
    """Return the levels of a kernel's parameter: few values, because each is compiled."""
    return 3 if levels <= 3 else MAX_LEVELS


def kernel_defines(operation: FieldOperation, dtype: DType) -> list[tuple[str, str]]:
    """Return the definitions for the functions of a cell and of the result."""
    defines = [
        ("LOCAL", operation.local),
        ("FINISH", operation.finish),
        ("MAX_THREADS", str(THREADS)),
    ]
    if operation.is_exact:
        has_products = dtype.kind == "c" and operation.local in ("Square", "Product")
        defines += [
            ("PARTS", str(operation.accumulator(dtype).itemsize // 8)),
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
