"""Memory that a class needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import halox

from .. import memory


def needed_bytes(
    shape: Sequence[int], proc_shape: Sequence[int], device: str, *, is_one_node: bool = True
) -> int:
    """Return the bytes that a rank needs: those of its fields and of their transform.

    Parameters
    ----------
    shape, proc_shape : sequence of int
        Points and ranks per axis.
    device : {"cpu", "gpu"}
    is_one_node : bool
        Whether all ranks can share memory.

    Notes
    -----
    In blocks of the largest rank: the field and its spectrum; on GPUs the work area of cuFFT. On several ranks, a
    work array for each division that the transform goes through, and for each direction of a transpose buffers of
    what is sent, and across nodes of what is received.

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
    """Return the bytes that all ranks together need for a class; see `apps.memory.check_memory`."""

    def needed(is_one_node: bool) -> int:
        return needed_bytes(grid.grid_shape, grid.proc_shape, grid.device, is_one_node=is_one_node)

    return memory.check_memory(grid, f"class {name}", needed, "a smaller --class")
