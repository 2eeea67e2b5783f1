"""Packer on the copies of the CUDA driver; it launches no kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from halox.errors import DatatypeError
from halox.packing.copy_engine_plan import Box, plan
from halox.packing.device_packer import DevicePacker
from halox.runtime.gpu.copies import PreparedBatch, PreparedMemcpy

if TYPE_CHECKING:
    from halox.datatypes import Datatype


class CopyEnginePacker(DevicePacker):
    """Packs by 2D and 3D copies of the driver, and by batches of contiguous ones.

    Meant for long rows, for packing into page-locked host memory and for GPUs that are busy otherwise:
    copies between GPUs and to or from the host take no SM. For copies within one GPU that is the
    driver's choice. A row is moved as a unit, however short: blocks of a few bytes take many times as
    long as with a kernel. ``max_blocks`` has no effect. A type that takes more than 64 copies of rows
    and more than 65 536 contiguous ones raises `DatatypeError`.

    Attributes
    ----------
    calls : int
        Driver calls of one pack or unpack; a batch counts as one.
    """

    method: ClassVar[str] = "copy_engine"

    def __init__(
        self, datatype: Datatype, count: int, device: int, max_blocks: int | None = None
    ) -> None:
        super().__init__(datatype, count, device, max_blocks)
        planned = plan(datatype, count)
        self._boxes = [
            (box.array, box.packed, _copy(box, device), _copy(_reversed(box), device))
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
        """Return how many copies it would take if that is too many, else None."""
        try:
            plan(datatype, count)
        except DatatypeError as error:
            return str(error)
        return None

    def pack(self, array: int, packed: int, stream: int) -> None:
        """Copy the bytes that the items describe to contiguous memory.

        On the legacy default stream, in a capture, and with drivers older than CUDA 12.8 a batch is
        issued copy by copy.
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


def _copy(box: Box, device: int) -> PreparedMemcpy:
    """Prepare the copy of a box from the array to packed memory."""
    return PreparedMemcpy(
        box.width,
        box.height,
        box.depth,
        target_pitch=box.packed_pitch,
        target_rows=box.packed_rows,
        source_pitch=box.array_pitch,
        source_rows=box.array_rows,
        device=device,
    )


def _reversed(box: Box) -> Box:
    """Exchange the two sides."""
    return box._replace(
        array_pitch=box.packed_pitch,
        array_rows=box.packed_rows,
        packed_pitch=box.array_pitch,
        packed_rows=box.array_rows,
    )
