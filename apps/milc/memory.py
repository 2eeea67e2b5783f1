"""Estimate of the memory of a run."""

from __future__ import annotations

import math

from .. import memory
from .lattice import AXES, COLORS, Lattice, directions
from .options import Settings

_MATRIX = COLORS * COLORS
_DOUBLE = 16  # bytes of a complex number

_VECTORS = 14
"""Vectors without halo that exist at the same time: sources, copies, x, r and A p of both parities, temporaries."""

_BLOCKS_OF_LINKS = 4.5
"""Blocks of links that exist at the same time: thin, fat and long links, and temporaries."""


def needed_bytes(lattice: Lattice, settings: Settings) -> tuple[int, int]:
    """Return the bytes of GPU memory (0 without a GPU) and of host memory that this rank needs; local.

    Notes
    -----
    Links are computed on the host in double precision; tables and vectors are in the memory of the lattice's device. A
    table has matrices of all directions, twice as many as the links, and on hosts the indices of the neighbours.
    """
    shape, depth = lattice.grid.rank_shape, lattice.depth
    places = math.prod(n + 2 * depth for n in shape[:3]) * (shape[3] // 2 + 2 * ((depth + 1) // 2))
    count = len(directions(lattice.offsets))
    numbers = 2 * lattice.sites * count * _MATRIX + _VECTORS * lattice.sites * COLORS
    numbers += 2 * places * COLORS
    solver = numbers * settings.dtype.itemsize
    if settings.precision == "mixed":
        solver += numbers * settings.dtype.itemsize // 2
    links = int(2 * lattice.sites * AXES * _MATRIX * _DOUBLE * _BLOCKS_OF_LINKS)
    if lattice.components_first:
        return solver + memory.MARGIN_BYTES, links + memory.MARGIN_BYTES
    return 0, solver + links + 2 * lattice.sites * count * 8 + memory.MARGIN_BYTES


def check_memory(lattice: Lattice, settings: Settings) -> int:
    """Check that the run fits in memory, and return the bytes of hosts and GPUs that all ranks need; collective.

    Raises
    ------
    halox.errors.HaloxError
        If the run exceeds the free memory of a host or GPU; on all ranks.
    """
    what = f"--lattice {' '.join(map(str, settings.shape[::-1]))}"
    on_gpu, on_host = needed_bytes(lattice, settings)
    remedy = "a smaller --lattice" + (
        ", --precision single" if settings.precision != "single" else ""
    )
    needed = memory.check_memory(lattice.host, what, lambda _: on_host, remedy)
    if lattice.components_first:
        needed += memory.check_memory(lattice.grid, what, lambda _: on_gpu, remedy)
    return needed
