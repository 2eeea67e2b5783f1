"""Packer that uses the CUDA driver's 2D, 3D and batched copies and launches no kernel.

:func:`plan` finds the fewest copies that pack a datatype. One copy moves a box: equally spaced slices, each of equally
spaced rows of bytes. The distance between slices must be a multiple of the distance between rows. A datatype has levels
of nested strides (:mod:`halox.packing.refine`). A level can be the rows of a box if its strides on both sides are at
least the width of a row. Another level can be the slices if its strides are multiples of the strides of the rows. Every
other level multiplies the number of copies by its steps. A batch of contiguous copies moves blocks that do not fit a
box.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product
from math import prod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from halox.errors import DatatypeError
from halox.packing.copy_boxes import MOST_BOXES, CopyBox, prepared
from halox.packing.device_packer import DevicePacker
from halox.packing.refine import Copy, Level, Piece, Side, pieces
from halox.runtime.gpu.copies import MAX_PITCH, PreparedBatch, PreparedMemcpy

if TYPE_CHECKING:
    from halox.datatypes import Datatype

MOST_RUNS = 65536
"""Largest number of contiguous copies of a plan."""

_MOST_PARTS = 1024
"""Largest number of strided parts of an irregular type to search for boxes."""


class CopyEnginePacker(DevicePacker):
    """Packs with 2D and 3D copies of the driver, and with batches of contiguous copies.

    This packer suits long rows, packing into page-locked host memory, and GPUs that are busy with other
    work: copies between GPUs and to or from the host use no SM. For copies within one GPU the driver
    decides whether to use SMs. Each row is moved separately, so blocks of a few bytes take many times as
    long as with a kernel. ``max_blocks`` has no effect. A datatype that needs more than 64 copies of boxes
    and more than 65 536 contiguous copies raises `DatatypeError`. ``calls`` is the number of driver calls
    per pack or unpack; a batch counts as one call.
    """

    method: ClassVar[str] = "copy_engine"

    def __init__(
        self, datatype: Datatype, count: int, device: int, max_blocks: int | None = None
    ) -> None:
        super().__init__(datatype, count, device, max_blocks)
        planned = plan(datatype, count)
        self._boxes = [
            (box.source, box.target, prepared(box, device), prepared(box.reverse(), device))
            for box in planned.boxes
        ]
        self._batches: tuple[PreparedBatch, PreparedBatch] | None = None
        runs = (planned.array_offsets, planned.packed_offsets, planned.sizes)
        if len(planned.sizes) == 1:
            array, packed, nbytes = (int(values[0]) for values in runs)
            copy = PreparedMemcpy(nbytes, device=device)
            self._boxes.append((array, packed, copy, copy))
        elif len(planned.sizes):
            array_offsets, packed_offsets, sizes = runs
            self._batches = (
                PreparedBatch(packed_offsets, array_offsets, sizes, device=device),
                PreparedBatch(array_offsets, packed_offsets, sizes, device=device),
            )
        self.calls = len(self._boxes) + (self._batches is not None)

    @classmethod
    def why_not(cls, datatype: Datatype, count: int) -> str | None:
        """Return a reason with the number of copies if that number is too large, else None."""
        try:
            plan(datatype, count)
        except DatatypeError as error:
            return str(error)
        return None

    def pack(self, array: int, packed: int, stream: int) -> None:
        """Copy the bytes that the items describe to contiguous memory.

        On the legacy default stream, during a capture, and with drivers older than CUDA 12.8 the packer
        issues a batch copy by copy.
        """
        for array_offset, packed_offset, copy, _ in self._boxes:
            copy.launch(packed + packed_offset, array + array_offset, stream)
        if self._batches is not None:
            self._batches[0].launch(packed, array, stream)

    def unpack(self, packed: int, array: int, stream: int) -> None:
        """Copy contiguous bytes to the places of the items."""
        for array_offset, packed_offset, _, copy in self._boxes:
            copy.launch(array + array_offset, packed + packed_offset, stream)
        if self._batches is not None:
            self._batches[1].launch(array, packed, stream)


@dataclass(frozen=True)
class CopyEnginePlan:
    """Copies that pack a datatype; the reverse copies unpack it.

    The three arrays of shape (n,) hold the contiguous copies: displacements from the two addresses,
    and sizes in bytes.
    """

    boxes: tuple[CopyBox, ...]  # from the array's address to the packed address
    array_offsets: npt.NDArray[np.int64]
    packed_offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


class _Cut(NamedTuple):
    """A loop nest, divided into the levels of its boxes (rows, then slices) and the remaining levels, to unroll."""

    piece: Piece
    box_levels: tuple[Level, ...]
    unrolled: tuple[Level, ...]

    @property
    def copies(self) -> int:
        """Number of boxes, or of contiguous copies if no level can be the rows of a box."""
        return prod(level.steps for level in self.unrolled)


def plan(
    datatype: Datatype,
    count: int = 1,
    *,
    most_boxes: int = MOST_BOXES,
    most_runs: int = MOST_RUNS,
) -> CopyEnginePlan:
    """Plan the copies that pack items of a datatype.

    The plan has boxes if there are at most ``most_boxes``, else contiguous copies only. Raises
    `DatatypeError`, which states the number of blocks, for more than ``most_runs`` contiguous copies.
    """
    layout = datatype.items(count)
    parts = layout.parts(_MOST_PARTS)
    n_blocks = 0
    if parts is not None:
        pairs = [Copy(Side(0, part.memory), Side(0, part.packed)) for part in parts]
        cuts = [_cut(piece) for pair in pairs for piece in pieces(pair)]
        boxes = sum(cut.copies for cut in cuts if cut.box_levels)
        runs = sum(cut.copies for cut in cuts if not cut.box_levels)
        if 0 < boxes <= most_boxes and runs <= most_runs:
            return _plan(cuts)
        # A lower bound, found without a list of the blocks: blocks that are adjacent in memory may not be adjacent in
        # packed order.
        n_blocks = sum(part.memory.n_blocks for part in parts)
    if n_blocks <= most_runs:
        blocks = layout.block_list()
        n_blocks = blocks.n_blocks
    if n_blocks > most_runs:
        raise DatatypeError(
            f"its {n_blocks} blocks are more than {most_runs} contiguous copies, and more than "
            f"{most_boxes} copies of rows at equal distances"
        )
    return CopyEnginePlan(
        (), blocks.offsets, np.cumsum(blocks.lengths) - blocks.lengths, blocks.lengths
    )


def _cut(piece: Piece) -> _Cut:
    """Choose the levels of boxes for the fewest copies; among equal choices, the innermost levels."""
    levels = piece.levels[-2::-1]
    choices = [
        choice
        for n in (1, 2)
        for choice in permutations(range(len(levels)), n)
        if _fits(*(levels[at] for at in choice), width=piece.levels[-1].steps)
    ]
    best = max(choices, key=lambda choice: prod(levels[at].steps for at in choice), default=())
    return _Cut(
        piece,
        tuple(levels[at] for at in best),
        tuple(level for at, level in enumerate(levels) if at not in best),
    )


def _fits(rows: Level, slices: Level | None = None, *, width: int) -> bool:
    """Whether a box can have these rows and slices, on both sides."""
    pitches = (rows.source_stride, rows.target_stride)
    if min(pitches) < width or max(pitches) > MAX_PITCH:
        return False
    return slices is None or all(
        stride % pitch == 0 and stride >= rows.steps * pitch
        for stride, pitch in zip((slices.source_stride, slices.target_stride), pitches, strict=True)
    )


def _plan(cuts: list[_Cut]) -> CopyEnginePlan:
    boxes: list[CopyBox] = []
    runs: list[tuple[int, int, int]] = []
    for cut in cuts:
        for array, packed in _starts(cut):
            if cut.box_levels:
                boxes.append(_box(cut, array, packed))
            else:
                runs.append((array, packed, cut.piece.levels[-1].steps))
    array_offsets, packed_offsets, sizes = np.array(runs, np.int64).reshape(-1, 3).T
    return CopyEnginePlan(tuple(boxes), array_offsets, packed_offsets, sizes)


def _starts(cut: _Cut) -> Iterator[tuple[int, int]]:
    """Yield the offsets of every copy on both sides."""
    for index in product(*(range(level.steps) for level in cut.unrolled)):
        steps = list(zip(index, cut.unrolled, strict=True))
        yield (
            cut.piece.source + sum(i * level.source_stride for i, level in steps),
            cut.piece.target + sum(i * level.target_stride for i, level in steps),
        )


def _box(cut: _Cut, array: int, packed: int) -> CopyBox:
    rows, *slices = cut.box_levels
    depth, array_slice, packed_slice = slices[0] if slices else (1, 0, 0)
    pitches = rows.source_stride, rows.target_stride
    width = cut.piece.levels[-1].steps
    return CopyBox(array, packed, width, rows.steps, depth, *pitches, array_slice, packed_slice)
