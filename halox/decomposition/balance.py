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
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from halox.decomposition.partition import AxisPartition
from halox.decomposition.procgrid import AxisToCut

_Bounds: TypeAlias = tuple[int, ...]  # of blocks, in units of cells that stay in one block

# Starts beside even cuts, at most, and blocks of all of them. With 8 starts 337 of 340 masks of 14 x 13 and 24 x 23
# cells, in 2 x 2 to 4 x 4 blocks, came within 5 % of the best cuts; in 16 x 16 blocks all starts ended alike.
_RANDOM_STARTS, _RANDOM_BLOCKS = 8, 256
_ACCURACY = 1e-4  # relative, of the largest work


class Balance(NamedTuple):
    """Sizes of blocks per axis; the largest work of a block divided by the mean, of these and of even blocks."""

    blocks: tuple[tuple[int, ...], ...]
    imbalance: float
    even: float


def balanced(
    weights: npt.NDArray[Any],
    axes: Sequence[AxisToCut],
    proc_shapes: Sequence[tuple[int, tuple[int, ...]]],
) -> Balance:
    """Return blocks of about equal work, on the process grid of least cost.

    ``proc_shapes`` are the cells sent and the process grid of even divisions, of which the first is compared. The cost
    is the largest work of a block, in cells of the mean weight above 0, and the cells sent. ``weights`` are finite and
    at least 0, and not all 0. An extent of 1 stands for equal weights along the axis.

    Examples
    --------
    >>> axes = [AxisToCut(0, 10, (1, 1), (1, 1), False)]
    >>> balanced(np.array([0, 0, 0, 0, 0, 0, 0, 0, 1, 1]), axes, [(0, (2,))])
    Balance(blocks=((9, 1),), imbalance=1.0, even=2.0)
    """
    works, first = _Works(weights, axes), proc_shapes[0][1]
    total, even = (works.of_blocks(works.even(procs)).max() for procs in ([1] * len(axes), first))
    cells = np.count_nonzero(weights) / weights.size * math.prod(axis.cells for axis in axes)
    random_starts, found = min(_RANDOM_STARTS, _RANDOM_BLOCKS // math.prod(first)), []
    for sent, procs in proc_shapes:
        largest, cuts = works.best(procs, random_starts)
        found.append((round(largest / total * cells) + sent, largest, cuts))
    _, largest, cuts = min(found, key=itemgetter(0))
    pairs = zip(axes, cuts, strict=True)
    blocks = tuple(tuple((np.diff(bounds) * axis.unit).tolist()) for axis, bounds in pairs)
    return Balance(blocks, *(float(work * math.prod(first) / total) for work in (largest, even)))


class _Works:
    """Work of blocks, by prefix sums of the weights along the axes on which they depend."""

    def __init__(self, weights: npt.NDArray[Any], axes: Sequence[AxisToCut]) -> None:
        self._axes = axes
        self._varying = [axis for axis, extent in enumerate(weights.shape) if extent > 1]
        sums = np.zeros([extent + (extent > 1) for extent in weights.shape])
        inner = sums[tuple(slice(extent > 1, None) for extent in weights.shape)]
        np.divide(weights, float(weights.max()), out=inner)
        for axis in self._varying:
            np.cumsum(inner, axis, out=inner)
        self._sums = sums[tuple(slice(None, None, axis.unit) for axis in axes)]

    def even(self, procs: Sequence[int]) -> list[_Bounds]:
        """Return the cuts of an even division."""
        pairs = zip(self._axes, procs, strict=True)
        return [AxisPartition.even(a.cells // a.unit, parts, False).bounds for a, parts in pairs]

    def of_blocks(self, cuts: Sequence[_Bounds], along: int | None = None) -> Any:
        """Return the works of all blocks, or prefix sums along an axis of all strips in the cuts of the other axes."""
        sums = self._sums
        for axis, bounds in enumerate(cuts):
            if axis not in self._varying:
                sums = sums * np.diff(bounds).reshape([-1] + [1] * (len(cuts) - axis - 1))
            elif axis != along:
                sums = np.diff(np.take(sums, bounds, axis), axis=axis)
        if along is not None:
            sums = np.moveaxis(sums, along, -1).reshape(-1, sums.shape[along])
        return sums

    def best(self, procs: tuple[int, ...], random_starts: int) -> tuple[float, list[_Bounds]]:
        """Return the smallest largest work of a block that descents from all starts find, and its cuts."""
        even, random = self.even(procs), np.random.default_rng(0)
        order = [axis for axis in self._varying if procs[axis] > 1]
        if len(order) < 2:
            random_starts = 0  # even cuts also lead to the optimum of a single axis
        starts = [even]
        for _ in range(random_starts):
            starts.append([*even])
            for axis in order:
                units, least = even[axis][-1], self._least(axis, even[axis])
                inner = random.choice(units // least - 1, procs[axis] - 1, replace=False) + 1
                starts[-1][axis] = (0, *(np.sort(inner) * least).tolist(), units)
        found = [self._descend([*s], along) for s in starts for along in (order, order[::-1])]
        return min(found, key=itemgetter(0))

    def _descend(self, cuts: list[_Bounds], order: list[int]) -> tuple[float, list[_Bounds]]:
        """Improve one axis after another until the largest work stays the same; return this work and the cuts."""
        largest, before = float(self.of_blocks(cuts).max()), math.inf
        while largest < before * (1 - _ACCURACY):
            before = largest
            for axis in order:
                # Differences of sums may be negative by rounding.
                rows = np.maximum.accumulate(self.of_blocks(cuts, axis), axis=1)
                least = self._least(axis, cuts[axis])
                largest, cuts[axis] = _best_along(rows, cuts[axis], least)
        return largest, cuts

    def _least(self, axis: int, bounds: _Bounds) -> int:
        """Return the units of the smallest block: as wide as the halo, if the axis has enough."""
        least = -(-max(1, *self._axes[axis].halo) // self._axes[axis].unit)
        return least if least * (len(bounds) - 1) <= bounds[-1] else 1


def _best_along(rows: Any, cuts: _Bounds, least: int) -> tuple[float, _Bounds]:
    """Return the smallest largest work of blocks along an axis, and their cuts; the given cuts if none are better.

    ``rows`` are prefix sums, and blocks have at least ``least`` units. The work is the minimum, unless ``least``
    adjacent units have more.
    """
    parts = len(cuts) - 1
    high = float(np.diff(rows[:, cuts]).max())
    low = float(max(rows[:, -1].max() / parts, (rows[:, least:] - rows[:, :-least]).max()))
    lists, bound = rows[rows[:, -1] > 0].tolist(), low
    while low < high * (1 - _ACCURACY):
        found = _cuts_within(bound, lists, parts, least)
        if found is None:
            low = bound
        elif (largest := float(np.diff(rows[:, found]).max())) < high:
            cuts, high = found, largest
        else:
            break  # by rounding
        bound = (low + high) / 2
    return high, cuts


def _cuts_within(bound: float, rows: list[list[float]], parts: int, least: int) -> _Bounds | None:
    """Return cuts into blocks of at most ``bound`` work, as even as possible; None if there are none.

    The work of ``least`` adjacent units is at most ``bound``, so that a block can begin anywhere.
    """
    units = len(rows[0]) - 1
    lowest = [units]  # the lowest cuts that leave few enough blocks above them, from the high end
    for part in range(parts - 1, -1, -1):
        end = lowest[-1]
        start = max(bisect_left(row, row[end] - bound, 0, end) for row in rows)
        lowest.append(max(start, part * least))
        if lowest[-1] > (end - least if part else 0):
            return None
    cuts = [0]
    for part in range(1, parts):
        start = cuts[-1]
        highest = min(bisect_right(row, row[start] + bound, start) - 1 for row in rows)
        highest = min(highest, units - (parts - part) * least)
        cuts.append(max(min(highest, part * units // parts), lowest[parts - part], start + least))
    return (*cuts, units)
