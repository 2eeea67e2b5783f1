"""Values at points recorded in time, a row for each step, for `halox.Points.record` and `collect`.

Memory grows by halves, and nothing is computed in a step: on the host a row has the cells around this rank's points,
which are weighted at the end; on a GPU one launch writes the values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from halox.decomposition import FieldLayout
from halox.runtime.arrays import Array, Described, as_ndarray
from halox.runtime.gpu.devices import to_host
from halox.sampling.weights import Weights

_FIRST_ROWS = 64


class Record:
    """Rows of one field; ``launch(field, row)`` writes the values of this rank's points on a GPU, None on the host."""

    def __init__(
        self,
        described: Described,
        layout: FieldLayout,
        weights: Weights,
        xp: Any,
        launch: Callable[[Any, Any], None] | None,
    ) -> None:
        before = layout.spec.components_before
        components = before + layout.spec.components_after
        self.kind = f"{described.dtype} {layout.spec.without_boundary}"
        self.layout, self.dtype = layout, described.dtype
        self._weights, self._xp, self._launch = weights, xp, launch
        self._shape = (len(weights.columns if launch is None else weights.rows), *components)
        index, ones = [*np.indices(components)], [1] * len(components)
        index[len(before) : len(before)] = weights.columns.T.astype("i8").reshape(
            layout.spec.ndim, -1, *ones
        )
        self._places = np.ravel_multi_index(np.broadcast_arrays(*index), layout.padded_shape)
        self._chunks: list[Any] = []
        self._first = self._end = 0  # steps of the last chunk

    def add(self, field: object, step: int) -> None:
        """Set the row of a step: the last one again, or the next."""
        if step == self._end:
            self._first, self._end = step, step + max(_FIRST_ROWS, step // 2)
            self._chunks.append(self._xp.empty((self._end - step, *self._shape), self.dtype))
        row = self._chunks[-1][step - self._first]
        if self._launch is not None:
            self._launch(field, row)
            return
        array = as_ndarray(field)
        if array.flags.c_contiguous:
            array.take(self._places, out=row, mode="clip")
        else:
            row[...] = array[np.unravel_index(self._places, array.shape)]

    def values(self, steps: int) -> Array:
        """Return the values at this rank's points on the host, shape (steps, points, components)."""
        rows = np.concatenate([to_host(chunk) for chunk in self._chunks])[:steps]
        if self._launch is not None or not rows.size:
            return rows
        sums = self._weights.sums(np.moveaxis(rows, 1, 0))
        return np.moveaxis(sums, 0, 1).astype(self.dtype, copy=False)
