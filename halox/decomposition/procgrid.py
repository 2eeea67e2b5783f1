"""Process grid: the number of ranks along each axis, chosen to minimise the cells sent.

A rank has a block of ``n`` cells along an axis and fills ``w`` halo cells along this axis for the
parts below and above. Over all directions, corners included, the rank fills
``prod(n + w) - prod(n)`` cells. Along a periodic axis with one rank, it fills its own halo with
local copies, without messages. These copies have ``prod(n + w where one rank, n elsewhere) - prod(n)``
cells. The rank therefore sends

    prod(n + w) - prod(n + w where one rank, n elsewhere)

cells to other ranks. The process grid minimises this number for the rank that sends most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from halox.decomposition.normalise import Halo
from halox.decomposition.partition import AxisPartition
from halox.errors import DecompositionError

# Number of workable process grids that an error suggests.
_SUGGESTIONS = 3


def choose_proc_shape(
    ranks: int,
    shape: tuple[int, ...],
    halo: Halo,
    periodic: tuple[bool, ...],
    given: tuple[int, ...],
    blocks: Sequence[tuple[int, ...] | None],
    units: Sequence[int],
) -> tuple[int, ...]:
    """Ranks per axis that minimise the cells that the busiest rank sends to other ranks.

    The product is ``ranks``. ``given`` has the ranks of each axis, and 0 for an axis to choose. Every block is at least
    as wide as the halos that it fills, if a process grid has such blocks. Narrower blocks need more messages. Of equal
    process grids, the grid with fewer cells copied within a rank is chosen, then the grid with more ranks along the
    outermost axes, because the faces of these axes have the longest contiguous runs of memory. If all halo widths are
    0, process grids are compared for a width of 1, because a field may have its own halo. ``units`` are the cells per
    axis that stay in one block.

    Raises `DecompositionError` if no process grid fits. The error lists workable process grids, or workable numbers
    of ranks.

    Examples
    --------
    >>> choose_proc_shape(12, (64, 64), ((1, 1), (1, 1)), (True, True), (0, 0), (None, None), (1, 1))
    (4, 3)
    """
    counted = counted_halo(halo)
    axes = tuple(map(_Axis, range(len(shape)), shape, halo, counted, periodic, blocks, units))
    of_any_width = tuple(replace(axis, halo=(0, 0)) for axis in axes)
    for some in (axes, of_any_width):
        workable = list(_workable(some, ranks, given))
        if workable:
            return min(workable, key=lambda procs: _cost(axes, procs))
    raise DecompositionError(_refusal(of_any_width, ranks, given))


def counted_halo(halo: Halo) -> Halo:
    """Halo widths for comparing decompositions: 1 everywhere if all widths are 0."""
    return halo if any(map(any, halo)) else ((1, 1),) * len(halo)


class _Load(NamedTuple):
    """Load of a part along one axis."""

    owned: int
    reached: int  # owned cells, and all halo cells that the part fills
    local: int  # owned cells, and the halo cells that the part fills on its own rank


@dataclass(frozen=True)
class _Axis:
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

    def cut(self, parts: int) -> AxisPartition:
        """Cut the axis into ``parts`` parts."""
        if self.blocks is not None:
            return AxisPartition.from_blocks(self.blocks, self.periodic)
        return AxisPartition.even(self.cells, parts, self.periodic, self.unit)

    def obstacle(self, parts: int) -> str | None:
        """Reason why the axis has no cut into ``parts`` parts, wide enough or not; None if it has one."""
        cells = f"{self.cells} cell{'s' * (self.cells > 1)}"
        if self.blocks is not None and parts != len(self.blocks):
            return f"axis {self.index} is given as {len(self.blocks)} blocks, not {parts}"
        if parts > self.cells // self.unit:
            together = f", of which {self.unit} stay together" if self.unit > 1 else ""
            return f"axis {self.index} has {cells}{together}, too few for {parts} ranks"
        return None


@lru_cache(maxsize=4096)
def _fits(axis: _Axis, parts: int) -> bool:
    """Whether the axis can be cut into ``parts`` parts."""
    even, units = axis.blocks is None, axis.cells // axis.unit // parts
    if even and units * axis.unit >= max(1, *axis.halo):
        return True
    if even and parts > 1 and (units + 1) * axis.unit < max(axis.halo):
        return False
    if axis.obstacle(parts) is not None:
        return False
    limits = axis.cut(parts).width_limits()
    return all(
        limit is None or width <= limit for width, limit in zip(axis.halo, limits, strict=True)
    )


@lru_cache(maxsize=4096)
def _loads(axis: _Axis, parts: int) -> tuple[_Load, ...]:
    """Return the loads of the parts, except loads with no more cells and no wider halo than another load.

    The omitted loads cannot change the maxima in `_cost`.
    """
    low, high = axis.counted
    pairs = set()
    for part, size in enumerate(axis.cut(parts).sizes):
        # A part fills the low halo of the part above it, and the high halo of the part below it.
        is_below = axis.periodic or part < parts - 1
        is_above = axis.periodic or part > 0
        pairs.add((size, low * is_below + high * is_above))
    return tuple(
        _Load(size, size + width, size + width if parts == 1 else size)
        for size, width in sorted(pairs)
        if not any(size <= n and width <= w for n, w in pairs - {(size, width)})
    )


def _workable(
    axes: Sequence[_Axis], ranks: int, given: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Yield every usable process grid for ``ranks`` that agrees with ``given``."""
    if not axes:
        if ranks == 1:
            yield ()
        return
    axis, *others = axes
    choices = [given[0]] if given[0] else range(1, min(ranks, axis.cells) + 1)
    for parts in choices:
        if ranks % parts == 0 and _fits(axis, parts):
            for rest in _workable(others, ranks // parts, given[1:]):
                yield (parts, *rest)


def _cost(axes: Sequence[_Axis], procs: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """Cost to minimise: most cells that a rank sends, then most cells copied within a rank, then cuts of inner axes."""
    sent = copied = 0
    for loads in product(*(_loads(axis, parts) for axis, parts in zip(axes, procs, strict=True))):
        local = math.prod(load.local for load in loads)
        sent = max(sent, math.prod(load.reached for load in loads) - local)
        copied = max(copied, local - math.prod(load.owned for load in loads))
    return sent, copied, tuple(-parts for parts in procs)


def _refusal(axes: Sequence[_Axis], ranks: int, given: tuple[int, ...]) -> str:
    """Reason why no process grid fits, and the remedy."""
    grid_shape = tuple(axis.cells for axis in axes)
    free = (0,) * len(axes)
    others = sorted(
        _workable(axes, ranks, free), key=lambda procs: (_distance(procs, given), procs)
    )[:_SUGGESTIONS]
    if others:
        remedy = f"workable for {ranks} ranks: {', '.join(map(str, others))}"
    else:
        near = [n for n in (_near(axes, ranks, -1), _near(axes, ranks, +1)) if n]
        examples = " or ".join(f"{n} (proc_shape={next(_workable(axes, n, free))})" for n in near)
        remedy = f"no process grid works for {ranks} ranks; nearest numbers of ranks: {examples}"
    if any(given):
        return f"proc_shape={given} with {ranks} ranks: {_reason(axes, ranks, given)}; {remedy}"
    cuts = [len(axis.blocks) if axis.blocks else None for axis in axes]
    blocks = f" with blocks for {cuts} ranks per axis" if any(cuts) else ""
    return f"ranks={ranks}: grid_shape={grid_shape} cannot be divided{blocks}; {remedy}"


def _reason(axes: Sequence[_Axis], ranks: int, given: tuple[int, ...]) -> str:
    fixed = math.prod(parts for parts in given if parts)
    if 0 not in given and fixed != ranks:
        return f"it multiplies up to {fixed}, expected {ranks}"
    if ranks % fixed:
        return f"the axes given multiply up to {fixed}, expected a divisor of {ranks}"
    for axis, parts in zip(axes, given, strict=True):
        obstacle = axis.obstacle(parts) if parts else None
        if obstacle:
            return obstacle
    return f"{ranks // fixed} ranks cannot be divided among the axes left free"


def _distance(procs: tuple[int, ...], given: tuple[int, ...]) -> int:
    return sum(abs(have - want) for have, want in zip(procs, given, strict=True) if want)


def _near(axes: Sequence[_Axis], ranks: int, step: int) -> int | None:
    """Next workable number of ranks below or above ``ranks``; None if no number up to about twice ``ranks`` works."""
    free = (0,) * len(axes)
    fixed = math.prod(len(axis.blocks) for axis in axes if axis.blocks is not None)
    most = 2 * max(ranks, fixed)
    candidates = range(ranks - 1, 0, -1) if step < 0 else range(ranks + 1, most + 1)
    return next((n for n in candidates if next(_workable(axes, n, free), None)), None)
