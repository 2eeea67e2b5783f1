"""Grids of coarser cells for multigrid methods: each rank's coarse block lies over its fine block.

::

    fine      | 0  1  2  3  4  5 | 6  7  8  9 |     2 ranks, blocks (6, 4)
    coarse    | 0     1     2    | 3     4    |

With few coarse cells every rank holds the whole grid, since communication would take longer than the work on all cells.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from halox.datatypes import slab
from halox.decomposition import AxisPartition, Decomposition, FieldLayout
from halox.domain import Domain, GridOptions
from halox.errors import DecompositionError
from halox.paths.messages import Part, fuse
from halox.plans.draft import Draft
from halox.plans.making import make_plan
from halox.plans.plan import Plan
from halox.runtime.arrays import describe
from halox.values import as_entries, as_int, check_bool, shown

_CALL = "coarsen"
_FEW_CELLS = 4096  # 16 along each of three axes, the default of NAS MG


class Coarse(NamedTuple):
    """A domain of coarse cells, and their division by the blocks of the finer domain.

    ``is_whole``: every rank holds the whole domain, as a domain of one rank.
    """

    domain: Domain
    over: Decomposition
    is_whole: bool


def coarsen(finer: Domain, factor: object, even: object, whole: object) -> Coarse:
    """Make the domain of `halox.Grid.coarsen`."""
    world, ndim = finer.world, len(finer.grid_shape)
    connect = finer.options["connect"]

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
            for index, axis in enumerate(finer.decomposition.axes)
        )
        if connect is not None:
            from halox.decomposition.connections import coarsened

            connect = coarsened(connect, factors)
        is_whole = math.prod(axis.cells for axis in axes) <= _FEW_CELLS or any(
            axis.parts > 1 and min(axis.sizes) < max(2, *widths)
            for axis, widths in zip(axes, finer.plain.spec.halo, strict=True)
        )
        if whole is not None:
            is_whole = check_bool("whole", whole, DecompositionError)
        return (axes, is_whole), {"factor": tuple(factors), "even": is_even, "whole": is_whole}

    with world.guard:
        world.begin(_CALL)
        axes, is_whole = world.attempt(build, _CALL, alike=True)
        is_whole = is_whole and world.size > 1
        over = Decomposition(axes, finer.decomposition.placement)
        options: GridOptions = {
            **finer.options,
            "comm": world.mpi.COMM_SELF if is_whole else world.comm,
            "connect": connect,
            "coords": None,
            "device": finer.division.device,
            "periodic": over.periodic,
            "proc_shape": None if is_whole else over.proc_shape,
            "blocks": None if is_whole else [axis.sizes for axis in axes],
            "placement": is_whole or over.placement,
        }
        return Coarse(Domain(over.grid_shape, options), over, is_whole)


def cells_over_block(finer: Domain, coarse: Coarse, layout: FieldLayout) -> tuple[slice, ...]:
    """Return the index of a whole field's cells over this rank's finer block, halo included."""
    stored = FieldLayout(coarse.over, finer.world.rank, layout.spec).stored
    cuts = [slice(s.start - o, s.stop - o) for s, o in zip(stored, layout.origin, strict=True)]
    return (*(slice(None) for _ in layout.spec.components_before), *cuts)


def collecting_plan(finer: Domain, coarse: Coarse, field: Any) -> Plan | None:
    """Make the plan of `CoarseGrid.collector`; None if no rank holds the whole domain."""
    world = finer.world
    with world.guard:
        world.begin(_CALL)
        layout = world.attempt(lambda: coarse.domain.layouts.find(field), _CALL)
        if not coarse.is_whole:
            return None
        blocks: list[Part] = []
        for cuts in FieldLayout(coarse.over, world.rank, layout.spec).owned_of_ranks:
            pairs = list(zip(cuts, layout.origin, strict=True))
            starts = tuple(cut.start - origin for cut, origin in pairs)
            box = layout.spec.box(starts, tuple(cut.stop - cut.start for cut in cuts))
            form = field.shape, field.strides, box.starts, box.subsizes
            blocks.append(Part(0, slab(*form, field.dtype)))
        others = [rank for rank in range(world.size) if rank != world.rank]

        def draft() -> Draft:
            sends = fuse("send", ((rank, 0, blocks[world.rank]) for rank in others))
            receives = fuse("receive", ((rank, 0, blocks[rank]) for rank in others))
            return Draft((field,), (describe(field),), sends, receives)

        runner = make_plan(finer.context, draft)
    finer.dependents.add(runner)
    return Plan(runner)


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
