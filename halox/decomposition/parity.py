"""Checkerboards: the cells of one parity of a grid, stored in pairs along the last axis.

A cell is even or odd as the sum of its global coordinates is. Of the cells ``2 k`` and ``2 k + 1`` of a pair along the
last axis, one is of a given parity, and the array holds it at index ``k``; which one depends on the row, the cell's
other coordinates. So a range of cells that cuts pairs in two holds one cell more of every second row::

    cells of the last axis   -4  -3  -2  -1 |  0   1   2   3
    row 0, even cells         E   .   E   . |  E   .   E   .       a low halo of 3 cells:  1 cell
    row 1, even cells         .   E   .   E |  .   E   .   E                               2 cells
    index in pairs           -2  -2  -1  -1 |  0   0   1   1

Rows of one parity are boxes of every second index along each of the other axes. Blocks begin and end at even cells
along the last axis, so that what a rank owns is a box; extents are even, so that parity alternates across the ends of
periodic axes too.
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
"""Parities, each at the remainder by two of the sum of a cell's coordinates."""


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

    Alike on all ranks.
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
    """Yield boxes that hold each cell of one parity in a box of cells once.

    Their indices are global, along the last axis those of pairs.
    The first one holds what all rows have, unless that is nothing; the others hold one more cell of every second row.
    Their order and shapes depend on ``starts`` modulo 2 only, so that both ends of a message order them alike.
    ``starts`` are the global coordinates of the box's first cell, ``subsizes`` its cells along every axis.

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
    # Of rows that hold the first cells of pairs, and of rows that hold the second.
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
