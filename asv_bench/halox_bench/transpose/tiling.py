"""Orders of axes that one transpose of matrices amounts to: what the hand-written tile can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from halox.errors import PathError

ELEMENTS = (1, 2, 4, 8, 16)
"""Bytes of elements that the tile moves."""


@dataclass(frozen=True)
class Tiling:
    """Arguments of ``tile.cu``, in elements; ``batches`` matrices."""

    rows: int
    columns: int
    from_pitch: int
    to_pitch: int
    from_batch: int
    to_batch: int
    batches: int

    @property
    def blocks(self) -> int:
        """Thread blocks of the launch."""
        return -(-self.rows // 32) * -(-self.columns // 32) * self.batches


def merged(shape: Sequence[int], axes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Join axes that stay neighbours in one order.

    Parameters
    ----------
    shape : sequence of int
        Of the source.
    axes : sequence of int
        For each axis of the target, the axis of the source.

    Examples
    --------
    >>> merged((2, 3, 4), (1, 2, 0)), merged((2, 3, 4), (0, 1, 2)), merged((2, 3, 4), (2, 1, 0))
    (((2, 12), (1, 0)), ((24,), (0,)), ((2, 3, 4), (2, 1, 0)))
    """
    groups: list[list[int]] = []
    for axis in axes:
        if groups and groups[-1][-1] + 1 == axis:
            groups[-1].append(axis)
        else:
            groups.append([axis])
    in_source = sorted(groups)
    extents = tuple(prod(shape[axis] for axis in group) for group in in_source)
    return extents, tuple(in_source.index(group) for group in groups)


def tiling(shape: Sequence[int], axes: Sequence[int], element_bytes: int) -> Tiling:
    """Return the transposes of matrices that turn an array.

    Raises
    ------
    PathError
        If there are none, or not for such elements.

    Examples
    --------
    >>> tiling((2, 3, 4), (0, 2, 1), 8)
    Tiling(rows=3, columns=4, from_pitch=4, to_pitch=3, from_batch=12, to_batch=12, batches=2)
    """
    if element_bytes not in ELEMENTS:
        raise PathError(
            f"the tile moves elements of 1, 2, 4, 8 or 16 bytes, not of {element_bytes}"
        )
    extents, order = merged(shape, axes)
    last = len(extents) - 1
    if order[-1] == last:
        raise PathError("the tile is for axes of which the last does not stay the last")
    if len(extents) > 3:
        raise PathError("the tile is for two axes and one that is neither's last")
    from_strides = [prod(extents[axis + 1 :]) for axis in range(len(extents))]
    to_extents = [extents[axis] for axis in order]
    to_strides = {axis: prod(to_extents[k + 1 :]) for k, axis in enumerate(order)}
    row_axis, column_axis = order[-1], last
    others = [axis for axis in order if axis not in (row_axis, column_axis)]
    batch = (
        (from_strides[others[0]], to_strides[others[0]], extents[others[0]])
        if others
        else (0, 0, 1)
    )
    return Tiling(
        extents[row_axis],
        extents[column_axis],
        from_strides[row_axis],
        to_strides[column_axis],
        *batch,
    )
