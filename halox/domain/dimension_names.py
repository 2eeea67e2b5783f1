"""Names and coordinates of the dimensions of fields, in labelled arrays and in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import numpy as np

from halox.decomposition import Decomposition, FieldSpec
from halox.errors import FieldError
from halox.runtime.arrays import Array
from halox.runtime.gpu.devices import to_host
from halox.values import as_list, check_unmasked, shown

AXES = ("x", "y", "z", "t")
"""Default names of the grid axes."""

FACE = "_face"
"""Suffix of the name of a staggered axis."""


def axis_names(dims: object, ndim: int) -> tuple[str, ...]:
    """Return the user's names of the grid axes, or `AXES` for None; raises `FieldError`.

    Examples
    --------
    >>> axis_names(None, 2), axis_names(["lat", "lon"], 2)
    (('x', 'y'), ('lat', 'lon'))
    """
    given = as_list(AXES[:ndim] if dims is None else dims)
    names = [axis for axis in given or () if isinstance(axis, str)]
    if given is None or len(names) < len(given) or len(set(names)) != ndim or len(names) != ndim:
        raise FieldError(f"dims must name {ndim} grid axes, got {shown(dims)}")
    if any(name + FACE in names for name in names):
        raise FieldError(
            f"dims must not name an axis like another's faces, got {shown(dims)}; rename one"
        )
    return tuple(names)


def with_faces(axes: Sequence[str], staggered: Iterable[bool]) -> list[str]:
    """Return the names of a field's grid dimensions: the axes, with `FACE` appended to the staggered axes.

    Examples
    --------
    >>> with_faces(("x", "y"), (False, True))
    ['x', 'y_face']
    """
    return [
        axis + FACE if is_staggered else axis
        for axis, is_staggered in zip(axes, staggered, strict=True)
    ]


class GridCoords(dict[str, Array]):
    """Coordinates of all points of a grid by dimension, the attribute `halox.Grid.coords`.

    In earlier versions it had the process coordinates, a tuple. Therefore uses of a tuple raise `TypeError`.
    """

    def __iter__(self) -> NoReturn:
        """Raise an error, since programs may unpack the process coordinates; `keys` and `items` can be iterated."""
        raise TypeError(
            "grid.coords has coordinates by dimension, as in grid.coords['x'], and keys() and items() to iterate; "
            "grid.proc_coords are this rank's coordinates in the process grid"
        )

    def __missing__(self, key: object) -> Array:
        """Raise an error for an unknown dimension, and for numbers."""
        if isinstance(key, str):
            raise KeyError(key)
        self.__iter__()

    def __eq__(self, other: object) -> bool:
        """Compare with other mappings; raise an error for tuples."""
        if isinstance(other, tuple):
            self.__iter__()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        """Compare as `__eq__`."""
        return not self == other


class Coordinates(NamedTuple):
    """Coordinates of all points of the grid along a dimension, and their attributes, such as units."""

    values: Array
    attrs: dict[str, Any]


@dataclass(frozen=True)
class Labels:
    """Names of the axes of a grid, and coordinates along them; the defaults of all calls that store or label fields.

    Attributes
    ----------
    grid : Decomposition
        The axes.
    dims : tuple of str
        Names of the grid axes.
    given : dict
        The caller's coordinates, by the number of the axis and whether they belong to a staggered field.
    """

    grid: Decomposition
    dims: tuple[str, ...]
    given: Mapping[tuple[int, bool], Coordinates] = field(default_factory=dict)

    def updated(self, dims: object, coords: object, *, numbers: bool = True) -> Labels:
        """Return these labels with the arguments ``dims`` and ``coords`` of a call, each None for no change.

        Raises `FieldError` if ``dims`` does not name each axis, or ``coords`` has an unknown dimension, a wrong number
        of points or, with ``numbers``, values that are no numbers or dates.
        """
        names = self.dims if dims is None else axis_names(dims, len(self.dims))
        places = {
            name + FACE * is_staggered: (axis, is_staggered)
            for is_staggered in (False, True)
            for axis, name in enumerate(names)
        }
        if coords is not None and not isinstance(coords, Mapping):
            raise FieldError(
                f"coords must be a mapping of dimensions to coordinates, got {shown(coords)}"
            )
        given = dict(self.given)
        for name, values in (coords or {}).items():
            if name not in places:
                raise FieldError(
                    f"coords has {name!r}, and the grid has the dimensions {', '.join(places)}; give one-dimensional "
                    "coordinates by these names"
                )
            axis, is_staggered = places[name]
            points = self.grid.axes[axis].points(is_staggered)
            given[axis, is_staggered] = _coordinates(name, values, points, numbers)
        return replace(self, dims=names, given=given)

    def along(self, axis: int, is_staggered: bool) -> Coordinates | None:
        """Return the coordinates along an axis of a field, or None.

        If only cells or only faces have coordinates, and these are numbers, the other points lie halfway between them.
        """
        found, other = (self.given.get((axis, kind)) for kind in (is_staggered, not is_staggered))
        if found is not None or other is None:
            return found
        values, points = other.values, self.grid.axes[axis].points(is_staggered)
        if len(values) == 1 or values.dtype.kind not in "iuf":
            return None
        values = values.astype("f8")
        before, after = beyond(values, int(is_staggered)), beyond(values[::-1], 1)
        values = np.concatenate([before, values, after])
        return Coordinates(((values[:-1] + values[1:]) / 2)[:points], other.attrs)

    def all_coords(self) -> GridCoords:
        """Return the coordinates of all cells and faces that have some, read-only."""
        found = GridCoords()
        for axis, name in enumerate(self.dims):
            for is_staggered in (False, True):
                along = self.along(axis, is_staggered)
                if along is not None:
                    values = found[name + FACE * is_staggered] = along.values.view()
                    values.flags.writeable = False
        return found

    def of_fields(self, specs: Iterable[FieldSpec]) -> dict[str, Coordinates]:
        """Return the coordinates to store with fields, by dimension."""
        places = {place for spec in specs for place in enumerate(spec.staggered)} | {*self.given}
        found = {
            self.dims[axis] + FACE * is_staggered: self.along(axis, is_staggered)
            for axis, is_staggered in sorted(places)
        }
        return {name: along for name, along in found.items() if along is not None}

    def text(self) -> str:
        """Return a text that is the same on all ranks if the given coordinates are."""
        given = self.of_fields(()).items()
        return ", ".join(f"{k} of checksum {crc32(v.values.tobytes()):08x}" for k, v in given)


def _coordinates(name: str, given: object, points: int, numbers: bool) -> Coordinates:
    check_unmasked(given, f"coords[{name!r}]")
    try:
        values = np.array(to_host(getattr(given, "values", given)))
    except (TypeError, ValueError):
        raise FieldError(f"coords[{name!r}] must be an array, got {shown(given)}") from None
    if values.shape != (points,):
        raise FieldError(
            f"coords[{name!r}] must have one axis of {points} values, one for each point of the whole grid, got "
            f"shape {values.shape}"
        )
    if numbers and values.dtype.kind not in "biufcM":
        raise FieldError(
            f"coords[{name!r}] must be numbers or datetime64, got {values.dtype}; give others to grid.dataarray"
        )
    if numbers and values.dtype.kind == "M" and not np.array_equal(values, values.astype("M8[us]")):
        raise FieldError(
            f"coords[{name!r}] has NaT, or dates of parts of a microsecond, which cannot be stored; round them, as by "
            'astype("M8[us]")'
        )
    return Coordinates(values, dict(getattr(given, "attrs", {})))


def beyond(values: Array, count: int) -> Array:
    """Return ``count`` coordinates before the first one, nearest first, at the same spacing or else repeated.

    Examples
    --------
    >>> beyond(np.array([0.5, 1.5]), 2)
    array([-0.5, -1.5])
    """
    if count == 0 or len(values) == 1 or values.dtype.kind not in "iufcmM":
        return np.repeat(values[:1], count)
    steps, (first, second) = np.arange(1, count + 1), values[:2]
    if values.dtype.kind in "iu":  # results may be below the range of the dtype
        first, second = int(first), int(second)
    before: Array = first - steps * (second - first)
    return before
