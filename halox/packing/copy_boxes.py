"""Copies from one list of blocks to another with few CUDA driver calls: 2D and 3D copies of boxes, and one batch.

Blocks are given in pairs: two addresses and a length. Consecutive blocks of equal length, at equal distances on both
sides, are the rows of a box. Consecutive equal boxes at equal distances are the slices of a larger box.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from halox.runtime.gpu.copies import MAX_PITCH, PreparedBatch, PreparedMemcpy

Int64Array = npt.NDArray[np.int64]

MOST_BOXES = 64
"""Largest number of boxes of a plan, each of which is a driver call of some microseconds.

If a plan needs more boxes, one batch copies all its blocks instead.
"""

_MOST_ROWS = 1 << 14


class CopyBox(NamedTuple):
    """One copy of ``depth`` slices of ``height`` rows of ``width`` bytes.

    ``*_pitch`` and ``*_slice`` are the bytes from one row, or slice, to the next. ``source`` and ``target`` are
    addresses, or offsets from the addresses of a launch.
    """

    source: int
    target: int
    width: int
    height: int = 1
    depth: int = 1
    source_pitch: int = 0
    target_pitch: int = 0
    source_slice: int = 0
    target_slice: int = 0
    area: int = 0

    def reverse(self) -> CopyBox:
        """Return the copy from the target to the source."""
        steps = self.target_pitch, self.source_pitch, self.target_slice, self.source_slice
        return CopyBox(self.target, self.source, *self[2:5], *steps, self.area)


class Blocks(NamedTuple):
    """Copies of contiguous bytes: source and target addresses, lengths and areas, each of shape (n,).

    An area numbers a pair of allocations. The driver rejects a box that spans several allocations on a side.
    """

    source: Int64Array
    target: Int64Array
    lengths: Int64Array
    areas: Int64Array


BlockColumns = tuple[Int64Array, Int64Array, Int64Array]
"""Blocks of one side: address, length, and allocation number of each block."""


def common_blocks(source: BlockColumns, target: BlockColumns) -> Blocks:
    """Cut two lists of blocks with equally many bytes so that their blocks match.

    Blocks that are consecutive on both sides are merged.

    Examples
    --------
    >>> list = np.array
    >>> source = list([0, 10]), list([4, 4]), list([0, 0])
    >>> blocks = common_blocks(source, (list([100, 200]), list([2, 6]), list([0, 1])))
    >>> [column.tolist() for column in blocks]
    [[0, 2, 10], [100, 200, 202], [2, 2, 4], [0, 1, 1]]
    """
    starts = [np.cumsum(lengths) - lengths for _, lengths, _ in (source, target)]
    cuts = np.union1d(*starts)
    columns, areas = [], np.zeros(cuts.size, np.int64)
    for (addresses, _, numbers), first in zip((source, target), starts, strict=True):
        block = np.searchsorted(first, cuts, "right") - 1
        columns.append(addresses[block] + (cuts - first[block]))
        areas = areas * (numbers.max() + 1) + numbers[block]
    lengths = np.diff(cuts, append=int(source[1].sum()))
    joined = areas[1:] == areas[:-1]
    for addresses in columns:
        joined &= addresses[1:] == addresses[:-1] + lengths[:-1]
    first = np.append(0, np.flatnonzero(~joined) + 1)
    return Blocks(
        columns[0][first], columns[1][first], np.add.reduceat(lengths, first), areas[first]
    )


def boxes_of(blocks: Blocks, most: int = MOST_BOXES) -> tuple[list[CopyBox], Blocks]:
    """Return boxes, and the blocks that are not in a box; no boxes if there would be more than ``most``.

    If exactly one block is not in a box, it is returned as a box of one row.
    """
    rows = _rows(blocks)
    boxes = [] if rows is None else _slices(rows)
    alone = [box for box in boxes if box.height == 1]
    others = [box for box in boxes if box.height > 1]
    if rows is None or len(others) > most:
        return [], blocks
    if len(alone) == 1:
        return boxes, Blocks(*np.zeros((4, 0), np.int64))
    columns = [(box.source, box.target, box.width, box.area) for box in alone]
    return others, Blocks(*np.array(columns, np.int64).reshape(-1, 4).T)


def _rows(blocks: Blocks) -> list[CopyBox] | None:
    """Join blocks to boxes of one slice; None if there are too many boxes to process one by one."""
    source, target, lengths, areas = blocks
    steps = np.diff(source), np.diff(target)
    fits = (lengths[1:] == lengths[:-1]) & (lengths[:-1] <= np.minimum(*steps))
    fits &= (np.maximum(*steps) <= MAX_PITCH) & (areas[1:] == areas[:-1])
    # Indices k such that step k + 1 differs from step k, or cannot be a step within a box.
    changes = np.flatnonzero(
        ~fits[1:] | (steps[0][1:] != steps[0][:-1]) | (steps[1][1:] != steps[1][:-1])
    )
    boxes, at, n = [], 0, lengths.size
    while at < n:
        end = at + 1
        if at + 1 < n and fits[at]:
            place = int(np.searchsorted(changes, at))
            end = int(changes[place]) + 2 if place < changes.size else n
        box = CopyBox(int(source[at]), int(target[at]), int(lengths[at]), area=int(areas[at]))
        if end > at + 1:
            pitches = int(steps[0][at]), int(steps[1][at])
            box = box._replace(height=end - at, source_pitch=pitches[0], target_pitch=pitches[1])
        boxes.append(box)
        at = end
        if len(boxes) > _MOST_ROWS:
            return None
    return boxes


def _slices(rows: list[CopyBox]) -> list[CopyBox]:
    """Join boxes of one slice to boxes of several slices."""
    boxes: list[CopyBox] = []
    for box in rows:
        last = boxes[-1] if boxes else None
        if last is None or last[2:4] != box[2:4] or last[5:7] != box[5:7] or box.height == 1:
            boxes.append(box)
            continue
        steps = (
            box.source - last.source - (last.depth - 1) * last.source_slice,
            box.target - last.target - (last.depth - 1) * last.target_slice,
        )
        is_next = last.area == box.area and (
            last.depth == 1 or steps == (last.source_slice, last.target_slice)
        )
        pitches = last.source_pitch, last.target_pitch
        if is_next and all(
            s % p == 0 and s >= last.height * p for s, p in zip(steps, pitches, strict=True)
        ):
            boxes[-1] = last._replace(
                depth=last.depth + 1, source_slice=steps[0], target_slice=steps[1]
            )
        else:
            boxes.append(box)
    return boxes


class PreparedCopies:
    """Prepared copies from one list of blocks to another; ``calls`` is the number of driver calls per launch."""

    def __init__(self, blocks: Blocks, device: int) -> None:
        boxes, rest = boxes_of(blocks)
        self._boxes = [(box.target, box.source, prepared(box, device)) for box in boxes]
        self._batch: PreparedBatch | None = None
        if rest.lengths.size:
            self._batch = PreparedBatch(rest.target, rest.source, rest.lengths, device=device)
        self.calls = len(self._boxes) + (self._batch is not None)

    def launch(self, stream: int) -> None:
        """Enqueue the copies on a stream; not thread-safe."""
        for target, source, copy in self._boxes:
            copy.launch(target, source, stream)
        if self._batch is not None:
            self._batch.launch(0, 0, stream)


def prepared(box: CopyBox, device: int) -> PreparedMemcpy:
    """Prepare the copy of a box."""
    if box.height == 1:
        return PreparedMemcpy(box.width, device=device)
    return PreparedMemcpy(
        box.width,
        box.height,
        box.depth,
        target_pitch=box.target_pitch,
        source_pitch=box.source_pitch,
        target_rows=box.target_slice // box.target_pitch or box.height,
        source_rows=box.source_slice // box.source_pitch or box.height,
        device=device,
    )
