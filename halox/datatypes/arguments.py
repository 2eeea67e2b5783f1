"""Checks of constructor arguments: integers and lists of integers. All checks raise `DatatypeError`."""

from __future__ import annotations

from collections.abc import Sequence, Sized

import numpy as np
import numpy.typing as npt

from halox.errors import DatatypeError
from halox.values import LARGEST, as_int, as_list, check_unmasked, shown

Int64Array = npt.NDArray[np.int64]
"""One-dimensional int64 array: displacements, lengths, offsets."""

IntegerList = Sequence[int] | npt.NDArray[np.integer]
"""List of integers that a constructor accepts."""


def integer(name: str, value: object) -> int:
    """Python int of an integer argument of any sign; raises for bools and for more than 64 bits."""
    number = as_int(value)
    if number is None:
        raise DatatypeError(f"{name} must be an integer, got {shown(value)}")
    if not -LARGEST <= number <= LARGEST:
        raise DatatypeError(f"{name} must fit a signed 64-bit integer, got {shown(number)}")
    return number


def count_of(name: str, value: object) -> int:
    """Python int of a count; raises for a negative number."""
    number = integer(name, value)
    if number < 0:
        raise DatatypeError(f"{name} must be 0 or more, got {number}")
    return number


def integer_tuple(name: str, values: object) -> tuple[int, ...]:
    """Tuple of Python ints, for short lists with one entry per axis."""
    items = as_list(values)
    if items is None:
        raise DatatypeError(f"{name} must be a sequence of integers, got {shown(values)}")
    if {*map(type, items)} == {int} and max(map(abs, items)) <= LARGEST:
        return tuple(items)
    return tuple(integer(f"{name}[{axis}]", value) for axis, value in enumerate(items))


def integer_array(name: str, values: object) -> Int64Array:
    """Read-only one-dimensional int64 copy of a list of integers."""
    check_unmasked(values, name)
    try:
        given = np.asarray(values)
    except (TypeError, ValueError):
        raise DatatypeError(f"{name} must be a list of integers, got {shown(values)}") from None
    if given.ndim != 1:
        raise DatatypeError(
            f"{name} must have one dimension, got shape {given.shape}: {shown(values)}"
        )
    if given.size and given.dtype.kind not in "iu":
        raise DatatypeError(f"{name} must hold integers, got dtype {given.dtype}")
    if given.dtype.kind == "u" and given.size and int(given.max()) > LARGEST:
        raise DatatypeError(f"{name} must fit signed 64-bit integers, got {int(given.max())}")
    return frozen(np.array(given, dtype=np.int64))


def count_array(name: str, values: object) -> Int64Array:
    """Read-only one-dimensional int64 copy of a list of counts."""
    counts = integer_array(name, values)
    if counts.size and int(counts.min()) < 0:
        where = int(counts.argmin())
        raise DatatypeError(f"{name}[{where}] must be 0 or more, got {int(counts[where])}")
    return counts


def same_lengths(**lists: Sized) -> None:
    """Raise unless all lists have the same length."""
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        given = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise DatatypeError(f"lists of one length are needed: {given} entries")


def scaled(name: str, values: Int64Array, factor: int) -> Int64Array:
    """``values * factor`` in int64; raises if a product does not fit."""
    if values.size:
        largest = max(abs(int(values.max())), abs(int(values.min())))
        if largest * abs(factor) > LARGEST:
            raise DatatypeError(
                f"{name} of up to {largest} elements of {factor} bytes "
                "exceed what 64-bit byte displacements reach"
            )
    return frozen(values * factor)


def total(values: Int64Array) -> int:
    """Sum of counts, exact even beyond 64 bits."""
    if values.size and int(values.max()) > LARGEST // values.size:
        return sum(values.tolist())
    return int(values.sum())


def frozen(values: Int64Array) -> Int64Array:
    """Mark an array read-only, and return it."""
    values.setflags(write=False)
    return values
