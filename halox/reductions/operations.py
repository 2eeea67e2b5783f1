"""Operations of reductions: their dtypes, and their names in NumPy and in the kernels.

Also the dtypes of results, and checks of the arrays that receive them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from halox.errors import FieldError
from halox.reductions.host.exact_sums import fold_exactly
from halox.runtime.arrays import Array, Described, DType, check_elements_apart
from halox.values import shown

QUIET = Context()
"""NumPy ignores floating-point errors in a copy of this context, which costs a third of `numpy.errstate`."""
QUIET.run(np.seterr, all="ignore")

ELEMENTS: dict[str, str] = {
    **{f"i{n}": name for n, name in ((1, "signed char"), (2, "short"), (4, "int"))},
    **{f"u{n}": f"unsigned {name}" for n, name in ((1, "char"), (2, "short"), (4, "int"))},
    "i8": "long long",
    "u8": "unsigned long long",
    "f4": "float",
    "f8": "double",
    "c8": "Complex<float>",
    "c16": "Complex<double>",
    "b1": "unsigned char",
}
"""Kernel names of all dtypes that can be reduced, by kind and bytes."""


def element(dtype: DType) -> str:
    """Return the kernel name of a dtype; empty if the dtype cannot be reduced."""
    return ELEMENTS.get(f"{dtype.kind}{dtype.itemsize}", "")


_NAMES = {
    "b": "bool",
    "i": "signed integers",
    "u": "unsigned integers",
    "f": "float32 and float64",
    "c": "complex64 and complex128",
}


@dataclass(frozen=True)
class Operation:
    """An operation that combines the ranks' values, always in the order of the ranks."""

    name: str  # public name
    combine: np.ufunc  # combine(a, b, out), where a is first in the order of the ranks
    kernel_name: str  # in operations.cu
    kinds: str  # kinds of NumPy dtypes that the operation supports
    is_logical: bool = False  # combines truth values, to 1 or 0 in the values' dtype
    is_exact: bool = (
        False  # the sum is exact, and rounded once; it needs all ranks' values at a time
    )

    def __str__(self) -> str:
        return f"reproducible {self.name}" if self.is_exact else self.name

    def fold(self, total: Array, values: Sequence[Array]) -> None:
        """Combine all ranks' values in ``total``, which may be the first rank's array."""
        if self.is_exact:
            fold_exactly(total, values)
        else:
            QUIET.copy().run(self._fold, total, values)

    def _fold(self, total: Array, values: Sequence[Array]) -> None:
        combine = self.combine
        if self.is_logical:
            total[...] = values[0] != 0
            for other in values[1:]:  # totals are bools, 1 or 0 in any dtype
                combine(total, other, out=total, casting="unsafe")
        elif len(values) == 1:
            total[...] = values[0]
        else:
            combine(values[0], values[1], out=total)
            for other in values[2:]:
                combine(total, other, out=total)


_EXACT_SUM = Operation("sum", np.add, "", "fc", is_exact=True)

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("sum", np.add, "Sum", "iufc"),
        Operation("prod", np.multiply, "Prod", "iufc"),
        Operation("min", np.minimum, "Min", "biuf"),
        Operation("max", np.maximum, "Max", "biuf"),
        Operation("logical_and", np.logical_and, "LogicalAnd", "biu", True),
        Operation("logical_or", np.logical_or, "LogicalOr", "biu", True),
        Operation("logical_xor", np.logical_xor, "LogicalXor", "biu", True),
        Operation("bitwise_and", np.bitwise_and, "BitwiseAnd", "biu"),
        Operation("bitwise_or", np.bitwise_or, "BitwiseOr", "biu"),
        Operation("bitwise_xor", np.bitwise_xor, "BitwiseXor", "biu"),
    )
}
"""All operations, by name."""


