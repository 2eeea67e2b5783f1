"""Copies of a list of blocks by the CUDA driver, one call a box: contiguous, 2D or 3D.

Consecutive blocks of equal length, at equal distances on both sides, are the rows of a box. Consecutive equal boxes at
equal distances are the slices of a larger box. The copy-engine packer and the ``scatter_gather`` path plan by
`boxes_of`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from halox.packing.common_blocks import CommonBlocks, Int64Array
from halox.runtime.gpu.copies import MAX_PITCH, PreparedMemcpy


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

    def reverse(self) -> CopyBox:
        steps = self.target_pitch, self.source_pitch, self.target_slice, self.source_slice
        return CopyBox(self.target, self.source, *self[2:5], *steps)


def boxes_of(blocks: CommonBlocks) -> list[CopyBox]:
    """Return boxes that together copy all blocks; no box spans two arrays on a side, as the driver requires."""
    at, to, lengths, *arrays = blocks
    if not lengths.size:
        return []
    steps = np.diff(at), np.diff(to)
    fits = (lengths[1:] == lengths[:-1]) & (lengths[:-1] <= np.minimum(*steps))
    fits &= np.maximum(*steps) <= MAX_PITCH
    for numbers in arrays:
        fits &= numbers[1:] == numbers[:-1]
    rows, heights = _runs(fits, *steps)
    pitches = [np.append(step, 0)[rows] * (heights > 1) for step in steps]
    alike = [lengths[rows], heights, *pitches, *(numbers[rows] for numbers in arrays)]

    steps = np.diff(at[rows]), np.diff(to[rows])
    fits = heights[1:] > 1
    for numbers in alike:
        fits &= numbers[1:] == numbers[:-1]
    for step, pitch in zip(steps, pitches, strict=True):
        fits &= (step >= (heights * pitch)[1:]) & (step % np.maximum(pitch, 1)[1:] == 0)
    slices, depths = _runs(fits, *steps)
    distances = (np.append(step, 0)[slices] * (depths > 1) for step in steps)

    width, height, *pitches = (column[slices] for column in alike[:4])
    columns = at[rows][slices], to[rows][slices], width, height, depths, *pitches, *distances
    return [CopyBox(*box) for box in zip(*(column.tolist() for column in columns), strict=True)]


def _runs(fits: npt.NDArray[np.bool_], *steps: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Divide items into runs, given the n - 1 steps from each item to the next; return first items, and lengths.

    All steps in a run are equal, and fit. Each run is as long as possible, from the first item on.
    """
    # Steps that differ from the step before, or do not fit.
    differs = ~fits[1:]
    for step in steps:
        differs |= step[1:] != step[:-1]
    changes = (np.flatnonzero(differs) + 1).tolist()
    first, at, n = [], 0, fits.size + 1
    while at < n:
        first.append(at)
        if at < n - 1 and fits[at]:
            change = bisect_right(changes, at)
            at = changes[change] if change < len(changes) else n - 1
        at += 1
    firsts = np.array(first, np.int64)
    return firsts, np.diff(firsts, append=n)


class PreparedCopies:
    """Prepared copies of boxes; each is one driver call per launch."""

    def __init__(self, boxes: Sequence[CopyBox], device: int) -> None:
        self._copies = [(box.target, box.source, _prepared(box, device)) for box in boxes]

    def launch(self, stream: int, source: int = 0, target: int = 0) -> None:
        """Enqueue the copies on a stream; ``source`` and ``target`` are added to the boxes' addresses."""
        for to, at, copy in self._copies:
            copy.launch(target + to, source + at, stream)


def _prepared(box: CopyBox, device: int) -> PreparedMemcpy:
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
