"""Linear interpolation at points of a grid, as weights of the cells around each point.

A point with the fractional index 2.25 has 0.75 of cell 2 and 0.25 of cell 3. To read, the rank that owns cell 2 takes
both, cell 3 perhaps from its halo. To add, the adjoint, each rank adds to the cells that it owns, and needs no halo.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from halox.decomposition import FieldLayout
from halox.errors import FieldError
from halox.reductions.operations import wide_dtype
from halox.runtime.arrays import Array
from halox.values import shown


class Corners(NamedTuple):
    """The cells around each point, lower cell first: global indices (points, corners, axes), and their weights.

    Along an axis with integer indices only, a point has one cell, so that points at cells have one corner of weight 1.
    """

    cells: Array
    weights: Array
    splits: list[bool]  # axes with fractional indices

    @classmethod
    def of(cls, indices: Array) -> Corners:
        """Return the corners of points.

        Examples
        --------
        >>> corners = Corners.of(np.array([[2.25, 4.0]]))
        >>> corners.cells.tolist(), corners.weights.tolist()
        ([[[2, 4], [3, 4]]], [[0.75, 0.25]])
        """
        lower = np.floor(indices)
        rest = (indices - lower)[:, np.newaxis]
        splits = [bool(along.any()) for along in rest[:, 0].T]
        sides = np.array(list(product(*((0, 1) if split else (0,) for split in splits))))
        cells = lower.astype("i8")[:, np.newaxis] + sides
        return cls(cells, np.where(sides, rest, 1 - rest).prod(axis=2), splits)


class Weights(NamedTuple):
    """Weights of one rank by rows, which are points to read, or cells to add to: row r ends before ``starts[r + 1]``.

    Cells are indices in the rank's array, shape (.., axes).
    """

    rows: Array
    starts: Array
    columns: Array
    values: Array

    def sums(self, terms: Array) -> Array:
        """Return the weighted sums of the rows, each in the order of its entries, in the dtype of sums.

        A row of one entry of weight 1 is exact; if all are, the terms are returned.
        """
        if len(terms) == len(self.rows) and (self.values == 1).all():
            return terms
        wide, is_float = wide_dtype(terms.dtype), terms.dtype.kind in "fc"
        # Real and imaginary parts are apart, since a complex product with 1 changes -0 and infinities.
        parts = terms.astype(wide)[..., np.newaxis].view(np.empty(0, wide).real.dtype)
        if is_float:
            parts *= self.values.reshape(-1, *(1,) * terms.ndim)
        # np.add.reduceat adds in pairs. A sum that begins with -0.0 keeps the bits of its first term.
        sums = np.full((len(self.rows), *parts.shape[1:]), -0.0 if is_float else 0, parts.dtype)
        width = sums[0].size
        places = np.repeat(width * np.arange(len(sums)), np.diff(self.starts))
        places = (places[:, np.newaxis] + np.arange(width)).reshape(-1)
        np.add.at(sums.reshape(-1), places, parts.reshape(-1))
        return np.asarray(sums.view(wide)[..., 0])


def check_points(layout: FieldLayout, indices: Array, splits: list[bool]) -> None:
    """Raise `FieldError` unless a field has the cells around all points; the same on all ranks."""
    spec = layout.spec
    if spec.parity is not None:
        raise FieldError("field: a field of one parity has no points; give a field of all cells")
    for axis, cut in enumerate(layout.decomposition.axes):
        low, high = spec.halo[axis]
        if splits[axis] and high + spec.staggered[axis] == 0:
            raise FieldError(
                f"indices: fractional indices along axis {axis} need a halo on its high side, and the field has none; "
                "make it with halo=1, or round the indices"
            )
        x, last = indices[:, axis], cut.points(spec.staggered[axis]) - 1 + high
        outside = np.flatnonzero((x < -low) | (x > last))
        if len(outside) and not cut.periodic:
            raise FieldError(
                f"indices: point {outside[0]} is at {x[outside[0]]:g} along axis {axis}, which has the cells {-low} to "
                f"{last}, halo included; leave out points beyond them"
            )


def owners(layout: FieldLayout, cells: Array) -> Array:
    """Return the rank of each cell, given by global indices (cells, axes); beyond a wall, the nearest rank."""
    cut = layout.decomposition
    parts = [
        np.clip(np.searchsorted(axis.bounds, along, "right") - 1, 0, axis.parts - 1)
        for axis, along in zip(cut.axes, _wrapped(layout, cells).T, strict=True)
    ]
    return np.asarray(np.take(cut.placement.rank_of, np.ravel_multi_index(parts, cut.proc_shape)))


def owner(layout: FieldLayout, cells: npt.ArrayLike) -> Array:
    """Return the ranks of a user's cells, as `halox.Grid.owner`."""
    found, ndim = np.asarray(cells), layout.spec.ndim
    if found.dtype.kind not in "iu" or found.shape[-1:] != (ndim,):
        raise FieldError(f"cells: expected integers of shape (n, {ndim}), got {shown(cells)}")
    return owners(layout, found.reshape(-1, ndim)).reshape(found.shape[:-1])


def reading(layout: FieldLayout, corners: Corners) -> Weights:
    """Return the weights of the cells at the points whose lower cell this rank owns."""
    lower = corners.cells[:, 0]
    points = np.flatnonzero(owners(layout, lower) == layout.rank)
    moves = (_wrapped(layout, lower) - lower - layout.origin)[points]
    used = corners.weights[points] != 0  # other cells may be outside the array, or NaN
    cells = (corners.cells[points] + moves[:, np.newaxis])[used]
    starts = np.append(0, np.cumsum(used.sum(axis=1)))
    return Weights(points, starts, cells, corners.weights[points][used])


def adding(layout: FieldLayout, corners: Corners) -> Weights:
    """Return the weights of the points, in their order, at the cells that this rank owns."""
    cells = _wrapped(layout, corners.cells)
    first, end = np.array([(cut.start, cut.stop) for cut in layout.owned]).T
    used = ((cells >= first) & (cells < end)).all(axis=2) & (corners.weights != 0)
    cells, points = cells[used] - layout.origin, np.nonzero(used)[0]
    order = np.lexsort(cells.T)  # stable
    cells = cells[order]
    is_first = np.ones(len(cells), bool)
    is_first[1:] = (cells[1:] != cells[:-1]).any(axis=1)
    starts = np.append(np.flatnonzero(is_first), len(cells))
    return Weights(cells[is_first], starts, points[order], corners.weights[used][order])


def _wrapped(layout: FieldLayout, cells: Array) -> Array:
    """Return global indices within the grid along periodic axes."""
    cut = layout.decomposition
    wrapped: Any = np.where(cut.periodic, cells % cut.grid_shape, cells)
    return wrapped  # type: ignore[no-any-return]
