"""Arguments of points and particles: places by coordinates or indices, and values to add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from halox.decomposition import FieldLayout
from halox.domain.dimension_names import FACE, Labels, with_faces
from halox.errors import FieldError
from halox.runtime.arrays import Array, Described
from halox.runtime.gpu.devices import as_device_array, to_host
from halox.values import check_unmasked, shortened, shown


def as_points(points: Any, ndim: int, name: str) -> Array:
    """Return points as a new array of float64, shape (n, axes); `FieldError` for another shape, NaN and infinities."""
    try:
        found = to_host(points, name).astype("f8", casting="same_kind")
    except Exception as error:  # NumPy raises several types
        raise FieldError(
            f"{name}: expected numbers, got {shown(points)} ({shortened(str(error))})"
        ) from None
    if found.ndim == 1 and (ndim == 1 or not len(found)):
        found = found.reshape(-1, ndim)
    if found.ndim != 2 or found.shape[1] != ndim or not np.isfinite(found).all():
        raise FieldError(
            f"{name}: expected finite numbers of shape (n, {ndim}), a row for each point, got {shown(points)}"
        )
    return found


def as_numbers(
    values: Any, field: Described, shape: tuple[int, ...], xp: Any, *, by_point: bool = False
) -> Any:
    """Return values to add at points, shape (points, components): contiguous, in the field's dtype and memory.

    With ``by_point`` values of one axis are a number for each point, and a single number gives a single row. Raises
    `FieldError` for values that do not fit the shape or the field.
    """
    check_unmasked(values, "values")
    dtype = field.dtype
    try:
        given: Any = to_host(values) if field.device is None else as_device_array(values)
        if by_point and given.ndim == 0:
            shape = (1, *shape[1:])
        if by_point and given.ndim == 1:
            given = given.reshape(-1, *(1,) * len(shape[1:]))
        numbers = xp.broadcast_to(given, shape)
    except ValueError:
        raise FieldError(
            f"values: expected a number or an array that broadcasts to {shape}, got {shown(values)}"
        ) from None
    if not (
        field.writable and dtype.kind in "iufc" and np.can_cast(given.dtype, dtype, "same_kind")
    ):
        kind = f"{'' if field.writable else 'read-only '}field of {dtype}"
        raise FieldError(f"values: numbers of {given.dtype} cannot be added to a {kind}")
    return xp.ascontiguousarray(numbers, dtype)


def grid_first(array: Any, layout: FieldLayout) -> Any:
    """View a field's array with the grid axes before the component axes."""
    axes, along = [*range(array.ndim)], layout.spec.grid_slice
    return array.transpose(axes[along] + axes[: along.start] + axes[along.stop :])


def indices_of(positions: Mapping[Any, Any], labels: Labels) -> Array:
    """Return the fractional indices of positions by dimension, as `halox.Points` describes them."""
    staggered = [name + FACE in positions for name in labels.dims]
    names = with_faces(labels.dims, staggered)
    if {*names} != {*positions}:
        raise FieldError(
            f"indices: expected a mapping with the dimensions {', '.join(names)}, or faces, as {names[0] + FACE}, got "
            f"{shown(list(positions))}"
        )
    along = [np.atleast_1d(to_host(positions[name], f"indices[{name!r}]")) for name in names]
    try:
        points = np.stack(np.broadcast_arrays(*along), axis=-1)
    except ValueError:
        shapes = ", ".join(str(each.shape) for each in along)
        raise FieldError(f"indices: the positions have unlike shapes, {shapes}") from None
    return locate(points, labels, staggered)


def locate(points: Any, labels: Labels, staggered: Sequence[bool]) -> Array:
    """Return the fractional indices of points, as `halox.Grid.locate` describes them."""
    found = as_points(points, len(labels.dims), "points")
    for axis, name in enumerate(labels.dims):
        along = labels.along(axis, staggered[axis])
        if along is not None:
            at = along.values
            steps = np.diff(at.astype("f8")) if at.dtype.kind in "iuf" else np.zeros(0)
            if not len(steps) or not ((steps > 0).all() or (steps < 0).all()):
                raise FieldError(
                    f"coords[{name!r}]: expected at least 2 real numbers that rise or fall, got {shown(at)}"
                )
            found[:, axis] = _index(found[:, axis], at.astype("f8"))
    return found


def _index(x: Array, at: Array) -> Array:
    """Return the fractional index of coordinates among those of cells."""
    if at[0] > at[-1]:
        at, x = -at, -x
    index = np.interp(x, at, np.arange(len(at)))
    low, high = x < at[0], x > at[-1]
    index[low] = (x[low] - at[0]) / (at[1] - at[0])
    index[high] = len(at) - 1 + (x[high] - at[-1]) / (at[-1] - at[-2])
    return index
