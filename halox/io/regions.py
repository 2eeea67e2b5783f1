"""Regions of whole fields: slices of global indices, with steps, and the points of them that a rank owns."""

from __future__ import annotations

from typing import TypeAlias

from halox.decomposition import FieldLayout
from halox.errors import FieldError
from halox.values import as_list, shown

Cut: TypeAlias = tuple[slice, ...]
"""A box, or every n-th point of a box: a slice per axis, with all numbers given."""


def region_of(region: object, layout: FieldLayout, name: str) -> Cut:
    """Return a region of a field with all numbers given, or of the whole field if ``region`` is None.

    Raises `FieldError`, with ``name`` for the field.
    """
    spec = layout.spec
    lengths = layout.global_shape[len(spec.components_before) :][: spec.ndim]
    cuts = [slice(None)] * spec.ndim if region is None else as_list(region)
    if cuts is None or len(cuts) != spec.ndim or not all(isinstance(c, slice) for c in cuts):
        raise FieldError(
            f"region: {name} needs {spec.ndim} slices of global indices, one per grid axis, got {shown(region)}"
        )
    if region is not None and spec.parity is not None:
        raise FieldError(f"region: {name} has {spec.parity} cells only; leave its region out")
    try:
        found = [slice(*cut.indices(n)) for cut, n in zip(cuts, lengths, strict=True)]
    except (TypeError, ValueError) as error:
        raise FieldError(f"region: {name}: {error}; give slices of integers") from error
    if any(cut.step < 1 or cut.stop <= cut.start for cut in found):
        raise FieldError(
            f"region: {name} needs slices with a positive step and at least one point of {lengths}, got "
            f"{shown(region)}"
        )
    return tuple(found)


def region_shape(layout: FieldLayout, region: Cut = ()) -> tuple[int, ...]:
    """Return the shape of a region of a field, component axes included; an empty tuple is the whole field."""
    if not region:
        return layout.global_shape
    shape = list(layout.global_shape)
    for axis, cut in enumerate(region, len(layout.spec.components_before)):
        shape[axis] = points_before(cut, shape[axis])
    return tuple(shape)


def points_before(cut: slice, bound: int) -> int:
    """Return how many of the points of a slice are below a global index.

    Examples
    --------
    >>> points_before(slice(1, 8, 3), 4), points_before(slice(1, 8, 3), 5)
    (1, 2)
    """
    return len(range(cut.start, min(bound, cut.stop), cut.step))


def place_of(region: Cut, owned: Cut) -> Cut:
    """Return the places of the owned points among the points of the region, along each axis.

    Examples
    --------
    >>> place_of((slice(1, 8, 3),), (slice(4, 8),))
    (slice(1, 3, None),)
    """
    return tuple(
        slice(points_before(cut, block.start), points_before(cut, block.stop))
        for cut, block in zip(region, owned, strict=True)
    )


def points_of(region: Cut, owned: Cut) -> Cut:
    """Return the index of the region's points in the array of the owned points.

    Examples
    --------
    >>> points_of((slice(1, 8, 3),), (slice(3, 8),))
    (slice(1, 5, 3),)
    """
    cuts = []
    for cut, block in zip(region, owned, strict=True):
        first = cut.start + cut.step * points_before(cut, block.start)
        last = max(first, min(block.stop, cut.stop))
        cuts.append(slice(first - block.start, last - block.start, cut.step))
    return tuple(cuts)
