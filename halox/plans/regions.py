"""Regions of a rank's cells: the interior and the rims of an overlapped exchange, and the regions of deep halos.

A side of a block is open if an exchange fills its halo, because it has a neighbour or the axis is periodic. All other
sides are walls. A block of 3 x 4 cells with walls on the left and below, in an overlapped exchange, and in the first of
two steps between exchanges::

                                   . . . . . .
    . . . . .                      + + + + + .
    1 1 1 1 .    1, 2: rims        o o o o + .    o: owned cells, computed in both steps
    i i i 2 .    i: interior       o o o o + .    +: halo cells, computed in the first step only
    i i i 2 .    .: halo           o o o o + .    .: halo
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np

from halox.decomposition import FieldLayout, walls_of
from halox.errors import FieldError
from halox.values import as_int, rounded_up, shown

Interval: TypeAlias = tuple[int, int]
"""First index along an axis, and the index after the last one."""


_FAR = 1 << 62


class Cells(tuple[slice, ...]):
    """A box of cells of a field: an index of the field's array, with ``slice(None)`` for component axes."""

    array_shape: tuple[int, ...]
    """Shape of the array."""

    @cached_property
    def start(self) -> tuple[np.int32, ...]:
        """Per grid axis the first index in the array, as an argument for kernels."""
        return tuple(np.int32(cut.start) for cut in self if cut.start is not None)

    @cached_property
    def shape(self) -> tuple[np.int32, ...]:
        """Per grid axis the number of cells, as an argument for kernels."""
        return tuple(np.int32(cut.stop - cut.start) for cut in self if cut.start is not None)

    def shifted(self, *by: int) -> Cells:
        """Return the box moved by a number of cells along each grid axis: the neighbours that a stencil reads.

        A box without cells is not moved. Raises `FieldError` unless there is an int for each grid axis, and if the box
        would leave the array.
        """
        ndim = len(self.start)
        if len(by) != ndim or None in map(as_int, by):
            raise FieldError(f"shifted takes an int for each of {ndim} grid axes, got {shown(by)}")
        if not all(self.shape):
            return self
        moves = iter(by)
        moved = Cells(
            cut if cut.start is None else slice(cut.start + (n := next(moves)), cut.stop + n)
            for cut in self
        )
        moved.array_shape = self.array_shape
        for cut, extent in zip(moved, self.array_shape, strict=True):
            if cut.start is not None and not 0 <= cut.start <= cut.stop <= extent:
                raise FieldError(f"shifted{by} leaves the array of {self}; use a wider halo")
        return moved


def owned_cells(layout: FieldLayout) -> Cells:
    """Return all cells that the rank owns."""
    return _cells(layout, _owned(layout))


def cells_of_range(layout: FieldLayout, cuts: Sequence[slice]) -> Cells:
    """Return the cells of a range of global indices that the rank owns; without any, an empty box of the array."""
    box = []
    for cut, owned, origin in zip(cuts, layout.owned, layout.origin, strict=True):
        start, stop = (min(max(n, owned.start), owned.stop) for n in (cut.start, cut.stop))
        box.append((start - origin, stop - origin))
    return _cells(layout, box)


