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

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from halox.datatypes import Datatype, StridedBlocks
from halox.errors import FieldError

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Elements:
    """Bytes of an array's elements, as runs that start at nested strides."""

    run: int  # bytes of a run: elements that are consecutive in memory and along an axis
    axes: tuple[tuple[int, int], ...]  # number and positive distance of the runs, largest first
    first: int  # offset of the array's first element from its lowest byte
    dense: bool  # whether the elements are one run of memory and do not overlap

    @property
    def reach(self) -> int:
        """Bytes from the lowest byte to the highest, both included."""
        return self.run + sum((n - 1) * step for n, step in self.axes)

    def hold(self, offsets: Int64, lengths: Int64 | int) -> bool:
        """Whether every block is within one run."""
        rest = offsets + self.first
        for n, step in self.axes:
            rest = rest - np.clip(rest // step, 0, n - 1) * step
        return bool(((rest >= 0) & (rest + lengths <= self.run)).all())

    def hold_box(self, blocks: StridedBlocks) -> bool:
        """Whether strided blocks are within runs, without listing them; a result of False may be wrong."""
        low, rest = [], blocks.offset + self.first
        for n, step in self.axes:
            low.append(min(max(rest // step, 0), n - 1))
            rest -= low[-1] * step
        low.append(rest)
        high = list(low)
        axes = (*self.axes, (self.run - blocks.block_bytes + 1, 1))
        for count, stride in zip(blocks.counts, blocks.strides, strict=True):
            if not stride:
                continue
            axis = next(i for i, (_, step) in enumerate(axes) if stride % step == 0)
            end = (count - 1) * stride // axes[axis][1]
            low[axis] += min(0, end)
            high[axis] += max(0, end)
        return all(a >= 0 and b < n for a, b, (n, _) in zip(low, high, axes, strict=True))


@lru_cache(maxsize=256)
def _elements(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> _Elements:
    """Find the runs of an array's elements, and their numbers and distances, from its shape and strides."""
    run = itemsize
    axes: list[tuple[int, int]] = []
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
    first = sum((n - 1) * -stride for n, stride in along if stride < 0)
    return _Elements(run, tuple(reversed(axes)), first, prod(shape) * itemsize == run)


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
    elements = _elements(shape, strides, itemsize)
    if elements.dense or 0 in shape:
        return
    layout = datatype.items(count)
    low, high = datatype.reach(count)
    if low == high:
        return
    if low + elements.first >= 0 and high + elements.first <= elements.reach:
        strided = layout.strided
        if strided is not None:
            if elements.hold_box(strided):
                return
            lengths: Int64 | int = strided.block_bytes
            offsets = _distinct(strided).offsets()
        else:
            blocks = layout.block_list()
            offsets, lengths = blocks.offsets, blocks.lengths
        if elements.hold(offsets, lengths):
            return
    zeros = (0,) * len(shape)
    raise FieldError(
        f"{name} is a view of shape {shape} and strides {strides} with memory between its elements, and {count} "
        f"item(s) of {datatype!r} touch bytes {low} to {high} from its first one, which are not all its own: "
        "displacements count bytes of memory, as in MPI. Describe its elements by halox.datatypes.slab(a.shape, "
        f"a.strides, {zeros}, a.shape, a.dtype), or by a vector with its stride; or give a contiguous array "
        "(np.ascontiguousarray makes a copy), or the whole array that it is a view of"
    )


def _distinct(blocks: StridedBlocks) -> StridedBlocks:
    """Return the blocks without levels of stride 0, which repeat the same bytes."""
    levels = [level for level in zip(blocks.counts, blocks.strides, strict=True) if level[1]]
    counts, strides = tuple(n for n, _ in levels), tuple(stride for _, stride in levels)
    return StridedBlocks(blocks.offset, counts, strides, blocks.block_bytes)