def find_operation(name: object, dtype: DType, is_exact: bool = False) -> Operation:
    """Return an operation, if it has a meaning for a dtype; ``is_exact`` requests a reproducible one.

    Examples
    --------
    >>> find_operation("max", np.dtype("f8")).combine
    <ufunc 'maximum'>
    """
    operation = OPERATIONS.get(name) if isinstance(name, str) else None
    if operation is None:
        raise FieldError(f"op must be one of {', '.join(map(repr, OPERATIONS))}, got {shown(name)}")
    if not element(dtype) or not dtype.isnative:
        raise FieldError(
            f"dtype {dtype} cannot be reduced; dtypes are bool, integers of 8 to 64 bits, float32, float64, complex64 "
            "and complex128, in the machine's byte order: convert with array.astype"
        )
    if dtype.kind not in operation.kinds:
        meant = ", ".join(_NAMES[kind] for kind in operation.kinds)
        raise FieldError(
            f"op {operation.name!r} has no meaning for dtype {dtype}; it is for {meant}"
            f"{_remedy(operation, dtype)}"
        )
    if is_exact and dtype.kind in "fc" and operation.combine in (np.add, np.multiply):
        if operation.name != "sum":
            raise FieldError(
                f"reproducible: op {operation.name!r} of {dtype} depends on the order of the ranks; op 'sum' can be "
                "reproducible, and 'min', 'max' and operations on integers always are; give reproducible=False"
            )
        return _EXACT_SUM
    return operation


def _remedy(operation: Operation, dtype: DType) -> str:
    if dtype.kind == "b":
        return ": count with array.astype('i8'), or use 'logical_or', 'logical_and'"
    if operation.is_logical:
        return ": compare first, as in array != 0"
    if operation.name in ("min", "max"):
        return ": reduce abs(array), or its parts"
    return ""


@lru_cache(maxsize=64)
def wide_dtype(dtype: DType) -> DType:
    """Return the accumulator dtype of sums over a dtype."""
    if dtype.kind == "c":
        return np.dtype(np.result_type(dtype, "c16"))
    if dtype.kind == "f":
        return np.dtype(np.result_type(dtype, "f8"))
    return np.dtype("u8" if dtype.kind == "u" else "i8")


def result_dtype(name: str, dtypes: Sequence[DType]) -> DType:
    """Return the dtype of a field reduction.

    Examples
    --------
    >>> result_dtype("dot", [np.dtype("f4"), np.dtype("c8")])
    dtype('complex128')
    """
    is_ordered = name in ("min", "max", "argmin", "argmax", "histogram")
    for dtype in dtypes:
        if dtype.kind not in "biufc":
            raise FieldError(f"{name} has no meaning for dtype {dtype}; use a bool or number dtype")
        if is_ordered and dtype.kind == "c":
            raise FieldError(f"{name} has no meaning for dtype {dtype}; reduce a real-valued field")
    if name == "norm":
        return np.dtype("f8")
    if is_ordered:
        return dtypes[0].newbyteorder("=")
    return wide_dtype(np.result_type(*dtypes))


def check_out(out: Described, dtype: DType) -> None:
    """Raise `FieldError` if an array does not fit the result of a field reduction."""
    if prod(out.shape) != 1 or out.dtype != dtype:
        raise FieldError(
            f"out: got shape {tuple(out.shape)} of {out.dtype}, the result is one element of {dtype}"
        )
    check_writable(out)


def check_array(array: Described, shape: tuple[int, ...], dtype: DType, name: str) -> None:
    """Raise `FieldError` if an array, or ``out``, is not one that an allreduce was made for."""
    if tuple(array.shape) != shape or array.dtype != dtype:
        raise FieldError(
            f"{name}: got shape {tuple(array.shape)} of {array.dtype}, this allreduce is of shape {shape} of {dtype}; "
            "give such an array"
        )
    if name == "out":
        check_writable(array)


def check_writable(out: Described) -> None:
    """Raise `FieldError` if a result cannot be written to an array."""
    if not out.writable:
        raise FieldError("out is read-only; the result cannot be written")
    check_elements_apart(out, "out")
