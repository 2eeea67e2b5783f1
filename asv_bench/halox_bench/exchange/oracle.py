"""Contents of every cell after a periodic halo exchange, in closed form, on NumPy and CuPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from halox_bench.common.exact import as_values, modulus_of
from halox_bench.exchange.cases import Neighbourhood

_STEPS = (10007, 40009, 70001, 130003)
"""Increments of a cell's number for a step along each axis, the innermost first."""

_FIELD_STEP = 7919
_ROUND_STEP = 31
_CHUNK_CELLS = 1 << 22


class Oracle:
    """Fills a rank's fields with distinct numbers, and counts the wrong cells after an exchange.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``.

    Notes
    -----
    Not collective. On a GPU the work goes to CuPy's current stream.
    """

    def __init__(self, near: Neighbourhood, xp: Any = np) -> None:
        self._case, self._xp = near.case, xp
        self._modulus = modulus_of(near.case.dtype)
        self._axes = [
            self._axis(axis, near.coords[axis], near.proc_shape[axis])
            for axis in range(near.case.ndim)
        ]

    def _axis(self, axis: int, coord: int, parts: int) -> tuple[Any, Any]:
        """Return each index's share of the cell's number, and whether it is outside of the block."""
        case, xp = self._case, self._xp
        n, halo = case.shape[axis], case.halo
        local = xp.arange(-halo, n + halo)
        outside = ((local < 0) | (local >= n)).astype(np.int32)
        # The halo along an axis without exchange belongs to no cell.
        outside *= 1 if axis in case.along else 2 * case.ndim
        share = (coord * n + local) % (parts * n) * _STEPS[case.ndim - 1 - axis]
        return share % self._modulus, outside

    def fill(self, fields: Sequence[Any], step: int = 0) -> None:
        """Fill the owned cells with numbers, and the halo with a number that no cell has."""
        for number, field in enumerate(fields):
            for at, numbers, outside in self._chunks(number, step):
                field[at] = self._values(self._xp.where(outside == 0, numbers, self._modulus))

    def wrong(self, fields: Sequence[Any], step: int = 0) -> int:
        """Count the wrong values after an exchange, owned cells included."""
        reach = self._case.ndim if self._case.corners else 1
        found = 0
        for number, field in enumerate(fields):
            for at, numbers, outside in self._chunks(number, step):
                wanted = self._values(self._xp.where(outside <= reach, numbers, self._modulus))
                found += int(self._xp.count_nonzero(field[at] != wanted))
        return found

    def _chunks(self, field: int, step: int) -> Iterator[tuple[slice, Any, Any]]:
        """Yield slices of the first axis with their cells' numbers, and how many axes leave the block."""
        case = self._case
        inner = prod(n + 2 * case.halo for n in case.shape[1:])
        planes, total = max(1, _CHUNK_CELLS // inner), case.shape[0] + 2 * case.halo
        for start in range(0, total, planes):
            at = slice(start, min(start + planes, total))
            numbers = self._summed(lambda axis: self._axes[axis][0], at)
            numbers += field * _FIELD_STEP + step * _ROUND_STEP
            yield at, numbers % self._modulus, self._summed(lambda axis: self._axes[axis][1], at)

    def _summed(self, part: Callable[[int], Any], at: slice) -> Any:
        ndim = self._case.ndim
        total: Any = 0
        for axis in range(ndim):
            values = part(axis)[at] if axis == 0 else part(axis)
            total = total + values.reshape((1,) * axis + (-1,) + (1,) * (ndim - 1 - axis))
        return total

    def _values(self, numbers: Any) -> Any:
        """Turn numbers into the field's values, components included; the modulus belongs to no cell."""
        xp, case = self._xp, self._case
        if case.components:
            count = prod(case.components)
            other = xp.arange(count).reshape(case.components)
            numbers = numbers.reshape(numbers.shape + (1,) * len(case.components))
            numbers = xp.where(numbers == self._modulus, numbers, (numbers + other) % self._modulus)
        return as_values(numbers, case.dtype)
