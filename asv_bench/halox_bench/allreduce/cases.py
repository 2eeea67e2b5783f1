"""Cases of the allreduce benchmark, and the data by which their results are checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.collectives.operations import find_operation
from halox.errors import HaloxError
from halox_bench.common.options import KIB, MIB, nbytes_of, size_label

SIZES = (
    *(4, 64, KIB, 8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB),
    *(MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 128 * MIB),
)
QUICK_SIZES = (4, 8 * KIB, MIB, 16 * MIB)
VALUES = (("f8", "sum"), ("f8", "max"), ("c16", "sum"), ("i8", "sum"))
"""Single values that are measured beside the sizes."""

_UFUNCS = {"sum": "add", "prod": "multiply", "min": "minimum", "max": "maximum"}
"""Names of NumPy's functions that differ from the operations'."""

_KINDRED = {"min": "logical_and", "max": "logical_or"}
"""Of bools."""


@dataclass(frozen=True)
class AllreduceCase:
    """Arrays of one size, dtype and operation.

    Attributes
    ----------
    elements : int
        Of each rank's array.

    Raises
    ------
    HaloxError
        If the operation has no meaning for the dtype, or there is no such dtype.
    """

    elements: int
    dtype: str
    op: str

    def __post_init__(self) -> None:
        """Check it."""
        find_operation(self.op, _dtype(self.dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of each rank's array."""
        return self.elements * np.dtype(self.dtype).itemsize

    @property
    def details(self) -> dict[str, Any]:
        return {**vars(self), "nbytes": self.nbytes}

    @property
    def name(self) -> str:
        """Size, dtype and operation."""
        return f"{size_label(self.nbytes)} {self.dtype} {self.op}"


def cases(args: argparse.Namespace) -> list[AllreduceCase]:
    """Return the cases of a command line: all combinations of its sizes, dtypes and operations.

    A size below an element's stands for one element. Without any of these options: sums of float32 from 4 bytes to
    128 MiB, and single values of several dtypes.

    Raises
    ------
    HaloxError
        If a size is not a number of bytes, or an operation has no meaning for a dtype.
    """
    nbytes = tuple(map(nbytes_of, args.sizes)) or (QUICK_SIZES if args.quick else SIZES)
    found = [
        AllreduceCase(max(1, size // _dtype(dtype).itemsize), dtype, op)
        for dtype, op, size in product(args.dtype or ("f4",), args.op or ("sum",), nbytes)
    ]
    if not (args.sizes or args.dtype or args.op):
        found += [AllreduceCase(1, dtype, op) for dtype, op in VALUES[: 1 if args.quick else None]]
    return list(dict.fromkeys(found))


def _dtype(text: str) -> np.dtype[Any]:
    try:
        return np.dtype(text)
    except TypeError as error:
        raise HaloxError(f"--dtype {text}: {error}") from None


class AllreduceOracle:
    """Fills arrays and counts wrong elements of a result: small whole numbers, which any order combines exactly.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``.

    Notes
    -----
    The numbers of all ranks are combined here by NumPy alone. They repeat after a prime number of elements, so that
    no part of an array that is cut by powers of two looks like another.
    """

    PERIOD = 65_521

    def __init__(self, case: AllreduceCase, rank: int, size: int, xp: Any = np) -> None:
        self._case, self._rank, self._size, self._xp = case, rank, size, xp

    def fill(self, source: Any, target: Any, step: int) -> None:
        """Give a rank its numbers of a step, and the result only wrong ones."""
        self._spread(source, self._numbers(self._rank, step))
        wanted = self._wanted(step)
        self._spread(target, ~wanted if wanted.dtype.kind == "b" else wanted + wanted.dtype.type(1))

    def wrong(self, target: Any, step: int) -> int:
        """Count the wrong elements of a step's result."""
        wanted = self._xp.asarray(self._wanted(step))
        parts = zip(self._parts(target), (wanted, wanted[: target.size % wanted.size]), strict=True)
        return sum(int(self._xp.count_nonzero(part != right)) for part, right in parts)

    def _spread(self, array: Any, numbers: npt.NDArray[Any]) -> None:
        given = self._xp.asarray(numbers)
        whole, rest = self._parts(array)
        whole[...] = given
        rest[...] = given[: rest.size]

    def _parts(self, array: Any) -> tuple[Any, Any]:
        """Return views of an array's whole periods and of its last part, which may be empty."""
        period = min(self._case.elements, self.PERIOD)
        end = array.size // period * period
        return array[:end].reshape(-1, period), array[end:]

    def _wanted(self, step: int) -> npt.NDArray[Any]:
        combine = getattr(np, _UFUNCS.get(self._case.op, self._case.op))
        total = self._numbers(0, step)
        if self._case.op.startswith("logical"):
            total = (total != 0).astype(total.dtype)
        for rank in range(1, self._size):
            total = combine(total, self._numbers(rank, step)).astype(total.dtype)
        return total

    def _numbers(self, rank: int, step: int) -> npt.NDArray[Any]:
        dtype, op = np.dtype(self._case.dtype), self._case.op
        count = min(self._case.elements, self.PERIOD)
        random = np.random.default_rng((rank, step))
        numbers: npt.NDArray[Any] = random.integers(0, 100, count)
        if op == "prod":
            # Units and 2: a product is a power of 2, which floats hold exactly.
            factors = [1, 2, -1, 1j] if dtype.kind == "c" else [1, 2, 1, 2]
            numbers = np.array(factors)[numbers % 4]
        elif dtype.kind == "b" or "_" in op:
            # The share of set bits leaves some bits of the result set and some not, for any number of ranks.
            share = {"and": self._size, "or": 1}.get(_KINDRED.get(op, op).split("_")[-1])
            likely = 0.5 if share is None else share / (self._size + 1)
            bits = random.random((4, count)) < likely
            whole = op.startswith("bitwise") and dtype.kind != "b"
            shifts = np.arange(4)[:, None]
            # MPI copies the numbers of a single rank, also true ones other than 1.
            truths = numbers % 3 + 1 if self._size > 1 else 1
            numbers = (bits << shifts).sum(axis=0) if whole else bits[0] * truths
        elif dtype.kind == "c":
            numbers = numbers % 4 + 1j * (numbers % 5)
        elif op == "sum":
            numbers = numbers % 16
        return numbers.astype(dtype)
