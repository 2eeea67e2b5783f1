"""Boxes of a rank's array that an exchange sends, receives and fills at walls.

`exchange_regions` has a box for each neighbour, in any order; `exchange_slabs` has fewer boxes, which must be moved in
order. `walls_of` has the boxes beyond walls, and `check_widths` tells whether a halo has cells to be filled from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product, zip_longest
from typing import TypeAlias

import numpy as np

from halox.decomposition.axis_layout import Box, Interval
from halox.decomposition.boundaries import SIDES, mirrored
from halox.decomposition.connections import Along, Joined, Turn, negated_boxes
from halox.decomposition.field_layout import FieldLayout
from halox.decomposition.parity import parity_boxes
from halox.decomposition.walls import Walls
from halox.decomposition.wide import wide_intervals
from halox.errors import FieldError


@dataclass(frozen=True, slots=True)
class Region:
    """Boxes exchanged with the neighbour in one direction.

    ``send`` holds owned points, ``recv`` holds halo points. The points of ``send`` are the points of the neighbour's
    ``recv`` in the opposite direction, even if the same peer is the neighbour in several directions. A field of one
    parity may have several regions per direction. The sender and the receiver then list these regions in the same
    order.
    """

    direction: tuple[int, ...]  # -1, 0 or +1 per grid axis; any displacement if a halo is wide
    peer: int  # rank of the neighbour; this rank itself along a periodic axis of one rank
    send: Box | None  # owned points; None if no points are sent
    recv: Box | None  # halo points; None if no points are received
    turn: Turn | None = None  # if the points come across a connection


_Intervals: TypeAlias = tuple[Interval, ...] | dict[int, Interval]
"""Intervals along an axis by direction or displacement."""


def exchange_regions(
    layout: FieldLayout, corners: bool = True, fixed: Sequence[int] = ()
) -> tuple[Region, ...]:
    """Boxes that an exchange sends and receives, one ``Region`` per neighbour.

    If the direction along an axis is 0, the box covers the owned points along this axis. So the owner of
    a halo point fills it, the diagonal neighbour fills a corner, and the messages may arrive in any order. If
    `is_wide`, more distant ranks also send, and there is a ``Region`` per displacement in the process grid.

    Parameters
    ----------
    corners : bool
        Whether to include edges and corners. A field with ``offsets`` has faces only.
    fixed : sequence of int
        Grid axes along which the halo is not exchanged.

    Returns
    -------
    tuple of Region
        In the lexicographic order of their directions. Regions without points are included. A field of one parity
        may have several regions in a direction along the last axis, because faces that cut pairs are irregular.

    Notes
    -----
    Not collective; touches no device. Meaningful only if ``check_widths`` passes.
    """
    corners = corners and not layout.spec.offsets
    if layout.decomposition.joined is not None:
        return tuple(_joined_regions(layout, layout.decomposition.joined, corners, fixed))
    sent: Sequence[_Intervals] = [axis.sent() for axis in layout.cells]
    received: Sequence[_Intervals] = [axis.received() for axis in layout.cells]
    displacements: Sequence[dict[int, Interval]] = ()
    if layout.is_wide:
        sent, received = displacements, _ = wide_intervals(layout)
    neighbours = layout.decomposition.neighbours(layout.rank, corners, displacements)
    return tuple(
        Region(at.direction, at.rank, send, receive)
        for at in neighbours
        if not any(at.direction[axis] for axis in fixed)
        for send, receive in zip_longest(
            _boxes(layout, sent, at.direction), _boxes(layout, received, at.direction)
        )
    )


def exchange_slabs(layout: FieldLayout, fixed: Sequence[int] = ()) -> tuple[Region, ...]:
    """Boxes of an exchange with edges and corners, fewer than `exchange_regions`; they must be moved in this order.

    The first slabs are the faces of the axes along which this rank is its own neighbour, one axis after another.
    Each slab covers the halos of the previous axes, which are already filled. The slabs of all other neighbours
    follow, and they cover these halos, too. In three dimensions 6 slabs replace 26 regions if at most one axis is
    divided::

        regions  c e e c    slabs  2 1 1 2    1: the first axis
                 e . . e           2 . . 2    2: the second axis, corners included
                 e . . e           2 . . 2
                 c e e c           2 1 1 2

    A slab that this rank exchanges with itself also covers the halos of previous divided axes, if these axes have
    neighbours on both sides. The slab copies undefined cells there, which the neighbours' messages overwrite later.
    But with these cells the slab's blocks are a constant stride apart. ``fixed`` is the same as for `exchange_regions`.

    Returns
    -------
    tuple of Region
        The regions exchanged with other ranks are last. They match the neighbours' regions, because an axis is
        undivided on all ranks or on no rank.

    Notes
    -----
    Not collective; touches no device. Meaningful only if ``check_widths`` passes, and for a field without
    ``offsets`` that is not `is_wide`.
    """
    sent = [axis.sent() for axis in layout.cells]
    received = [axis.received() for axis in layout.cells]
    whole = [Interval(0, axis.stored) for axis in layout.cells]
    neighbours = layout.decomposition.neighbours(layout.rank)
    alone = [
        axis.parts == 1 and axis.periodic and n not in fixed
        for n, axis in enumerate(layout.decomposition.axes)
    ]
    faces = {at.direction for at in neighbours if sum(map(abs, at.direction)) == 1}
    # If an axis has neighbours on both sides, a slab may cover its whole halo.
    joined = layout.decomposition.joined
    unowned = {axis for axis, _ in _unowned(layout)}  # no message overwrites these lines
    inner = [
        all(
            tuple(side * (n == axis) for n in range(len(alone))) in faces
            or (axis, side > 0) in layout.decomposition.joined_sides
            for side in (-1, 1)
        )
        and (alone[axis] or layout.spec.parity is None)
        and axis not in {*unowned, *fixed}
        for axis in range(len(alone))
    ]
    first: list[list[Region]] = [[] for _ in alone]
    others: list[Region] = []
    for at in neighbours:
        across = [axis for axis, side in enumerate(at.direction) if side]
        own = any(alone[axis] for axis in across)
        if (own and len(across) > 1) or not {*across}.isdisjoint(fixed):
            continue
        covered = alone
        if own:
            covered = [axis < across[0] and spans for axis, spans in enumerate(inner)]
        ends = [
            [
                (all_, *along[1:]) if spans else along
                for all_, along, spans in zip(whole, moved, covered, strict=True)
            ]
            for moved in (sent, received)
        ]
        boxes = zip_longest(*(_boxes(layout, end, at.direction) for end in ends))
        into = first[across[0]] if own else others
        into += [Region(at.direction, at.rank, send, receive) for send, receive in boxes]
    if joined is not None:
        others = [*_joined_regions(layout, joined, True, fixed, in_turn=True)]
    return tuple(chain(*first, others))


def walls_of(layout: FieldLayout, corners: bool = True, fixed: Sequence[int] = ()) -> Walls:
    """Return the parts of this rank's halo beyond walls of the grid, which are filled after the neighbours' cells.

    Parameters
    ----------
    corners : bool
        Whether to fill edges and corners. A field with ``offsets`` has faces only.
    fixed : sequence of int
        Grid axes along which the halo is neither received nor filled.
    """
    spec, joined = layout.spec, layout.decomposition.joined_sides
    axes, at_wall = zip(*layout.within_grid, strict=True)
    corners = corners and not spec.offsets
    negated: list[tuple[slice, ...]] = []
    if layout.decomposition.joined is not None:
        extents = (*spec.components_before, *(0,) * spec.ndim, *spec.components_after)
        regions = _joined_regions(
            layout, layout.decomposition.joined, corners, fixed, in_turn=corners
        )
        for region in regions if spec.signs or spec.is_vector else ():
            if region.recv is not None and region.turn is not None:
                is_negative = partial(spec.is_negative, region.turn)
                negated += negated_boxes(region.recv.slices, extents, is_negative)
        at_wall = tuple(
            tuple(is_at and (axis, side) not in joined for side, is_at in enumerate(pair))
            for axis, pair in enumerate(at_wall)
        )
    owned, received = [slice(axis.low, axis.low + axis.points) for axis in layout.cells], []
    for own, inside, ends, periodic in zip(
        layout.cells, axes, at_wall, layout.decomposition.periodic, strict=True
    ):
        start, stop = own.low - own.moved_low, own.low + own.points
        stop += min(own.high, own.moved_high)
        if ends[0] and not periodic:
            start = max(start, inside.low)
        if ends[1] and not periodic:
            stop = min(stop, inside.low + inside.points)
        received.append(slice(start, stop))
    for axis in fixed:
        received[axis] = owned[axis]
    return Walls(
        spec.boundary,
        axes,
        owned,
        received,
        [(False, False) if axis in fixed else pair for axis, pair in enumerate(at_wall)],
        layout.points,
        layout.decomposition.periodic,
        spec.staggered,
        (spec.components_before, spec.components_after),
        corners,
        negated,
        _unowned(layout),
    )


def check_widths(layout: FieldLayout) -> None:
    """Raise `DecompositionError` or `FieldError`, on every rank or on none, if a halo cannot be filled."""
    decomposition = layout.decomposition
    if decomposition.joined is not None:
        if layout.spec.parity is not None:
            raise FieldError(
                "parity: a grid with connect= has no fields of one parity; leave it out"
            )
        decomposition.joined.check(joined_axes(layout), layout.spec.is_vector)
    elif layout.spec.signs or layout.spec.positions or layout.spec.is_vector:
        raise FieldError(
            "sign, position: only connections use them, and this grid has none; make the grid with connect=, or "
            "leave them out"
        )
    _check_walls(layout)


def _check_walls(layout: FieldLayout) -> None:
    """Raise `FieldError` if a boundary reads more points than the array at a wall has; the same on all ranks."""
    spec, decomposition = layout.spec, layout.decomposition
    for _, sides in spec.boundary:
        for index, pair in enumerate(sides):
            axis = decomposition.axes[index]
            points = layout.points[index]
            for side, boundary in enumerate(pair):
                part = (0, axis.parts - 1)[side]
                along = layout.along(index, part)
                # Beyond its points it has those that the next blocks send.
                beyond = (along.moved_high, along.moved_low)[side] if axis.parts > 1 else 0
                most = min(along.points + beyond, points)
                width = (along.low, along.high)[side]
                reads = 0 if boundary is None else boundary.reach(width)
                layers = (range(-width, 0), range(points, points + width))[side]
                if reads > points and all(mirrored(layer, points, pair) for layer in layers):
                    reads = points
                if reads > most:
                    remedy = "use a narrower halo"
                    if most < points:
                        remedy += f", or one of {reads - along.points} on the other side"
                    elif boundary is not None and boundary.mirrors:
                        remedy += ", or mirrors at both sides, at the same number"
                    raise FieldError(
                        f"boundary: {boundary} at the {SIDES[side]} side of axis {index} reads "
                        f"{reads} points for a halo of {width}, and there are "
                        f"{most} (grid_shape={decomposition.grid_shape}, "
                        f"proc_shape={decomposition.proc_shape}); {remedy}"
                    )


def joined_axes(
    layout: FieldLayout, fixed: Sequence[int] = (), *, in_turn: bool = False
) -> tuple[Along, ...]:
    """Return the grid axes, for connections; ``in_turn`` is for `exchange_slabs`."""
    spec = layout.spec
    places = spec.positions or tuple(1 - staggered for staggered in spec.staggered)
    return tuple(
        Along(
            axis,
            [layout.along(n, part) for part in range(axis.parts)],
            spec.halo[n],
            spec.staggered[n],
            places[n],
            in_turn and axis.periodic and axis.parts == 1 and n not in fixed,
        )
        for n, axis in enumerate(layout.decomposition.axes)
    )


def _joined_regions(
    layout: FieldLayout,
    joined: Joined,
    corners: bool,
    fixed: Sequence[int] = (),
    *,
    in_turn: bool = False,
) -> Iterator[Region]:
    """Yield the regions on a grid with connections, each sent or received; ``in_turn`` is for `exchange_slabs`."""
    spec, coords = layout.spec, layout.decomposition.coords_of(layout.rank)
    along = joined_axes(layout, fixed, in_turn=in_turn)
    for piece in joined.pieces(along, coords, corners, fixed):
        peer = layout.decomposition.rank_at(piece.parts)
        assert peer is not None
        starts = tuple(n - at for n, at in zip(piece.firsts, layout.origin, strict=True))
        # Directions only order the regions of two ranks.
        if not piece.sends:
            yield Region((-piece.key,), peer, None, spec.box(starts, piece.sizes), piece.turn)
            continue
        box = spec.box(starts, piece.sizes, piece.steps)
        order = [source for source, _ in piece.turn or ()]
        if order != sorted(order):
            all_axes = [*range(len(box.starts))]
            all_axes[spec.grid_slice] = [spec.grid_axes[n] for n in order]
            box = replace(box, order=tuple(all_axes))
            if spec.is_vector:  # both components are swapped, too
                steps = (-1, *(box.steps or ())[1:])
                box = replace(box, starts=(1, *box.starts[1:]), steps=steps)
        yield Region((piece.key,), peer, box, None, piece.turn)


def _unowned(layout: FieldLayout) -> list[tuple[int, int]]:
    """Return the axis and the layer of each line of a fold in the array that no rank owns."""
    joined = layout.decomposition.joined
    if joined is None:
        return []
    along, first = layout.cells[joined.axis], layout.origin[joined.axis]
    layers = [index - first for index in joined.unowned(joined_axes(layout))]
    return [(joined.axis, layer) for layer in layers if 0 <= layer < along.stored]


def second_images(layout: FieldLayout) -> list[tuple[tuple[int, int], ...]]:
    """Return the owned points that are images of other ones: boxes of the whole grid, each as (first, past) per axis.

    They are half of the line of a fold, and rows of staggered points beyond it. Empty on a grid without connections.
    """
    joined, axes = layout.decomposition.joined, joined_axes(layout)
    boxes: list[tuple[tuple[int, int], ...]] = []
    for maps, turn in joined.images(axes) if joined is not None else ():
        if turn is None:
            continue
        per_axis = []
        for along, (index, points) in zip(axes, maps, strict=True):
            found = index[(index >= 0) & (index < along.points) & (points >= 0)]
            ends = np.flatnonzero(np.diff(found) > 1) + 1
            runs = np.split(found, ends) if len(found) else []
            per_axis.append([(int(run[0]), int(run[-1]) + 1) for run in runs])
        boxes += product(*per_axis)
    return boxes


def _boxes(
    layout: FieldLayout, intervals: Sequence[_Intervals], direction: tuple[int, ...]
) -> list[Box | None]:
    """Return the boxes of the array that hold a box of cells; ``[None]`` if the box is empty."""
    starts, subsizes = zip(
        *[along[side] for along, side in zip(intervals, direction, strict=True)], strict=True
    )
    spec = layout.spec
    if 0 in subsizes:
        return [None]
    if spec.parity is None:
        return [spec.box(starts, subsizes)]
    firsts = [n + axis.start - axis.low for n, axis in zip(starts, layout.cells, strict=True)]
    boxes: list[Box | None] = []
    for box in parity_boxes(spec.parity, firsts, subsizes):
        local = tuple(n - first for n, first in zip(box.starts, layout.origin, strict=True))
        boxes.append(spec.box(local, box.subsizes, box.steps))
    return boxes or [None]
