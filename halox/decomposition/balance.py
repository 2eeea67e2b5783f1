"""Balanced blocks: cuts along the axes that make the largest work of a block small; see ``weights`` of `halox.Grid`.

The work of a block is the sum of its cells' weights. The best cuts of one axis, with the cuts of the other axes fixed,
are found by bisection: `_cuts_within` makes blocks as large as a bound of the work allows. The best cuts of several
axes at once are an NP-hard problem, so `_Works.best` improves one axis after another until nothing changes (Nicol 1994,
"Rectilinear partitioning of irregular data parallel computations"), from several starts. Begin with `balanced`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from halox.decomposition.partition import AxisPartition
from halox.decomposition.procgrid import AxisToCut, cells_sent
from halox.values import rounded_up

_Bounds: TypeAlias = tuple[int, ...]

# Starts beside even cuts, and most blocks of all these starts. With 8 of them 337 of 340 masks of 14 x 13 and 24 x 23
# cells, in 2 x 2 to 4 x 4 blocks, came within 5 % of the best cuts; on 16 x 16 blocks all starts ended alike.
_RANDOM_STARTS, _RANDOM_BLOCKS = 8, 256
# Process grids that are refined from all starts, of those that cost least from even cuts.
_REFINED = 3
# Relative accuracy of the largest work.
_ACCURACY = 1e-4


class Balance(NamedTuple):
    """Sizes of blocks per axis; the largest work of a block divided by the mean, of these and of even blocks."""

    blocks: tuple[tuple[int, ...], ...]
    imbalance: float
    even: float

    def text(self) -> str:
        """Return both numbers in words."""
        return f"weights: the largest block has {self.imbalance:.2f} of the mean work, {self.even:.2f} in even blocks"


def balanced(
    weights: npt.NDArray[Any],
    axes: Sequence[AxisToCut],
    proc_shapes: Sequence[tuple[int, ...]],
    even: tuple[int, ...],
    block_cells: int,
) -> Balance:
    """Return blocks of about equal work, on the process grid of least cost.

    The cost of a process grid is the largest work of a block, in cells of the mean weight above 0, plus the cells that
    `choose_proc_shape` counts. ``weights`` are finite and at least 0, with a sum above 0. An extent of 1 stands for
    equal weights along the axis. ``even`` is the process grid of the even division to compare with.

    Examples
    --------
    >>> axes = [AxisToCut(0, 10, (1, 1), (1, 1), False)]
    >>> balanced(np.array([0, 0, 0, 0, 0, 0, 0, 0, 1, 1]), axes, [(2,)], (2,), 0)
    Balance(blocks=((9, 1),), imbalance=1.0, even=2.0)
    """
    works = _Works(weights, axes)
    total = works.of_blocks(works.even([1] * len(axes))).max()
    cells = np.count_nonzero(weights) * (math.prod(axis.cells for axis in axes) / weights.size)

    def divided(procs: tuple[int, ...], random_starts: int) -> tuple[float, float, Any]:
        largest, cuts = works.best(procs, random_starts)
        blocks = tuple(tuple(np.diff(bounds).tolist()) for bounds in cuts)
        sent = cells_sent(axes, blocks, block_cells)
        return largest / total * cells + sent, largest, blocks

    if len(proc_shapes) > _REFINED:
        proc_shapes = sorted(proc_shapes, key=lambda procs: divided(procs, 0)[0])[:_REFINED]
    random_starts = min(_RANDOM_STARTS, _RANDOM_BLOCKS // math.prod(even))
    found = [divided(procs, random_starts) for procs in proc_shapes]
    _, largest, blocks = min(found, key=lambda one: one[0])
    before = works.of_blocks(works.even(even)).max()
    return Balance(blocks, *(float(work * math.prod(even) / total) for work in (largest, before)))


class _Works:
    """Work of blocks, by prefix sums of the weights along the axes on which they depend."""

    def __init__(self, weights: npt.NDArray[Any], axes: Sequence[AxisToCut]) -> None:
        self._axes = axes
        self._varying = [axis for axis, extent in enumerate(weights.shape) if extent > 1]
        self._sums = np.zeros([extent + (extent > 1) for extent in weights.shape])
        inner = self._sums[tuple(slice(extent > 1, None) for extent in weights.shape)]
        np.divide(weights, float(weights.max()), out=inner)
        for axis in self._varying:
            np.cumsum(inner, axis, out=inner)

    def even(self, procs: Sequence[int]) -> list[_Bounds]:
        """Return the cuts of an even division."""
        return [
            AxisPartition.even(axis.cells, parts, axis.periodic, axis.unit).bounds
            for axis, parts in zip(self._axes, procs, strict=True)
        ]

    def of_blocks(self, cuts: Sequence[_Bounds], along: int | None = None) -> Any:
        """Return the works of all blocks; with an axis, prefix sums along it, as its last, of the others' strips."""
        sums = self._sums
        for axis, bounds in enumerate(cuts):
            if axis not in self._varying:
                sums = sums * np.diff(bounds).reshape([-1] + [1] * (len(cuts) - axis - 1))
            elif axis != along:
                sums = np.diff(np.take(sums, bounds, axis), axis=axis)
        return sums if along is None else np.moveaxis(sums, along, -1)

    def best(self, procs: tuple[int, ...], random_starts: int) -> tuple[float, list[_Bounds]]:
        """Return the smallest largest work of a block that descents from all starts find, and its cuts."""
        even, random, found = self.even(procs), np.random.default_rng(0), []
        order = [axis for axis in self._varying if procs[axis] > 1]
        if len(order) < 2:
            random_starts = 0  # the best cuts of a single axis are found from any start
        for number in range(1 + random_starts):
            start = [*even]
            for axis in order if number else ():
                least, cells = self._least(axis, procs[axis]), self._axes[axis].cells
                inner = random.choice(cells // least - 1, procs[axis] - 1, replace=False) + 1
                start[axis] = (0, *(np.sort(inner) * least).tolist(), cells)
            found += [self._descend([*start], along) for along in (order, order[::-1])]
        return min(found)

    def _descend(self, cuts: list[_Bounds], order: list[int]) -> tuple[float, list[_Bounds]]:
        """Return the largest work and the cuts after improving the axes in turn, until the work stays the same."""
        largest, before = self.of_blocks(cuts).max(), math.inf
        while largest < before * (1 - _ACCURACY):
            before = largest
            for axis in order:
                unit, parts = self._axes[axis].unit, len(cuts[axis]) - 1
                sums = self.of_blocks(cuts, axis)[..., ::unit]
                # Differences of sums may be negative by rounding.
                rows = np.maximum.accumulate(sums.reshape(-1, sums.shape[-1]), axis=1)
                bounds = tuple(bound // unit for bound in cuts[axis])
                bounds, largest = _best_along(rows, bounds, self._least(axis, parts) // unit)
                cuts[axis] = tuple(bound * unit for bound in bounds)
        return largest, cuts

    def _least(self, axis: int, parts: int) -> int:
        """Cells of the smallest block: as wide as the halo, if the axis has enough cells, in whole units."""
        along = self._axes[axis]
        least = rounded_up(max(1, *along.halo), along.unit)
        return least if least * parts <= along.cells else along.unit


def _best_along(rows: Any, cuts: tuple[int, ...], least: int) -> tuple[tuple[int, ...], float]:
    """Return the cuts of an axis with the smallest largest work, and this work; the given cuts if none are better.

    Blocks have at least ``least`` units. The cuts are the optimum, unless ``least`` adjacent units have more work than
    its blocks.
    """
    parts = len(cuts) - 1
    high = np.diff(rows[:, cuts]).max()
    low = max(rows[:, -1].max() / parts, (rows[:, least:] - rows[:, :-least]).max())
    lists, bound = rows[rows[:, -1] > 0].tolist(), low
    while low < high * (1 - _ACCURACY):
        found = _cuts_within(bound, lists, parts, least)
        if found is None:
            low = bound
        elif (largest := np.diff(rows[:, found]).max()) < high:
            cuts, high = found, largest
        else:
            break  # by rounding
        bound = (low + high) / 2
    return cuts, float(high)


def _cuts_within(
    bound: float, rows: list[list[float]], parts: int, least: int
) -> tuple[int, ...] | None:
    """Return cuts into blocks of at most ``bound`` work, as even as possible; None if there are none.

    The work of ``least`` adjacent units is at most ``bound``, so that a block can begin anywhere.
    """
    units = len(rows[0]) - 1
    lowest = [units]  # the lowest cuts that allow the blocks above them, from the high end
    for part in range(parts - 1, -1, -1):
        end = lowest[-1]
        start = max(bisect_left(row, row[end] - bound, 0, end) for row in rows)
        start = max(start, part * least)
        if start > (end - least if part else 0):
            return None
        lowest.append(start)
    cuts = [0]
    for part in range(1, parts):
        start = cuts[-1]
        highest = min(bisect_right(row, row[start] + bound, start) - 1 for row in rows)
        highest = min(highest, units - (parts - part) * least)
        cuts.append(max(min(highest, part * units // parts), lowest[parts - part], start + least))
    return (*cuts, units)
