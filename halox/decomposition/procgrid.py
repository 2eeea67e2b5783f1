"""Process grid: the number of ranks along each axis, chosen for the fastest exchange of halos.

A rank has a block of ``n`` cells along an axis and fills ``w`` halo cells along this axis for the
parts below and above. Over all directions, corners included, the rank fills
``prod(n + w) - prod(n)`` cells. Along a periodic axis with one rank, it fills its own halo with
local copies, without messages. These copies have ``prod(n + w where one rank, n elsewhere) - prod(n)``
cells. The rank therefore sends

    prod(n + w) - prod(n + w where one rank, n elsewhere)

cells to other ranks. Each contiguous block of memory takes time, too, in messages as in local copies. Along the
innermost axis there is a block for each row of cells and each side; along the other axes a block is a whole row. Over
all directions there are

    prod(n + w, outer axes) - prod(n, outer axes) + prod(n + w, outer axes) * sides along the innermost axis

blocks. The process grid minimises cells sent + `block_cells` * blocks for the rank with the largest sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import numpy as np

from halox.decomposition.normalise import Halo
from halox.decomposition.partition import AxisPartition
from halox.errors import DecompositionError

# Extra time of a contiguous block of memory, in float64 cells of rows sent to another rank of the node. Measured by
# faces in blocks of 8 bytes beside faces in rows (docs/performance/log.md): 0.2 to 4 on two H200, with a median of 1.7,
# and 2 to 3 on CPUs.
_BLOCK_CELLS = {"cpu": 3, "gpu": 1}

# Number of workable process grids that an error suggests.
_SUGGESTIONS = 3


def proc_shapes(
    ranks: int,
    shape: tuple[int, ...],
    halo: Halo,
    periodic: tuple[bool, ...],
    given: tuple[int, ...],
    blocks: Sequence[tuple[int, ...] | None],
    units: Sequence[int],
    block_cells: int,
) -> tuple[tuple[AxisToCut, ...], list[tuple[int, tuple[int, ...]]]]:
    """Return the axes, and costs and process grids: cells that the busiest rank sends, and its blocks of memory.

    The process grid to choose comes first. The product is ``ranks``. ``given`` has the ranks of each axis, and 0 for an
    axis to choose. Every block is at least as wide as the halos that it fills, if a process grid has such blocks.
    Narrower blocks need more messages. Of equal process grids, the grid with fewer cells copied within a rank comes
    first, then the grid with more ranks along the outermost axes, because the faces of these axes have the longest
    contiguous runs of memory. If all halo widths are 0, process grids are compared for a width of 1, because a field
    may have its own halo. ``units`` are the cells per axis that stay in one block. A contiguous block of memory counts
    as ``block_cells`` more cells.

    Raises `DecompositionError` if no process grid fits. The error lists workable process grids, if there are any.

    Examples
    --------
    >>> plane = (64, 64), ((1, 1), (1, 1)), (True, True), (0, 0), (None, None), (1, 1)
    >>> for block_cells in (0, 3):
    ...     proc_shapes(12, *plane, block_cells)[1][0]
    (80, (4, 3))
    (174, (6, 2))
    """
    counted = counted_halo(halo)
    axes = tuple(map(AxisToCut, range(len(shape)), shape, halo, counted, periodic, blocks, units))
    of_any_width = tuple(replace(axis, halo=(0, 0)) for axis in axes)
    for some in (axes, of_any_width):
        if workable := _workable(some, ranks, given):
            return axes, _by_cost(axes, workable, block_cells)
    raise DecompositionError(_refusal(of_any_width, ranks, given))


def block_cells(device: Literal["cpu", "gpu"], has_network: bool) -> int:
    """Cells that take as long as a block of memory; between nodes the bytes alone count."""
    return 0 if has_network else _BLOCK_CELLS[device]


def counted_halo(halo: Halo) -> Halo:
    """Halo widths for comparing decompositions: 1 everywhere if all widths are 0."""
    return halo if any(map(any, halo)) else ((1, 1),) * len(halo)


@dataclass(frozen=True)
class AxisToCut:
    """One grid axis, to be cut into ``blocks``, or evenly into any number of parts of whole units.

    Every block must be at least as wide as the ``halo`` that it fills.
    """

    index: int
    cells: int
    halo: tuple[int, int]
    counted: tuple[int, int]
    periodic: bool
    blocks: tuple[int, ...] | None = None
    unit: int = 1

    def fits(self, parts: int) -> bool:
        if self.blocks is not None:
            if parts != len(self.blocks):
                return False
            cut = AxisPartition.from_blocks(self.blocks, self.periodic)
        else:
            units = self.cells // self.unit // parts
            if units * self.unit >= max(1, *self.halo):
                return True
            if units == 0 or (parts > 1 and (units + 1) * self.unit < max(self.halo)):
                return False
            cut = AxisPartition.even(self.cells, parts, self.periodic, self.unit)
        return all(
            limit is None or width <= limit
            for width, limit in zip(self.halo, cut.width_limits(), strict=True)
        )

    def loads(self, parts: Any) -> list[tuple[Any, Any]]:
        """Owned cells, and halo cells filled in other parts, of all parts that may be the busiest.

        ``parts`` is an array of numbers of parts, and so are the cells: 0 if there is no such part.
        """
        low, high = self.counted
        # A part fills the low halo of the part above it, and the high halo of the part below it.
        if self.blocks is not None:
            last = len(self.blocks) - 1
            pairs = {
                (size, low * (self.periodic or n < last) + high * (self.periodic or n > 0))
                for n, size in enumerate(self.blocks)
            }
            return [
                (size, width)
                for size, width in sorted(pairs)
                if not any(size <= n and width <= w for n, w in pairs - {(size, width)})
            ]
        units = self.cells // self.unit
        size, extra = units // parts, units % parts
        first = self.unit * (size + (extra > 0))
        if self.periodic:
            return [(first, low + high)]
        # The second part is as large as any part with a part on either side.
        middle, last = (
            self.unit * (size + (extra > 1)) * (parts > 2),
            self.unit * size * (parts > 1),
        )
        return [
            (first, low * (parts > 1)),
            (middle, (low + high) * (parts > 2)),
            (last, high * (parts > 1)),
        ]


def _workable(
    axes: Sequence[AxisToCut], ranks: int, given: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Return every usable process grid for ``ranks`` that agrees with ``given``."""
    if ranks > _most_ranks(axes):
        return []
    small = [parts for parts in range(1, math.isqrt(ranks) + 1) if ranks % parts == 0]
    divisors = sorted({*small, *(ranks // parts for parts in small)})
    *choices, last = (
        [parts for parts in divisors if want in (0, parts) and axis.fits(parts)]
        for axis, want in zip(axes, given, strict=True)
    )
    return [
        (*procs, rest)
        for procs in product(*choices)
        if ranks % (known := math.prod(procs)) == 0 and (rest := ranks // known) in last
    ]


def _most_ranks(axes: Sequence[AxisToCut]) -> int:
    """Return the number of ranks with the narrowest blocks, of any width."""
    return math.prod(len(axis.blocks or range(axis.cells // axis.unit)) for axis in axes)


def _by_cost(
    axes: Sequence[AxisToCut], workable: list[tuple[int, ...]], block_cells: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Return the process grids and their costs, from the least cost.

    The cost is most cells that a rank sends, with its blocks of memory, then most cells copied within a rank, then cuts
    of inner axes.
    """
    most = math.prod(axis.cells + sum(axis.counted) for axis in axes) * (1 + 2 * block_cells)
    procs = np.array(workable, np.int64 if most < 2**62 else object).T
    widest = max(1, *axes[-1].counted)
    moved = copied = 0 * procs[0]
    for loads in product(*(axis.loads(parts) for axis, parts in zip(axes, procs, strict=True))):
        reached = math.prod(owned + width for owned, width in loads)
        local = math.prod(
            owned + width * (parts == 1) for (owned, width), parts in zip(loads, procs, strict=True)
        )
        rows = math.prod(owned + width for owned, width in loads[:-1])
        sides = -(-loads[-1][1] // widest)
        blocks = rows * (1 + sides) - math.prod(owned for owned, _ in loads[:-1])
        moved = np.maximum(moved, reached - local + block_cells * blocks)
        copied = np.maximum(copied, local - math.prod(owned for owned, _ in loads))
    costs = zip(moved.tolist(), copied.tolist(), (-procs.T).tolist(), workable, strict=True)
    return [(cost, procs) for cost, _, _, procs in sorted(costs)]


def _refusal(axes: Sequence[AxisToCut], ranks: int, given: tuple[int, ...]) -> str:
    """Reason why no process grid fits, and the remedy."""
    grid_shape = tuple(axis.cells for axis in axes)
    workable = _workable(axes, ranks, (0,) * len(axes))[:_SUGGESTIONS]
    if workable:
        remedy = f"workable for {ranks} ranks: {', '.join(map(str, workable))}"
    else:
        remedy = f"use another number of ranks, at most {_most_ranks(axes)}"
    if any(given):
        return f"proc_shape={given} with {ranks} ranks: cannot divide grid_shape={grid_shape}; {remedy}"
    cuts = [len(axis.blocks) if axis.blocks else None for axis in axes]
    blocks = f" with blocks for {cuts} ranks per axis" if any(cuts) else ""
    return f"ranks={ranks}: grid_shape={grid_shape} cannot be divided{blocks}; {remedy}"
