"""Operations that reduce fields to one value each: how cells become values, and how values are combined.

A `FieldOperation` is a record for host and GPUs. `find_field_operation` returns it for the name of a grid's method and
the dtypes of the fields; the names of kernels' functions are in ``device/kernels/field_body.cu``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from halox.errors import FieldError
from halox.reductions.operations import result_dtype, wide_dtype
from halox.runtime.arrays import DType


@dataclass(frozen=True)
class FieldOperation:
    """A reduction of the cells of one field or two to one value."""

    name: str  # of the grid's method
    op: str = "sum"  # operation that combines the cells, and the ranks
    local: str = "Value"  # kernels' function of a cell
    finish: str = "Plain"  # kernels' last function, applied to the result
    is_exact: bool = False  # sums are exact, and rounded once

    def __str__(self) -> str:
        return f"reproducible {self.name}" if self.is_exact else self.name

    @property
    def before_ranks(self) -> FieldOperation:
        """The same operation on the cells of one rank, whose result can be combined with the results of other ranks.

        A sum of squares for a norm, and the words of a sum for an exact sum.
        """
        return replace(self, finish="Words" if self.is_exact else "Plain")

    def accumulator(self, dtype: DType) -> DType:
        """Return the dtype of the accumulator: 64 bits for sums, the field's dtype for min and max."""
        if self.op in ("min", "max"):
            return dtype
        return np.dtype("f8") if self.local == "Square" else wide_dtype(dtype)

    def identity(self, dtype: DType) -> Any:
        """Return the identity element of the operation, in the accumulator's dtype."""
        accumulator = self.accumulator(dtype)
        if self.op not in ("min", "max"):
            return accumulator.type(0)
        if accumulator.kind == "f":
            return accumulator.type(np.inf if self.op == "min" else -np.inf)
        if accumulator.kind == "b":
            return accumulator.type(self.op == "min")
        limits = np.iinfo(accumulator)
        return accumulator.type(limits.max if self.op == "min" else limits.min)


FIELD_OPERATIONS: dict[str, FieldOperation] = {
    operation.name: operation
    for operation in (
        FieldOperation("sum"),
        FieldOperation("min", "min"),
        FieldOperation("max", "max"),
        FieldOperation("norm", local="Square", finish="Root"),
        FieldOperation("dot", local="Product"),
    )
}
"""Operations by name."""

EXACT_OPERATIONS: dict[str, FieldOperation] = {
    name: replace(FIELD_OPERATIONS[name], is_exact=True) for name in ("sum", "norm", "dot")
}
"""Reproducible operations by name. The others, and sums of integers, are always reproducible."""


@lru_cache(maxsize=256)
def find_field_operation(
    name: str, dtypes: tuple[DType, ...], is_exact: bool
) -> tuple[FieldOperation, DType]:
    """Return the operation of a grid's method, and the result's dtype; ``is_exact`` requests a reproducible one.

    Examples
    --------
    >>> [str(find_field_operation("sum", (np.dtype(dtype),), True)[0]) for dtype in ("i4", "f8")]
    ['sum', 'reproducible sum']
    """
    dtype = result_dtype(name, dtypes)
    if not is_exact or name not in EXACT_OPERATIONS or dtype.kind in "iu":
        return FIELD_OPERATIONS[name], dtype
    if dtype not in ("f8", "c16"):
        raise FieldError(
            f"reproducible: a {name} of dtype {dtypes[0]} would be rounded to {dtype}, and exact sums are rounded to "
            "float64 or complex128; convert the field to one of these"
        )
    return EXACT_OPERATIONS[name], dtype
