"""Grids of coarser cells for multigrid methods: each rank's coarse block lies over its fine block.

::

    fine      | 0  1  2  3  4  5 | 6  7  8  9 |     2 ranks, blocks (6, 4)
    coarse    | 0     1     2    | 3     4    |

With few coarse cells every rank holds the whole grid, since communication would take longer than the work on all cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from halox.datatypes import slab
from halox.decomposition import AxisPartition, Decomposition, FieldLayout
from halox.domain import Domain
from halox.errors import DecompositionError
from halox.exchange.draft import Draft
from halox.exchange.making import make_plan
from halox.exchange.plan import Plan
from halox.grid import FieldArray, Grid
from halox.paths.messages import Part, fuse
from halox.runtime.arrays import describe
from halox.values import as_entries, as_int, check_bool, shown

_CALL = "coarsen"
_FEW_CELLS = 4096  # 16 along each of three axes, the default of NAS MG


class CoarseGrid(Grid[FieldArray]):
    """A grid over a finer grid, made by `Grid.coarsen`, with all methods of `Grid`.

    Attributes
    ----------
    is_whole : bool
        Whether every rank holds the whole grid. Each rank then has a grid of one rank, and its exchanges and reductions
        need no communication.
    """

    is_whole: bool
    _finer: Grid[FieldArray]
    _over: Decomposition
    _collectors: list[Plan]

    def aligned(self, field: Any) -> Any:
        """Return a view of a field's cells over this rank's block of the finer grid, halo included.

        If the grid is not whole, this is the field itself. Local; raises the errors of `layout`.
        """
        layout = self.layout(field)
        if not self.is_whole:
            return field
        stored = FieldLayout(self._over, self._finer.rank, layout.spec).stored
        cuts = [slice(s.start - o, s.stop - o) for s, o in zip(stored, layout.origin, strict=True)]
        return field[(*(slice(None) for _ in layout.spec.components_before), *cuts)]

    def collector(self, field: Any) -> Callable[[], None]:
        """Return a function that completes a field after each rank has set its own cells in the `aligned` part.

        If the grid is whole, this is a `halox.Plan` of the parts of all ranks, which `close` closes. Otherwise it
        does nothing. Halos are not filled: call `exchange`.

        Collective over the ranks of the finer grid, and so are calls. Raises the errors of `layout`, on all ranks.
        """
        finer = self._finer
        with finer.domain.world.guard:
            finer.domain.world.begin(_CALL)
            layout = finer.domain.world.attempt(lambda: self.layout(field), _CALL)
            if not self.is_whole:
                return lambda: None
            blocks: list[Part] = []
            for cuts in FieldLayout(self._over, finer.rank, layout.spec).owned_of_ranks:
                pairs = list(zip(cuts, layout.origin, strict=True))
                starts = tuple(cut.start - origin for cut, origin in pairs)
                box = layout.spec.box(starts, tuple(cut.stop - cut.start for cut in cuts))
                form = field.shape, field.strides, box.starts, box.subsizes
                blocks.append(Part(0, slab(*form, field.dtype)))
            others = [rank for rank in range(finer.size) if rank != finer.rank]

            def draft() -> Draft:
                sends = fuse("send", ((rank, 0, blocks[finer.rank]) for rank in others))
                receives = fuse("receive", ((rank, 0, blocks[rank]) for rank in others))
                return Draft((field,), (describe(field),), sends, receives)

            runner = make_plan(finer.domain.context, draft)
        finer.domain.dependents.add(runner)
        plan = Plan(runner)
        self._collectors.append(plan)
        return plan

    def close(self) -> None:
        """Free plans, collectors and memory; see `Grid.close`."""
        while self._collectors:
            self._collectors.pop().close()
        super().close()


def coarsen(
    finer: Grid[FieldArray], factor: object, even: object, whole: object
) -> CoarseGrid[FieldArray]:
    """Implement `halox.Grid.coarsen`."""
    domain, world, ndim = finer.domain, finer.domain.world, len(finer.grid_shape)

    connect = domain.options.connect

    def build() -> tuple[tuple[tuple[AxisPartition, ...], bool], dict[str, Any]]:
        nonlocal connect
        is_even = check_bool("even", even, DecompositionError)
        entries = [as_int(entry) for entry in as_entries(factor)]
        factors = [n for n in entries if n is not None and n > 0] * (
            ndim if len(entries) == 1 else 1
        )
        if len(factors) != ndim or None in entries:
            raise DecompositionError(
                f"factor: expected an int > 0, or one per grid axis ({ndim}), got {shown(factor)}"
            )
        axes = tuple(
            _coarse_axis(index, axis, factors[index], is_even)
            for index, axis in enumerate(domain.decomposition.axes)
        )
        if connect is not None:
            from halox.decomposition.connections import coarsened

            connect = coarsened(connect, factors)
        is_whole = math.prod(axis.cells for axis in axes) <= _FEW_CELLS or any(
            axis.parts > 1 and min(axis.sizes) < max(2, *widths)
            for axis, widths in zip(axes, finer.halo, strict=True)
        )
        if whole is not None:
            is_whole = check_bool("whole", whole, DecompositionError)
        return (axes, is_whole), {"factor": tuple(factors), "even": is_even, "whole": is_whole}

    with world.guard:
        world.begin(_CALL)
        axes, is_whole = world.attempt(build, _CALL, alike=True)
        is_whole = is_whole and world.size > 1
        over = Decomposition(axes, domain.decomposition.placement)
        options = replace(domain.options, periodic=over.periodic, device=finer.device, coords=None)
        options = replace(options, connect=connect)
        if is_whole:
            options = replace(options, proc_shape=None, blocks=None, placement=True)
        else:
            blocks = [axis.sizes for axis in axes]
            options = replace(
                options, proc_shape=over.proc_shape, blocks=blocks, placement=over.placement
            )
        comm = world.mpi.COMM_SELF if is_whole else world.comm
        coarse = CoarseGrid[FieldArray].of_domain(Domain(comm, over.grid_shape, options))
    coarse.is_whole, coarse._finer, coarse._over, coarse._collectors = is_whole, finer, over, []
    return coarse


def _coarse_axis(index: int, axis: AxisPartition, factor: int, is_even: bool) -> AxisPartition:
    """Return the cuts of an axis of the coarse grid: a block has the coarse cells that begin in the fine block."""
    text = (
        f"factor: coarse cells of {factor} do not divide blocks of {axis.sizes} along axis {index}"
    )
    if is_even and any(bound % factor for bound in axis.bounds):
        remedy = ""
        if axis.cells % factor == 0 and axis.cells // factor >= axis.parts:
            sizes = AxisPartition.even(axis.cells, axis.parts, axis.periodic, factor).sizes
            remedy = f"make the grid with blocks[{index}] = {sizes}, or "
        raise DecompositionError(
            f"{text}; {remedy}give even=False for coarse cells over two blocks, or beyond the end of the grid"
        )
    bounds = tuple(-(-bound // factor) for bound in axis.bounds)
    if len(set(bounds)) < len(bounds):
        raise DecompositionError(
            f"{text}, and none begins in one of them; use fewer ranks or a smaller factor"
        )
    return AxisPartition(bounds[-1], bounds, axis.periodic)
