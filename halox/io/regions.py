"""Regions of whole fields: slices of global indices, with steps, and the points of them that a rank owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from halox.decomposition import FieldLayout
from halox.errors import FieldError
from halox.plans.regions import Cells, cells_of_range
from halox.runtime.arrays import as_ndarray
from halox.runtime.gpu.cuda import is_device_array
from halox.runtime.gpu.devices import as_device_array
from halox.values import as_list, shown

Cut: TypeAlias = tuple[slice, ...]
"""A box, or every n-th point of a box: a slice per axis, with all numbers given."""


def owned_cells(field: object, layout: FieldLayout) -> Any:
    """Return a view of the cells that this rank owns, as an array of NumPy or CuPy."""
    array = as_device_array(field) if is_device_array(field) else as_ndarray(field)
    return array[layout.interior]


def region_of(region: object, layout: FieldLayout, name: str) -> Cut:
    """Return a region of a field with all numbers given, or of the whole field if ``region`` is None.

    Raises `FieldError`, with ``name`` for the field.
    """
    spec = layout.spec
    lengths = layout.global_shape[spec.grid_slice]
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


class CellRanges:
    """Cells of a grid by their global indices, the attribute `halox.Grid.cells`; local.

    ``grid.cells[:-1, 1:, 1:]`` returns the `halox.plans.regions.Cells` of this range that the rank owns. They index
    arrays with the grid's halo, also arrays with component axes after the grid axes. ``grid.cells.of(u)[:-1, 1:, 1:]``
    index any field ``u``.
    There is a slice for each grid axis, with negative numbers as in Python and without a step. As in NumPy, an ellipsis
    stands for whole axes, and so do missing slices. Ranks that own no cell of the range get an empty box, whose
    ``shape`` has a 0.

    Raises `halox.errors.FieldError`, on all ranks, for anything else, and for a range without cells of the grid.

    Examples
    --------
    >>> import halox
    >>> with halox.Grid((4, 6), device="cpu") as grid:
    ...     u, here = grid.zeros(), grid.cells[1:, -2:]
    ...     u[here] = 1 + u[here.shifted(-1, 0)]
    ...     grid.sum(u), grid.cells.of(grid.zeros(components=3))[..., 1:].shape == grid.cells[:, 1:].shape
    (np.float64(6.0), True)
    """

    def __init__(self, layout: FieldLayout, find: Callable[[Any], FieldLayout]) -> None:
        self._layout, self._find = layout, find

    def of(self, field: object) -> CellRanges:
        """Return the cells of a field with a layout of its own; raises the errors of `halox.Grid.layout`."""
        return CellRanges(self._find(field), self._find)

    def __getitem__(self, ranges: Any) -> Cells:
        """Return the cells of a range that this rank owns."""
        cuts = list(ranges) if isinstance(ranges, tuple) else [ranges]
        whole = [slice(None)] * (self._layout.spec.ndim - sum(cut is not ... for cut in cuts))
        place = next((n for n, cut in enumerate(cuts) if cut is ...), len(cuts))
        cuts[place : place + 1] = whole
        found = region_of(cuts, self._layout, "grid.cells")
        if any(cut.step != 1 for cut in found):
            raise FieldError(f"region: grid.cells takes slices without a step, got {shown(ranges)}")
        return cells_of_range(self._layout, found)


def region_shape(layout: FieldLayout, region: Cut = ()) -> tuple[int, ...]:
    """Return the shape of a region of a field, component axes included; an empty tuple is the whole field."""
    if not region:
        return layout.global_shape
    shape = list(layout.global_shape)
    for axis, cut in zip(layout.spec.grid_axes, region, strict=True):
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
