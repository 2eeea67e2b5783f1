"""Packer that uses the CUDA driver's 2D and 3D copies and launches no kernel; `plan` finds the copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from halox.errors import DatatypeError
from halox.packing.common_blocks import CommonBlocks
from halox.packing.copy_boxes import CopyBox, PreparedCopies, boxes_of
from halox.packing.device_packer import DevicePacker

if TYPE_CHECKING:
    from halox.datatypes import Datatype

MOST_COPIES = 1024
"""Largest number of copies of a plan; each is a driver call, which takes a microsecond or more."""

MOST_BLOCKS = 1 << 23
"""Largest number of blocks that are listed in order to find boxes."""


class CopyEnginePacker(DevicePacker):
    """Packs with contiguous, 2D and 3D copies of the driver.

    This packer suits long rows, packing into page-locked host memory, and GPUs that are busy with other
    work: copies between GPUs and to or from the host use no SM. For copies within one GPU the driver
    decides whether to use SMs. Each row is moved separately, so blocks of a few bytes take many times as
    long as with a kernel. ``max_blocks`` has no effect. A datatype that needs more than 1024 copies
    raises `DatatypeError`. ``calls`` is the number of driver calls per pack or unpack.
    """

    method: ClassVar[str] = "copy_engine"

    def __init__(
        self, datatype: Datatype, count: int, device: int, max_blocks: int | None = None
    ) -> None:
        super().__init__(datatype, count, device, max_blocks)
        boxes = plan(datatype, count)
        self.calls = len(boxes)
        self._pack = PreparedCopies(boxes, device)
        self._unpack = PreparedCopies([box.reverse() for box in boxes], device)

    @classmethod
    def why_not(cls, datatype: Datatype, count: int) -> str | None:
        """Return a reason with the number of blocks if there are too many copies, else None."""
        try:
            plan(datatype, count)
        except DatatypeError as error:
            return str(error)
        return None

    def pack(self, array: int, packed: int, stream: int) -> None:
        self._pack.launch(stream, array, packed)

    def unpack(self, packed: int, array: int, stream: int) -> None:
        self._unpack.launch(stream, packed, array)


def plan(datatype: Datatype, count: int = 1) -> list[CopyBox]:
    """Return the copies that pack items of a datatype, from the array's address to the packed address.

    Raises `DatatypeError`, which states the number of blocks, if there are more than `MOST_COPIES`.
    """
    layout = datatype.items(count)
    n_blocks = layout.most_blocks
    if n_blocks <= MOST_BLOCKS:
        blocks = layout.block_list()
        packed, nowhere = np.cumsum(blocks.lengths) - blocks.lengths, np.zeros_like(blocks.lengths)
        boxes = boxes_of(CommonBlocks(blocks.offsets, packed, blocks.lengths, nowhere, nowhere))
        if len(boxes) <= MOST_COPIES:
            return boxes
        n_blocks = blocks.n_blocks
    raise DatatypeError(
        f"its {n_blocks} blocks need more than {MOST_COPIES} copies of rows at equal distances"
    )
