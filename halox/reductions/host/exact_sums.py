"""Exact sums of floating-point numbers on the host, rounded once.

A sum is a whole number of units of 2**-1074, kept as a Python integer, so that its bits depend on no order and on no
division into parts. NumPy adds the numbers of a block in slices. If no number exceeds 2**e, adding
``1.5 * 2**52 * unit``, where ``unit`` is ``2**(e - 47)``, rounds each number to a multiple of the unit. The bits of the
results count the multiples, and as integers of 64 bits they add without overflow. The rests of the numbers are exact
and at most half a unit; they are sliced in turn until nothing is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import frexp, inf, ldexp, nan

import numpy as np

from halox.decomposition.blocks import blocks
from halox.runtime.arrays import Array

MOST = 1 << 15  # numbers of a block, whose arrays stay in a core's cache
_SLICE_BITS = 47  # the counts of MOST numbers stay below 2**63
_LEAST_EXPONENT = -1074  # of a positive double
_LARGE, _SCALE_BITS = 2.0**900, 128  # larger numbers are scaled down, so that no slice overflows
_SUM_BYTES = 280  # of the sum of 2**63 doubles, with its sign

RECORD_BYTES = _SUM_BYTES + 3 * 8
"""Bytes of an `ExactSum` for other ranks."""


class ExactSum:
    """An exact sum of doubles.

    Examples
    --------
    >>> numbers = np.array([1e308, 1.0, 2.0**-60, -1e308])
    >>> total = ExactSum()
    >>> total.add(numbers)
    >>> total.rounded(), float(numbers.sum())
    (1.0, 0.0)
    """

    def __init__(self, records: Sequence[bytes] = ()) -> None:
        """Begin with the sum of the records of other sums."""
        self._units = sum(int.from_bytes(r[:_SUM_BYTES], "little", signed=True) for r in records)
        # Numbers of inf, -inf and NaN.
        self._odd = sum((np.frombuffer(r[_SUM_BYTES:], "i8") for r in records), np.zeros(3, "i8"))
        self._scratch = np.empty((2, 0))

    def record(self) -> bytes:
        """Return the sum for other ranks, in RECORD_BYTES bytes."""
        return self._units.to_bytes(_SUM_BYTES, "little", signed=True) + self._odd.tobytes()

    def rounded(self) -> float:
        """Return the nearest double, ties to even; infinite beyond the largest double. A sum of zeros is 0.0."""
        plus, minus, invalid = map(bool, self._odd)
        if invalid or (plus and minus):
            return nan
        if plus or minus:
            return inf if plus else -inf
        try:
            # Python rounds quotients of integers correctly.
            return self._units / (1 << -_LEAST_EXPONENT)
        except OverflowError:
            return inf if self._units > 0 else -inf

    def add(self, values: Array) -> None:
        with np.errstate(all="ignore"):
            for start in range(0, len(values), MOST):
                self._add_block(values[start : start + MOST], 0)

    def _add_block(self, values: Array, scale_bits: int) -> None:
        """Add at most MOST numbers that have been scaled down."""
        if self._scratch.shape[1] < values.size:
            self._scratch = np.empty((2, values.size))
        rounded, other = self._scratch[:, : values.size]
        while values.size:
            sizes = np.abs(values, out=rounded)
            largest, least = float(np.maximum.reduce(sizes)), float(np.minimum.reduce(sizes))
            if not largest < _LARGE:
                self._add_large(values, scale_bits)
                return
            if not largest:
                return
            last_bit = frexp(least)[1] - 53 if least else _LEAST_EXPONENT
            bound = frexp(largest)[1]
            for _ in range(2):
                unit = max(bound - _SLICE_BITS, _LEAST_EXPONENT)
                offset = ldexp(1.5, unit + 52)
                np.add(values, offset, out=rounded)
                count = int(np.add.reduce(rounded.view("i8")))  # modulo 2**64
                count -= (
                    (unit + 52 + 1023 << 52) + (1 << 51)
                ) * values.size  # the bits of `offset`
                count = (count + (1 << 63)) % (1 << 64) - (1 << 63)
                self._units += count << (unit - _LEAST_EXPONENT + scale_bits)
                if unit <= max(last_bit, _LEAST_EXPONENT):
                    return  # all numbers are multiples of the unit
                np.subtract(rounded, offset, out=rounded)
                values = np.subtract(values, rounded, out=rounded)
                rounded, other = other, rounded
                bound = unit - 1

    def _add_large(self, values: Array, scale_bits: int) -> None:
        """Add numbers of which some are large, infinite or NaN."""
        for number, is_odd in enumerate((values == inf, values == -inf, np.isnan(values))):
            self._odd[number] += np.count_nonzero(is_odd)
        finite = values[np.isfinite(values)]
        is_large = np.abs(finite) >= _LARGE
        self._add_block(finite[~is_large], scale_bits)
        self._add_block(np.ldexp(finite[is_large], -_SCALE_BITS), scale_bits + _SCALE_BITS)


@np.errstate(all="ignore")
def exact_sums(name: str, *cells: Array) -> list[ExactSum]:
    """Return the exact sums of "sum", "norm" or "dot" over a rank's cells: of real numbers, or of both parts.

    The addends of a norm are the squares, and of a dot product the products, of real and imaginary parts. Each is
    rounded to float64.
    """
    first, second = cells[0], cells[-1]
    is_complex = "c" in (first.dtype.kind, second.dtype.kind)
    totals = [ExactSum() for _ in range(2 if is_complex and name != "norm" else 1)]
    scratch = np.empty(min(MOST, first.size))

    def add(part: int, function: np.ufunc, *operands: Array) -> None:
        addends = scratch[: operands[0].size].reshape(operands[0].shape)
        totals[part].add(function(*operands, out=addends, dtype="f8").reshape(-1))

    for index in blocks(first.shape, MOST):
        a, b = first[index], second[index]
        parts = [a.real, a.imag] if is_complex else [a]
        if name == "sum":
            for number, part in enumerate(parts):
                if part.dtype == "f8" and part.flags.c_contiguous:
                    totals[number].add(part.reshape(-1))
                else:
                    add(number, np.positive, part)
        elif name == "norm":
            for part in parts:
                add(0, np.square, part)
        else:
            add(0, np.multiply, a.real, b.real)
            if is_complex:
                add(0, np.multiply, a.imag, b.imag)
                add(1, np.multiply, a.real, b.imag)
                add(1, np.multiply, -a.imag, b.real)
    return totals


@np.errstate(all="ignore")
def fold_exactly(total: Array, values: Sequence[Array]) -> None:
    """Add arrays element by element, and round each sum once; ``total`` may be one of the arrays.

    Two doubles hold the exact sum of most elements: the rounded sum, and the sum of its errors. The remaining elements
    are added as integers.
    """
    if total.dtype.kind == "c":
        for part in ("real", "imag"):
            fold_exactly(getattr(total, part), [getattr(each, part) for each in values])
        return
    sums, errors = values[0].astype("f8"), np.zeros(total.shape)
    for each in values[1:]:
        sums, error = _two_sum(sums, each.astype("f8"))
        errors, rest = _two_sum(errors, error)
        sums[rest != 0] = nan
    result = sums + errors
    for index in np.flatnonzero(~np.isfinite(result)):
        exact = ExactSum()
        exact.add(np.array([each[index] for each in values], "f8"))
        result[index] = exact.rounded()
    total[...] = result


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rounded sum and its error (Knuth, The Art of Computer Programming, volume 2, 4.2.2, theorem B)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)
