"""Cells of a transpose by their global indices, turned by NumPy's own transpose, on NumPy and CuPy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from halox_bench.common.exact import as_values, modulus_of
from halox_bench.transpose.cases import TransposeCase
from halox_bench.transpose.pieces import Slices

_STEPS = (130003, 70001, 40009, 10007)
"""Increments of a cell's number for a step along each axis."""

_ROUND_STEP = 31
_COMPONENT_STEP = 7
_CHUNK_CELLS = 1 << 22


class TransposeOracle:
    """Fills a rank's source, and counts the values of the target that differ from the transposed source.

    Parameters
    ----------
    source, target : tuple of slice
        This rank's cells, as global indices along the axes of each side.
    xp : module
        ``numpy`` or ``cupy``.

    Notes
    -----
    Not collective. On a GPU the work goes to CuPy's current stream.
    """

    def __init__(self, case: TransposeCase, source: Slices, target: Slices, xp: Any = np) -> None:
        self._case, self._xp = case, xp
        self._source, self._target = source, target
        self._modulus = modulus_of(case.dtype)

    def fill(self, source: Any, target: Any, step: int) -> None:
        """Fill the source with the numbers of a step, and the target with a number that no cell has."""
        for at, cells in _chunks(self._source):
            source[at] = self._values(cells, step)
        target[...] = self._modulus

    def wrong(self, target: Any, step: int) -> int:
        """Count the values of the target that are wrong after a step."""
        axes, ndim = self._case.source_axes, self._case.ndim
        back = [axes.index(axis) for axis in range(ndim)]
        behind = range(ndim, ndim + len(self._case.components))
        found = 0
        for at, cells in _chunks(self._target):
            numbers = self._values(tuple(cells[k] for k in back), step)
            found += int(self._xp.count_nonzero(target[at] != numbers.transpose(*axes, *behind)))
        return found

    def _values(self, cells: Slices, step: int) -> Any:
        """Return the values of cells of the source, components behind them."""
        xp, case = self._xp, self._case
        total: Any = step * _ROUND_STEP
        for axis, (part, increment) in enumerate(zip(cells, _STEPS, strict=False)):
            along = xp.arange(part.start, part.stop) * increment % self._modulus
            total = total + along.reshape((-1,) + (1,) * (case.ndim - 1 - axis)).astype(np.int32)
        if case.components:
            others = xp.arange(prod(case.components), dtype=np.int32) * _COMPONENT_STEP
            total = total.reshape(total.shape + (1,) * len(case.components))
            total = total + others.reshape(case.components)
        return as_values(total % self._modulus, case.dtype)


def _chunks(block: Slices) -> Iterator[tuple[slice, Slices]]:
    """Yield slices of a block's first axis, with the global indices of their cells."""
    first, *others = block
    planes = max(1, _CHUNK_CELLS // prod(part.stop - part.start for part in others))
    for start in range(first.start, first.stop, planes):
        stop = min(start + planes, first.stop)
        yield (
            slice(start - first.start, stop - first.start),
            (slice(start, stop), *others),
        )
