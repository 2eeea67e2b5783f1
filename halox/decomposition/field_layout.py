"""Positions of a field's points in the array of one rank and in the grid."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from halox.decomposition.axis_layout import AxisLayout
from halox.decomposition.boundaries import SIDES
from halox.decomposition.domain import Decomposition
from halox.decomposition.field_spec import FieldSpec
from halox.decomposition.parity import PARITIES, check_checkerboard
from halox.errors import FieldError
from halox.values import as_int, shown


@dataclass(frozen=True, eq=False)
class FieldLayout:
    """Positions of a field's points in the array of one rank and in the grid; `halox.Grid.layout` returns it.

    A grid has one object for equal properties, which is compared by identity.

    Parameters
    ----------
    decomposition : Decomposition
        The grid and its ranks.
    rank : int
        The array's rank.
    spec : FieldSpec
        Properties of the field; the same on all ranks.

    Raises
    ------
    DecompositionError
        For a field of one parity, if an extent is odd, or a block along the last axis begins at an odd cell.

    Examples
    --------
    >>> from halox.decomposition import decompose
    >>> domain = decompose((10, 8), 4, periodic=True, proc_shape=(2, 2))
    >>> layout = FieldLayout(domain, 1, FieldSpec(((1, 1), (2, 0)), components_after=(3,)))
    >>> layout.padded_shape, layout.origin
    ((7, 6, 3), (-1, 2))
    >>> layout.owned
    (slice(0, 5, None), slice(4, 8, None))
    >>> layout.interior
    (slice(1, 6, None), slice(2, 6, None), slice(None, None, None))
    """

    decomposition: Decomposition
    rank: int
    spec: FieldSpec

    def __post_init__(self) -> None:
        """Check the cuts of the grid for a field of one parity."""
        if self.spec.parity is not None:
            check_checkerboard(self.decomposition.axes)

    def __repr__(self) -> str:
        """Return text with the shape of the rank's array and the properties of its axes."""
        spec = self.spec
        facts: dict[str, object] = {
            "rank": self.rank,
            "padded shape": self.padded_shape,
            "halo": spec.halo,
            "owned": ", ".join(f"{cut.start}:{cut.stop}" for cut in self.owned),
        }
        for name, components in (
            ("components before", spec.components_before),
            ("components after", spec.components_after),
        ):
            if components:
                facts[name] = components
        if any(spec.staggered):
            facts["staggered"] = spec.staggered
        if spec.parity is not None:
            facts["parity"] = f"{spec.parity}, last axis in pairs"
        if spec.offsets:
            facts["offsets"] = spec.offsets
        text = ", ".join(f"{name} {value}" for name, value in facts.items())
        return f"<halox field layout: {text}>"

    @cached_property
    def cells(self) -> tuple[AxisLayout, ...]:
        """Grid axes of the array, in cells even for a field of one parity."""
        coords = self.decomposition.coords_of(self.rank)
        return tuple(self.along(axis, part) for axis, part in enumerate(coords))

    def along(self, axis: int, part: int) -> AxisLayout:
        """Return a grid axis of the array of a part along it, in cells."""
        spec, partition = self.spec, self.decomposition.axes[axis]
        return AxisLayout.of(partition, part, spec.halo[axis], spec.staggered[axis], spec.offsets)

    @cached_property
    def _axes(self) -> tuple[AxisLayout, ...]:
        """Grid axes of the array as stored; for one parity the last axis is in pairs."""
        *others, last = self.cells
        return (*others, last if self.spec.parity is None else last.in_pairs())

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the rank's array, with halo and component axes."""
        return self._with_components(tuple(axis.stored for axis in self._axes))

    @cached_property
    def is_flat_somewhere(self) -> bool:
        """Whether a grid axis of the array has one point on some ranks, and more points on other ranks.

        On ranks with one point, arrays in C and in Fortran order may have the same strides. On ranks with more points
        the strides differ.
        """
        for index, axis in enumerate(self.decomposition.axes):
            of_parts = (self.along(index, part) for part in range(axis.parts))
            in_pairs = self.spec.parity is not None and index == self.spec.ndim - 1
            stored = {(along.in_pairs() if in_pairs else along).stored for along in of_parts}
            if 1 in stored and len(stored) > 1:
                return True
        return False

    @cached_property
    def is_wide(self) -> bool:
        """Whether an exchange fills a halo that is wider than a neighbour's block, on any rank."""
        spec, most = self.spec, max(self.spec.offsets, default=None)
        per_axis = zip(self.decomposition.axes, spec.halo, spec.staggered, strict=True)
        return any(
            limit is not None and (width if most is None else min(width, most)) > limit
            for axis, halo, staggered in per_axis
            for width, limit in zip(halo, axis.width_limits(staggered), strict=True)
        )

    @property
    def origin(self) -> tuple[int, ...]:
        """Global index of the array's first point, per grid axis; negative in a low halo.

        Along the last axis of a field of one parity, `origin` and `owned` count pairs of cells.
        """
        return tuple(axis.start - axis.low for axis in self._axes)

    @cached_property
    def interior(self) -> tuple[slice, ...]:
        """Index of the owned points in the array, with the whole component axes."""
        grid = tuple(slice(axis.low, axis.low + axis.points) for axis in self._axes)
        before, after = self.spec.components_before, self.spec.components_after
        return (slice(None),) * len(before) + grid + (slice(None),) * len(after)

    @cached_property
    def owned(self) -> tuple[slice, ...]:
        """Global index of the owned points, per grid axis."""
        return tuple(slice(axis.start, axis.start + axis.points) for axis in self._axes)

    @cached_property
    def owned_of_ranks(self) -> tuple[tuple[slice, ...], ...]:
        """`owned` of every rank."""
        ranks = range(self.decomposition.ranks)
        return tuple(FieldLayout(self.decomposition, rank, self.spec).owned for rank in ranks)

    @property
    def stored(self) -> tuple[slice, ...]:
        """Global index of the array's points, halo included, per grid axis."""
        return tuple(
            slice(axis.start - axis.low, axis.start + axis.points + axis.high)
            for axis in self._axes
        )

    @cached_property
    def points(self) -> tuple[int, ...]:
        """Points of the whole grid per grid axis, in cells even for a field of one parity."""
        axes = zip(self.decomposition.axes, self.spec.staggered, strict=True)
        return tuple(axis.points(staggered) for axis, staggered in axes)

    @cached_property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole field, component axes included; for one parity the last grid axis counts pairs."""
        *others, last = self.points
        return self._with_components((*others, last if self.spec.parity is None else last // 2))

    @cached_property
    def within_grid(self) -> list[tuple[AxisLayout, tuple[bool, bool]]]:
        """`AxisLayout.within_grid` of each grid axis."""
        pairs = zip(self.cells, self.points, strict=True)
        return [along.within_grid(points) for along, points in pairs]

    @property
    def within_walls(self) -> tuple[slice, ...]:
        """Index of the array's points that are not beyond a wall, per grid axis, in cells."""
        return tuple(
            slice(None) if periodic else slice(axis.low, axis.low + axis.points)
            for (axis, _), periodic in zip(
                self.within_grid, self.decomposition.periodic, strict=True
            )
        )

    @cached_property
    def at_wall(self) -> tuple[tuple[bool, bool], ...]:
        """Per grid axis, whether the rank's block is the first and the last one, along periodic axes, too."""
        decomposition = self.decomposition
        coords = decomposition.coords_of(self.rank)
        return tuple(
            (at == 0, at == axis.parts - 1)
            for at, axis in zip(coords, decomposition.axes, strict=True)
        )

    def indices(self, xp: Any, *, halo: bool) -> tuple[Any, ...]:
        """Return the global indices of the owned or stored points, as `halox.Grid.indices` describes them."""
        cuts = self.stored if halo else self.owned
        *others, last = xp.ix_(*(xp.arange(cut.start, cut.stop) for cut in cuts))
        if self.spec.parity is not None:
            last = 2 * last + (sum(others) + PARITIES.index(self.spec.parity)) % 2
        return (*others, last)

    def is_at_end(self, axis: int, side: str) -> bool:
        """Whether the rank's block is the last one towards a side; `FieldError` if there is no such side."""
        if side not in SIDES:
            raise FieldError(f"side must be 'low' or 'high', got {shown(side)}")
        return self.at_wall[axis][SIDES.index(side)]

    def is_at_wall(self, axis: int, side: str) -> bool:
        """Whether `is_at_end`, and the axis is not periodic or joined there."""
        is_at_end, joined = self.is_at_end(axis, side), self.decomposition.joined_sides
        is_open = self.decomposition.periodic[axis] or (axis, SIDES.index(side)) in joined
        return is_at_end and not is_open

    def wall(self, axis: int, side: str, depth: int, *, halo: bool) -> tuple[slice, ...]:
        """Return the index of the cells next to a wall, as `halox.Grid.wall` describes them."""
        is_there = self.is_at_wall(axis, side)
        index = [slice(None)] * len(self.padded_shape) if halo else list(self.interior)
        place = self.spec.grid_axes[axis]
        owned, number = self.interior[place], as_int(depth)
        extent = owned.stop - owned.start
        if number is None or number < 0 or (is_there and number > extent):
            raise FieldError(f"depth must be an int from 0 to {extent}, got {shown(depth)}")
        if not is_there:
            index[place] = slice(owned.start, owned.start)
        elif side == "low":
            index[place] = slice(0 if halo else owned.start, owned.start + number)
        else:
            index[place] = slice(owned.stop - number, None if halo else owned.stop)
        return tuple(index)

    def _with_components(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        return self.spec.components_before + grid + self.spec.components_after


def component_axes(
    shape: tuple[int, ...], grid: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the component axes before and after the grid axes, for each place of the grid axes in an array's shape.

    Examples
    --------
    >>> component_axes((12, 10, 3), (12, 10)), component_axes((4, 4, 4), (4, 4))
    ([((), (3,))], [((), (4,)), ((4,), ())])
    """
    ndim = len(grid)
    places = [n for n in range(len(shape) - ndim + 1) if shape[n : n + ndim] == grid]
    return [(shape[:n], shape[n + ndim :]) for n in places if 0 not in shape]
