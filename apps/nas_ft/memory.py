"""Estimate of the memory of a class."""

from __future__ import annotations

import math
from collections.abc import Sequence

import halox

from .. import memory


def needed_bytes(
    shape: Sequence[int], proc_shape: Sequence[int], device: str, *, is_one_node: bool = True
) -> int:
    """Return the bytes that a rank needs for its fields and their transform.

    Parameters
    ----------
    shape, proc_shape : sequence of int
        Points and ranks per axis.
    device : {"cpu", "gpu"}
    is_one_node : bool
        Whether all ranks can share memory.

    Notes
    -----
    The unit is the block of the largest rank. One block each: the field, its spectrum, and on GPUs the work area of
    cuFFT. Several ranks also need a work array for each division of the grid during the transform, and for each
    direction of a transpose a send buffer and, across nodes, a receive buffer.

    Examples
    --------
    >>> memory.gib(needed_bytes((1024, 1024, 2048), (1, 1, 1), "gpu"))
    '96 GiB'
    >>> memory.gib(needed_bytes((512, 512, 512), (4, 1, 1), "cpu"))
    '3.03 GiB'
    """
    block = 16 * math.prod(-(-n // ranks) for n, ranks in zip(shape, proc_shape, strict=True))
    blocks = 2 + (device == "gpu")
    transposes = sum(ranks > 1 for ranks in proc_shape)
    if transposes:
        work, buffers = transposes + 1, 2 * transposes * (1 if is_one_node else 2)
        blocks += work + buffers
    return blocks * block + memory.MARGIN_BYTES


def check_memory(name: str, grid: halox.Grid) -> int:
    """Check that a class fits in memory, and return the bytes of all ranks; see `apps.memory.check_memory`."""

    def needed(is_one_node: bool) -> int:
        return needed_bytes(grid.grid_shape, grid.proc_shape, grid.device, is_one_node=is_one_node)

    return memory.check_memory(grid, f"class {name}", needed, "a smaller --class")
