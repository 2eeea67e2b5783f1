"""Checkerboards: the cells of one parity of a grid, stored in pairs along the last axis.

The parity of a cell is the parity of the sum of its global coordinates. The cells ``2 k`` and ``2 k + 1`` along the
last axis are a pair. One cell of each pair has a given parity, and a field of this parity stores the cell at index
``k``. The other coordinates are the cell's row, and the row determines whether the first or the second cell is stored.
So if a range of cells cuts a pair in two, only every second row has a cell of this pair in the range::

    cells of the last axis   -4  -3  -2  -1 |  0   1   2   3
    row 0, even cells         E   .   E   . |  E   .   E   .       a low halo of 3 cells:  1 cell
    row 1, even cells         .   E   .   E |  .   E   .   E                               2 cells
    index in pairs           -2  -2  -1  -1 |  0   0   1   1

Rows of one parity are boxes with a step of two along each of the other axes. Blocks begin and end at even cells along
the last axis, so the cells that a rank owns are a box. All extents are even, so the parity also alternates across the
ends of periodic axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal

from halox.decomposition.axis_layout import Box
from halox.decomposition.partition import AxisPartition
from halox.errors import DecompositionError

Parity = Literal["even", "odd"]

PARITIES: tuple[Parity, ...] = ("even", "odd")
"""Parities; the index is the sum of a cell's coordinates modulo 2."""


def check_extents_even(grid_shape: tuple[int, ...]) -> None:
    """Raise `DecompositionError` for a grid with an odd extent."""
    for index, cells in enumerate(grid_shape):
        if cells % 2:
            near = f"{cells - 1} or {cells + 1}" if cells > 1 else "2"
            raise DecompositionError(
                f"grid_shape[{index}]: a checkerboard needs an even number of cells along every axis, got {cells} in "
                f"{grid_shape}; make it {near}"
            )


def check_checkerboard(axes: Sequence[AxisPartition]) -> None:
    """Raise `DecompositionError` unless all extents are even, and blocks along the last axis begin at even cells.

    Either all ranks raise, or no rank does.
    """
    check_extents_even(tuple(axis.cells for axis in axes))
    last = axes[-1]
    for part, bound in enumerate(last.bounds):
        if bound % 2:
            raise DecompositionError(
                f"blocks[{len(axes) - 1}]: on a checkerboard, blocks along the last axis must begin at even "
                f"cells, and part {part} begins at cell {bound} (blocks of {last.sizes} cells); make the grid with "
                "checkerboard=True, and with blocks= of even numbers if you give any"
            )


def parity_boxes(parity: Parity, starts: Sequence[int], subsizes: Sequence[int]) -> Iterator[Box]:
    """Yield boxes that together hold every cell of one parity in a box of cells once.

    ``starts`` are the global coordinates of the given box's first cell, ``subsizes`` its cells along every axis. The
    yielded boxes have global indices; along the last axis the indices count pairs. The first yielded box holds the
    pairs that all rows have, if there are any. Each further box holds one more cell of every second row. The order and
    the shapes depend on ``subsizes`` and on ``starts`` modulo 2, so sender and receiver have the same order.

    Examples
    --------
    >>> for box in parity_boxes("even", (0, -3), (4, 3)):
    ...     print(box.starts, box.subsizes, box.steps)
    (0, -1) (4, 1) None
    (1, -2) (2, 1) (2, 1)
    """
    *outer, first = starts
    *rows, cells = subsizes
    if 0 in subsizes:
        return
    end, wanted = first + cells, PARITIES.index(parity)
    # Pairs in rows that store the first cell of each pair, and in rows that store the second cell.
    ranges = [(-((rest - first) // 2), -((rest - end) // 2)) for rest in (0, 1)]
    if not outer:
        begin, stop = ranges[wanted]
        if begin < stop:
            yield Box((begin,), (stop - begin,), None)
        return
    begin, stop = max(low for low, _ in ranges), min(high for _, high in ranges)
    if begin < stop:
        yield Box((*outer, begin), (*rows, stop - begin), None)
    for rest, (low, high) in enumerate(ranges):
        for at, past in ((low, begin), (max(stop, begin), high)):
            if at >= past:
                continue
            for shift in product((0, 1), repeat=len(outer)):
                if (sum(outer) + sum(shift) + rest - wanted) % 2:
                    continue
                sizes = [(n - skip + 1) // 2 for n, skip in zip(rows, shift, strict=True)]
                if 0 not in sizes:
                    corner = [start + skip for start, skip in zip(outer, shift, strict=True)]
                    yield Box((*corner, at), (*sizes, past - at), (2,) * len(outer) + (1,))
