"""Choice of a GPU packer by layout, size and destination.

Strided parts go to the strided kernel, unless the copy engine is faster. Irregular datatypes are packed from a list of
their blocks, unless the list would be too large.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from halox.errors import DatatypeError
from halox.packing.refine import MAX_PARTS, paired
from halox.values import shown

if TYPE_CHECKING:
    from halox.datatypes import Datatype
    from halox.packing.device_packer import DevicePacker

METHODS = ("auto", "strided", "workunits", "traversal", "copy_engine")
"""Values of ``method`` on a GPU."""

LISTED_BLOCKS = 1 << 24
"""Largest number of blocks of one item to list, with 16 bytes per block; with more blocks, the tree is traversed."""

DMA_BLOCK_BYTES = 1 << 16
DMA_BYTES = 1 << 20
"""Mean block size and total size from which, for copies to the host, the copy engine is 5 % faster than a kernel."""


class Choice(NamedTuple):
    """Name of a packer, and the reason for the choice; ``print`` shows both."""

    method: str
    """Name of the packer."""

    reason: str
    """Reason for the choice."""

    def __str__(self) -> str:
        return f"{self.method}: {self.reason}"


@cache
def packers() -> dict[str, type[DevicePacker]]:
    """Return the GPU packers by name; the first call imports them."""
    from halox.packing.copy_engine import CopyEnginePacker
    from halox.packing.strided import StridedPacker
    from halox.packing.traversal import TraversalPacker
    from halox.packing.workunits import WorkUnitsPacker

    classes = (StridedPacker, WorkUnitsPacker, TraversalPacker, CopyEnginePacker)
    return {packer.method: packer for packer in classes}


def choose(datatype: Datatype, count: int, *, to_host: bool = False) -> Choice:
    """Choose the packer for some items; ``to_host`` says that the packed bytes are in host memory."""
    nbytes = datatype.size * count
    parts = paired(0, datatype, count, 0)
    if parts is not None:
        n_blocks = sum(max(1, side.strided.n_blocks) for side, _ in parts)
        mean = nbytes // max(1, n_blocks)
        if (
            to_host
            and nbytes >= DMA_BYTES
            and mean >= DMA_BLOCK_BYTES
            and packers()["copy_engine"].why_not(datatype, count) is None
        ):
            return Choice(
                "copy_engine",
                f"to host memory, {nbytes} bytes in {n_blocks} blocks of {mean} bytes on average, "
                "which the copy engine moves faster than a kernel",
            )
        return Choice("strided", f"{len(parts)} strided part(s), blocks of {mean} bytes on average")
    n_blocks = datatype.layout.most_blocks
    if n_blocks > LISTED_BLOCKS:
        return Choice(
            "traversal",
            f"more than {MAX_PARTS} strided parts and {n_blocks} blocks an item: a list of them "
            "could outgrow the data",
        )
    reason = f"more than {MAX_PARTS} strided parts: its {n_blocks} blocks an item are listed"
    return Choice("workunits", reason)


def check_method(method: object) -> None:
    """Raise `DatatypeError` unless ``method`` is the name of a method for arrays on a GPU."""
    if not isinstance(method, str) or method not in METHODS:
        raise DatatypeError(f"method: got {shown(method)}, must be one of {', '.join(METHODS)}")


def device_packer(
    method: str, datatype: Datatype, count: int, device: int, max_blocks: int | None = None
) -> DevicePacker:
    """Make a packer by its name.

    ``max_blocks`` limits the thread blocks of a launch. Raises `DatatypeError` if ``method`` is unknown or
    cannot pack the datatype, and `DeviceError` if ``max_blocks`` is less than 1.
    """
    check_method(method)
    if method == "auto":
        method = choose(datatype, count).method
    packer = packers()[method]
    return packer(datatype, count, device, max_blocks)
