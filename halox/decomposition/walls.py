"""Cells beyond the walls of a grid, and the layers from which they are filled, in a rank's array.

There are two equal ways to fill them. `Walls.fills` are steps in sequence, one per wall, which also cover the edges and
corners that earlier steps have filled. `Walls.regions` are disjoint boxes that can be filled at the same time: a box at
an edge or a corner has several boundaries, of which each is applied to the values of the one before::

    fills    1 1 1 1    regions  c e e c
             2 . . 2             f . . f
             2 . . 2             f . . f
             1 1 1 1             c e e c
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, product
from operator import itemgetter
from typing import NamedTuple

from halox.decomposition.axis_layout import AxisLayout
from halox.decomposition.boundaries import SIDES, Boundaries, Boundary, Sides, mirrored

Slices = tuple[slice, ...]


class AxisFill(NamedTuple):
    """The fill of a wall along its axis, in layers of the array.

    Attributes
    ----------
    boundary : Boundary
        What to write.
    axis, array_axis : int
        The axis across the wall: of the grid, and of the array.
    side : {"low", "high"}
        Side of the grid.
    edge : int
        The layer at the wall: the outermost layer of points inside.
    target : slice
        Layers of the halo; for a constant also the layer of a staggered field that is the wall.
    sources : tuple of int
        The layer that each target layer is computed from; empty for kinds that read no other layer.
    """

    boundary: Boundary
    axis: int
    array_axis: int
    side: str
    edge: int
    target: slice
    sources: tuple[int, ...]

    @property
    def inner(self) -> int:
        """The layer after the one at the wall."""
        return self.edge + (1 if self.side == "low" else -1)

    @property
    def depths(self) -> range:
        """Distance of each target layer from the layer at the wall, negative on the low side."""
        return range(self.target.start - self.edge, self.target.stop - self.edge)

    @property
    def step(self) -> int:
        """Layers from the first source to the second."""
        return self.sources[1] - self.sources[0] if len(self.sources) > 1 else 0

    def read(self) -> set[int]:
        """Return the layers that the fill reads."""
        return {*self.sources, *((self.inner,) if self.boundary.kind == "extrapolate" else ())}

    def part(self, start: int, stop: int) -> AxisFill:
        """Return the fill of the target layers with these numbers."""
        first = self.target.start
        target = slice(first + start, first + stop)
        return self._replace(target=target, sources=self.sources[start:stop])

    def layers(self) -> list[AxisFill]:
        """Return the fill layer by layer."""
        return [self.part(n, n + 1) for n in range(len(self.depths))]

    def runs(self) -> list[AxisFill]:
        """Return the fill in parts whose sources are a constant step apart."""
        if not self.sources:
            return [self]
        steps = [after - before for before, after in pairwise(self.sources)]
        runs, start = [], 0
        while start < len(self.sources):
            stop = start + 1
            while stop < len(self.sources) and steps[stop - 1] == steps[start]:
                stop += 1
            runs.append(self.part(start, stop))
            start = stop
        return runs


class WallFill(NamedTuple):
    """A step of filling: the fill along its axis, and the box of the array that it writes."""

    along: AxisFill
    box: Slices


class WallRegion(NamedTuple):
    """A box of the array beyond one or more walls, and the fills of these walls in the order of their axes.

    The sources of each fill are a constant step apart.
    """

    box: Slices
    along: tuple[AxisFill, ...]


@dataclass(frozen=True)
class Walls:
    """The walls of a field on one rank.

    Attributes
    ----------
    boundaries : Boundaries
        Boundaries by component.
    axes : sequence of AxisLayout
        Grid axes of the array, with all its points of the grid as their points, and a halo only beyond the walls.
    owned, received : sequence of slice
        Per axis, the layers that the rank owns, and these with the halo that an exchange fills before the walls.
    at_wall : sequence of (bool, bool)
        Per axis, whether the array reaches the low and the high end of the grid, along periodic axes, too.
    extents : sequence of int
        Per axis, the points of the whole grid.
    periodic, staggered : sequence of bool
        Per axis.
    components : (tuple of int, tuple of int)
        Extents of the component axes before and after the grid axes.
    corners : bool
        Whether edges and corners are filled: beyond several walls, and beyond a wall in the halo of a neighbour.
    negated : sequence of tuple of slice
        Boxes whose sign changes before the fills: received across a connection.
    unowned : sequence of (int, int)
        Axis and layer of each line of a fold that no rank owns. An exchange leaves it as it is.
    """

    boundaries: Boundaries
    axes: Sequence[AxisLayout]
    owned: Sequence[slice]
    received: Sequence[slice]
    at_wall: Sequence[tuple[bool, bool]]
    extents: Sequence[int]
    periodic: Sequence[bool]
    staggered: Sequence[bool]
    components: tuple[tuple[int, ...], tuple[int, ...]]
    corners: bool
    negated: Sequence[Slices] = ()
    unowned: Sequence[tuple[int, int]] = ()

    def fills(self) -> tuple[WallFill, ...]:
        """Return the steps that fill the halo, in their order."""
        fills = []
        for before, after, sides in self._selections():
            for axis in range(len(self.axes)):
                for along, across in self._steps(axis, sides):
                    box = (*before, *across[:axis], along.target, *across[axis + 1 :], *after)
                    fills.append(WallFill(along, box))
        return tuple(fills)

    def regions(self, *, wraps: bool = False) -> tuple[WallRegion, ...]:
        """Return the disjoint boxes of the halo that are filled.

        With ``wraps`` also the halo on periodic axes of which the rank owns all points, with the boundary "periodic".
        """
        regions = []
        for before, after, sides in self._selections():
            choices = [[*self._choices(axis, sides, wraps)] for axis in range(len(self.axes))]
            for chosen in product(*choices):
                along = tuple(fill for fill, _, _ in chosen if fill is not None)
                if along and (self.corners or sum(is_halo for *_, is_halo in chosen) < 2):
                    box = (*before, *(layers for _, layers, _ in chosen), *after)
                    regions.append(WallRegion(box, along))
        return tuple(regions)

    def sources_are_inside(self, *, wraps: bool = False) -> bool:
        """Whether no fill reads a layer that another one writes, as the wall of a staggered field in a thin block."""
        return all(
            fill.read().isdisjoint(range(other.target.start, other.target.stop))
            for *_, sides in self._selections()
            for axis in range(len(self.axes))
            for fill, other in product([*self._along(axis, sides, wraps)], repeat=2)
        )

    def _steps(self, axis: int, sides: Sides) -> Iterator[tuple[AxisFill, Sequence[slice]]]:
        """Yield the fills along an axis in their order, each with the layers along the other axes that it covers."""
        across = [
            self._filled(other, sides, with_walls=other < axis) for other in range(len(self.axes))
        ]
        for along in self._along(axis, sides):
            if not self.corners:
                yield along, self.owned
                on_wall = self._on_wall(along)
                if on_wall is not None:  # also in the halo along one other axis
                    for n, layers in enumerate(across):
                        yield on_wall, (*self.owned[:n], layers, *self.owned[n + 1 :])
            elif along.boundary.kind == "phase":  # changes in place only cells that were received
                for box in self._without_unowned(across):
                    yield along, box
            else:
                yield along, across

    def _choices(
        self, axis: int, sides: Sides, wraps: bool
    ) -> Iterator[tuple[AxisFill | None, slice, bool]]:
        """Yield the parts of an axis that regions have: the fill, the layers, and whether these are halo."""
        fills = [*self._along(axis, sides, wraps)]
        yield None, self._between(axis, fills), False
        for fill in fills:
            on_wall = None if self.corners else self._on_wall(fill)
            if on_wall is None:
                yield from ((run, run.target, True) for run in fill.runs())
            else:
                wall, target = on_wall.target, fill.target
                beyond = (slice(target.start, wall.start), slice(wall.stop, target.stop))
                halo = beyond[fill.side == "high"]
                yield on_wall, wall, False
                yield fill._replace(target=halo), halo, True
        if not self.corners and all(fill.boundary.kind != "periodic" for fill in fills):
            owned, received = self.owned[axis], self.received[axis]
            yield None, slice(received.start, owned.start), True
            yield None, slice(owned.stop, received.stop), True

    def _on_wall(self, along: AxisFill) -> AxisFill | None:
        """Return the part of a fill that sets points of this rank: a constant on the wall of a staggered field."""
        owned = self.owned[along.axis]
        start, stop = max(along.target.start, owned.start), min(along.target.stop, owned.stop)
        return along._replace(target=slice(start, stop)) if start < stop else None

    def _without_unowned(self, box: Sequence[slice]) -> list[Sequence[slice]]:
        """Return a box without the lines that no rank owns."""
        boxes = [box]
        for axis, layer in self.unowned:
            boxes = [
                (*one[:axis], part, *one[axis + 1 :])
                for one in boxes
                for part in (
                    slice(one[axis].start, min(layer, one[axis].stop)),
                    slice(max(layer + 1, one[axis].start), one[axis].stop),
                )
                if part.start < part.stop
            ]
        return boxes

    def _selections(self) -> Iterator[tuple[Slices, Slices, Sides]]:
        """Yield slices of the component axes, before and after the grid axes, with the boundaries of the components."""
        named = {component for component, _ in self.boundaries if component}
        before, after = self.components
        every = list(product(*(range(extent) for extent in (*before, *after))))
        none: Sides = ((None, None),) * len(self.axes)
        for component, sides in ({(): none} | dict(self.boundaries)).items():
            if not component and not named:
                yield (slice(None),) * len(before), (slice(None),) * len(after), sides
                continue
            for one in [component] if component else [one for one in every if one not in named]:
                cuts = tuple(slice(index, index + 1) for index in one)
                yield cuts[: len(before)], cuts[len(before) :], sides

    def _along(self, axis: int, sides: Sides, wraps: bool = False) -> Iterator[AxisFill]:
        """Yield the fills along an axis, first the one on the low side."""
        along, array_axis = self.axes[axis], len(self.components[0]) + axis
        begin, end = along.low, along.low + along.points
        is_whole = wraps and self.periodic[axis] and all(self.at_wall[axis])
        for side, given in enumerate(sides[axis]):
            boundary = Boundary("periodic") if is_whole and given is None else given
            if boundary is None or not self.at_wall[axis][side]:
                continue
            width, edge = ((along.low, begin), (along.high, end - 1))[side]
            if boundary.kind in ("phase", "periodic"):
                # Only these layers are exchanged.
                width = min(width, (along.moved_low, along.moved_high)[side])
            # The wall runs through the first and the last point of a staggered field.
            extra = int(self.staggered[axis] and boundary.kind == "constant")
            target = (slice(begin - width, begin + extra), slice(end - extra, end + width))[side]
            if target.start == target.stop:
                continue
            layers = range(target.start - begin, target.stop - begin)
            rules = [self._rule(axis, boundary, sides[axis], layer) for layer in layers]
            first = target.start
            for rule, group in groupby(rules, key=itemgetter(0)):
                points = [point for _, point in group]
                sources = tuple(begin + point for point in points if point is not None)
                part = slice(first, first + len(points))
                yield AxisFill(rule, axis, array_axis, SIDES[side], edge, part, sources)
                first = part.stop

    def _rule(
        self, axis: int, boundary: Boundary, pair: Sequence[Boundary | None], layer: int
    ) -> tuple[Boundary, int | None]:
        """Return the rule of a layer beyond a wall, and the point that it reads; both count from the first point."""
        points = self.axes[axis].points
        if boundary.mirrors:
            image = mirrored(layer, points, pair)
            assert image is not None, "checked by `check_widths`"
            return image
        if boundary.kind == "phase":  # once for each period
            depth = -1 - layer if layer < 0 else layer - points
            assert boundary.number is not None
            number = boundary.number ** (1 + depth // self.extents[axis])
            return replace(boundary, number=number), None
        if boundary.kind == "periodic":
            return boundary, layer + points if layer < 0 else layer - points
        if boundary.kind in ("edge", "gradient", "extrapolate"):
            return boundary, 0 if layer < 0 else points - 1
        return boundary, None

    def _filled(self, axis: int, sides: Sides, *, with_walls: bool) -> slice:
        """Return the layers that have values: received ones, and beyond walls if earlier fills have filled them."""
        low, high = (
            with_walls and is_wall and boundary is not None and not self.periodic[axis]
            for is_wall, boundary in zip(self.at_wall[axis], sides[axis], strict=True)
        )
        received = self.received[axis]
        return slice(
            0 if low else received.start, self.axes[axis].stored if high else received.stop
        )

    def _between(self, axis: int, fills: Sequence[AxisFill]) -> slice:
        """Return the layers along an axis that no fill of this axis writes."""
        layers = self.received[axis] if self.corners else self.owned[axis]
        start, stop = layers.start, layers.stop
        for fill in fills:
            if fill.side == "low":
                start = max(start, fill.target.stop)
            else:
                stop = min(stop, fill.target.start)
        return slice(start, stop)
