"""Bounds check of datatypes with absolute addresses as displacements, as with MPI_BOTTOM.

Without an array to check against, the check looks up the allocation of every byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from halox.errors import FieldError
from halox.runtime.gpu import memory
from halox.runtime.gpu.memory import MemoryKind

if TYPE_CHECKING:
    from halox.datatypes import Datatype


def check_absolute(datatype: Datatype, count: int, device: int) -> None:
    """Raise `FieldError` if items of a datatype at address 0 touch a byte outside the memory of GPU ``device``.

    Managed memory is allowed. The error names the range of addresses and the kind of memory there. Each allocation is
    looked up once, however many blocks it holds. A block may continue from one allocation into an adjacent allocation:
    merging may have joined two blocks there, and every byte is still inside an allocation.
    """
    layout = datatype.items(count)
    low, high = datatype.reach(count)
    if low == high:
        return
    if low < 0 or high > 2**63:
        raise FieldError(
            f"datatype: its displacements reach from {low:#x} to {high:#x}, which are no addresses; "
            "a datatype without an array needs absolute ones"
        )

    def end_of_allocation(address: int) -> int:
        """End of the GPU's allocation that holds an address; 0 if the address is in no such allocation."""
        kind, found = memory.memory_kind(address), memory.memory_range(address)
        usable = kind.kind == "managed" or (kind.kind == "device" and kind.device == device)
        return sum(found) if usable and found is not None else 0

    if end_of_allocation(low) >= high:
        return
    blocks = layout.block_list()
    starts, ends = _intervals(blocks.offsets, blocks.offsets + blocks.lengths)
    at, position = 0, 0
    while at < len(starts):
        position = max(position, int(starts[at]))
        end = end_of_allocation(position)
        if not end:
            touched = f"datatype: bytes [{position:#x}, {int(ends[at]):#x}) of its items"
            raise FieldError(f"{touched} are in {_described(memory.memory_kind(position), device)}")
        # Skip the blocks that end inside this allocation. Look up a block that continues at the allocation's end.
        at, position = int(np.searchsorted(ends, end, side="right")), end


def _intervals(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sort ranges of addresses, and merge ranges that touch or overlap."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.append(True, starts[1:] > ends[:-1]))
    return starts[first], ends[np.append(first[1:] - 1, len(ends) - 1)]


def _described(kind: MemoryKind, device: int) -> str:
    """Name of the memory, and the remedy."""
    if kind.kind == "device" and kind.device != device:
        return (
            f"memory of GPU {kind.device}, and GPU {device} would pack them; make one datatype for "
            "each GPU's memory"
        )
    if kind.kind == "pinned":
        return (
            "page-locked host memory: host pointers where device ones are needed; copy the data to "
            "the GPU, or pack from a host array"
        )
    return (
        "no GPU's memory: host pointers where device ones are needed, or memory that has been "
        "freed; take addresses from arrays on the GPU (array.data.ptr in CuPy) that are still alive"
    )
