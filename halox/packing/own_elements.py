"""Check that a datatype on a view of an array touches only the view's own elements.

Displacements of a datatype are in bytes of memory, as in MPI. In an array without gaps, consecutive
items are consecutive elements. In a view with gaps, ``A[:, 1]``, four consecutive items are one element
of the view and three elements of other columns. A datatype on such a view may therefore touch only the
view's elements, and each block only elements that are consecutive in memory and in their index::

    A  .  #  .  .  .  #  .  .  .  #  .  .     # A[:, 1], an axis of stride 4
          ^--------                           contiguous(3): refused
          ^           ^           ^           vector(3, 1, 4): its elements

Grids skip this check: their boxes are made from the array's own strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np

from halox.datatypes import Datatype
from halox.datatypes.arguments import Int64Array
from halox.errors import FieldError

Axes = list[tuple[int, int]]
"""Pairs of a number of steps and a positive stride, largest stride first. The last axis walks the bytes of a run."""


def check_own_elements(
    name: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    datatype: Datatype,
    count: int,
) -> None:
    """Raise `FieldError` for a datatype that touches memory between the elements of a view.

    ``name`` is the array's name, for the error. The error says how to describe the view's elements.
    ``strides`` are in bytes. If the elements are one run of memory, in any order of the axes, every
    datatype passes. Its displacements may then leave the array, as in MPI. Touches no device.
    """
    if _are_own(shape, strides, itemsize, datatype, count):
        return
    low, high = datatype.reach(count)
    zeros = (0,) * len(shape)
    raise FieldError(
        f"{name} is a view of shape {shape} and strides {strides} with memory between its elements, and {count} "
        f"item(s) of {datatype!r} touch bytes {low} to {high} from its first one, which are not all its own: "
        "displacements count bytes of memory, as in MPI. Describe its elements by halox.datatypes.slab(a.shape, "
        f"a.strides, {zeros}, a.shape, a.dtype), or by a vector with its stride; or give a contiguous array "
        "(np.ascontiguousarray makes a copy), or the whole array that it is a view of"
    )


@lru_cache(maxsize=64)
def _are_own(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    datatype: Datatype,
    count: int,
) -> bool:
    """Whether each block of some items is within a run of the view, or the view has no gaps."""
    axes = _axes(shape, strides, itemsize)
    low, high = datatype.reach(count)
    if low == high or 0 in shape or prod(shape) * itemsize == axes[-1][0]:
        return True
    first = sum((n - 1) * -stride for n, stride in zip(shape, strides, strict=True) if stride < 0)
    if low + first < 0 or high + first > 1 + sum((n - 1) * step for n, step in axes):
        return False
    layout = datatype.items(count)
    form = layout.strided
    if form is None:
        blocks = layout.block_list()
        return _are_within_runs(axes, blocks.offsets + first, blocks.lengths)
    levels = [*zip(form.counts, form.strides, strict=True)]
    block = np.array([form.offset + first])
    # A level may walk along several axes at once. Only a list of all blocks then gives the answer.
    return _are_within_runs(axes, block, form.block_bytes, levels) or _are_within_runs(
        axes, form.offsets() + first, form.block_bytes
    )


def _axes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Axes:
    """Return the axes over the runs of an array: elements that are consecutive both in memory and along an axis."""
    run = itemsize
    axes: Axes = []
    along = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n > 1 and stride]
    for n, stride in sorted(along, key=lambda axis: abs(axis[1])):
        step = abs(stride)
        if not axes and 0 < stride <= run and stride % itemsize == 0:
            run += (n - 1) * stride
        elif axes and step % axes[-1][1] == 0 and step <= axes[-1][0] * axes[-1][1]:
            inner, distance = axes[-1]
            axes[-1] = (inner + (n - 1) * (step // distance), distance)
        else:
            axes.append((n, step))
    return [*reversed(axes), (run, 1)]


def _are_within_runs(
    axes: Axes,
    rest: Int64Array,
    lengths: Int64Array | int,
    levels: Sequence[tuple[int, int]] = (),
) -> bool:
    """Whether blocks at offsets ``rest`` from the lowest byte are within runs.

    ``levels`` repeat the blocks, each along one axis. A result of False may be wrong for blocks with levels.
    """
    low = []
    for n, step in axes:
        low.append(np.clip(rest // step, 0, n - 1))
        rest = rest - low[-1] * step
    high = [*low[:-1], low[-1] + lengths - 1]
    for count, stride in levels:
        if stride:
            axis = next(axis for axis, (_, step) in enumerate(axes) if stride % step == 0)
            end = low if stride < 0 else high
            end[axis] = end[axis] + (count - 1) * stride // axes[axis][1]
    inside = [(a >= 0) & (b < n) for a, b, (n, _) in zip(low, high, axes, strict=True)]
    return not rest.any() and all(each.all() for each in inside)