def overlap_regions(
    layout: FieldLayout,
    width: int | None,
    others: Sequence[FieldLayout] = (),
    fixed: Sequence[int] = (),
    multiples: Sequence[int] = (),
) -> tuple[tuple[Cells, ...], tuple[Cells, ...]]:
    """Return the regions to compute during an exchange, and the regions to compute after it.

    Together they cover each owned cell once. The cells of the first regions are at least ``width`` cells away from all
    points that the exchange writes, also in ``others``, the other fields of the exchange; with None, as many cells as
    the field's halo is wide. If no interior remains, the only region is in the second part. The exchange leaves out
    the ``fixed`` axes.

    On a GPU rims are ``multiples`` thick, a number for each grid axis, and axes that are periodic within the rank have
    no rims: their halo is filled before the first region.
    """
    inner, box = _owned(layout), _owned(layout)
    for each in (layout, *others):
        for axis, (low, high) in enumerate(_unwritten(each, width, fixed, bool(multiples))):
            unit, origin = _unit(layout, axis), layout.origin[axis]
            first, stop = inner[axis]
            # Pairs of cells are whole.
            inner[axis] = max(first, -(-low // unit) - origin), min(stop, high // unit - origin)
    for axis, multiple in enumerate(multiples):
        (begin, end), (first, stop) = box[axis], inner[axis]
        inner[axis] = (
            begin + rounded_up(first - begin, multiple),
            end - rounded_up(end - stop, multiple),
        )
    if any(first >= stop for first, stop in inner):
        return (), (owned_cells(layout),)
    regions = []
    for axis, (first, stop) in enumerate(inner):
        for along in ((box[axis][0], first), (stop, box[axis][1])):
            if along[0] < along[1]:
                regions.append(_cells(layout, [*box[:axis], along, *box[axis + 1 :]]))
        box[axis] = (first, stop)
    return (_cells(layout, box),), tuple(regions)


def _unwritten(
    layout: FieldLayout, width: int | None, fixed: Sequence[int], copied: bool
) -> list[Interval]:
    """Return, per grid axis, the cells at least ``width`` cells away from all points that an exchange writes.

    With ``copied``, copies within the rank do not count.
    """
    spec, decomposition = layout.spec, layout.decomposition
    # An exchange also writes owned points, at most in the outermost layer: the line of a fold, constants on walls.
    owned_too = {
        (axis, side)
        for _, sides in spec.boundary
        for axis, pair in enumerate(sides)
        for side, boundary in enumerate(pair)
        if spec.staggered[axis] and boundary is not None and boundary.kind == "constant"
        if axis not in fixed
    }
    owned_too.update(decomposition.joined_sides)
    result = []
    sides = _filled_sides(layout, copied)
    for axis, (owned, filled) in enumerate(zip(layout.owned, sides, strict=True)):
        unit, ends = _unit(layout, axis), [-_FAR, _FAR]
        points = layout.points[axis]
        # A staggered field without a high halo still has a copy of the next block's first point.
        halos = spec.halo[axis][0], max(spec.halo[axis][1], spec.staggered[axis])
        for side, (halo, inward) in enumerate(zip(halos, (1, -1), strict=True)):
            edges = []  # the first index inwards that an exchange does not write, and the width of the halo
            if filled[side] and halo and axis not in fixed:
                reach = min(halo, max(spec.offsets, default=halo))
                edges.append((unit * (owned.start, owned.stop)[side], reach))
            if (axis, side) in owned_too:
                edges.append(((1, points - 1)[side], max(spec.halo[axis])))
            for edge, reach in edges:
                end = edge + inward * (reach if width is None else width)
                ends[side] = (max, min)[side](ends[side], end)
        result.append((ends[0], ends[1]))
    return result


def _unit(layout: FieldLayout, axis: int) -> int:
    """Return the cells of the grid for one index of a field: 2 along the last axis for one parity."""
    return 2 if layout.spec.parity is not None and axis == layout.spec.ndim - 1 else 1


def deep_regions(layout: FieldLayout, every: int) -> tuple[Cells, ...]:
    """Return the regions of ``every`` steps after an exchange: the owned cells, and the halo that is still valid.

    The regions end at walls, which may cut a halo that is wider than blocks.
    Each step makes the outermost ``halo // every`` cells of the halo on each open side invalid.
    """
    stored = layout.padded_shape[layout.spec.grid_slice]
    regions = []
    for step in range(1, every + 1):
        box = []
        per_axis = zip(_owned(layout), _open_sides(layout), layout.within_walls, strict=True)
        for axis, ((first, stop), sides, inside) in enumerate(per_axis):
            low, high = (step * width // every for width in layout.spec.halo[axis])
            begin, end, _ = inside.indices(stored[axis])
            # A staggered field may store one more point than its halo, a copy that is computed in every step.
            box.append(
                (
                    max(low, begin) if sides[0] else first,
                    min(stored[axis] - high, end) if sides[1] else stop,
                )
            )
        regions.append(_cells(layout, box))
    return tuple(regions)


def check_every(every: object, layouts: Sequence[FieldLayout], corners: bool) -> int:
    """Return the number of steps between exchanges; raise `FieldError` if the fields' halos do not allow it."""
    steps = as_int(every)
    if steps is None or steps < 1:
        raise FieldError(
            f"every must be an int >= 1, the steps between exchanges, got {shown(every)}"
        )
    if steps == 1:
        return steps
    for number, layout in enumerate(layouts):
        spec = layout.spec
        for axis, widths in enumerate(spec.halo):
            if any(width % steps for width in widths):
                raise FieldError(
                    f"every={steps} does not divide the halo {widths} (low, high) of field {number} along axis {axis}; "
                    f"for steps that read w cells on each side, use a halo of {steps} * w cells"
                )
        kinds = {one.kind for _, sides in spec.boundary for side in sides for one in side if one}
        if layout.decomposition.joined is not None or "phase" in kinds:
            across = "a phase" if "phase" in kinds else "a connection"
            raise FieldError(
                f"every={steps} computes halos across {across}, whose images may round differently; use every=1 on a "
                "grid with connect= or a phase"
            )
        if spec.parity is not None or spec.offsets or not (corners or spec.ndim == 1):
            raise FieldError(
                f"every={steps} needs whole halos, and field {number} has corners={corners}, parity={spec.parity!r}, "
                f"offsets={spec.offsets}; use corners=True and a field of all cells without offsets, or every=1"
            )
    return steps


def _cells(layout: FieldLayout, box: Sequence[Interval]) -> Cells:
    spec, whole = layout.spec, slice(None)
    before, after = ([whole] * len(n) for n in (spec.components_before, spec.components_after))
    cells = Cells([*before, *(slice(*along) for along in box), *after])
    cells.array_shape = layout.padded_shape
    return cells


def _owned(layout: FieldLayout) -> list[Interval]:
    return [(cut.start, cut.stop) for cut in layout.interior if cut.start is not None]


def _filled_sides(layout: FieldLayout, copied: bool) -> list[tuple[bool, bool]]:
    """Return, per grid axis, whether an exchange fills the low and the high halo: from a neighbour, or at a wall."""
    walls = {
        (fill.along.axis, ("low", "high").index(fill.along.side))
        for fill in walls_of(layout).fills()
    }
    return [
        (low or (axis, 0) in walls, high or (axis, 1) in walls)
        for axis, (low, high) in enumerate(_open_sides(layout, copied))
    ]


def _open_sides(layout: FieldLayout, copied: bool = False) -> list[tuple[bool, bool]]:
    """Return, per grid axis, whether the low and the high side have a neighbour or a periodic image.

    With ``copied``, images within the rank do not count.
    """
    decomposition = layout.decomposition
    coords, joined = decomposition.coords_of(layout.rank), decomposition.joined_sides
    return [
        (
            wraps or part > 0 or (n, 0) in joined,
            wraps or part < axis.parts - 1 or (n, 1) in joined,
        )
        for n, (axis, part) in enumerate(zip(decomposition.axes, coords, strict=True))
        for wraps in [axis.periodic and not (copied and axis.parts == 1)]
    ]
