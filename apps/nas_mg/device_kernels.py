"""The operators on CuPy arrays: ``mg.cu``, launched on the current stream.

The methods have the arguments, shapes and meaning of `HostKernels`. The arguments of a launch are
prepared in advance, so that a call only launches.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..common import Kernel, block
from ..device import kernels
from .classes import Coefficients
from .host_kernels import check_stencil

ROWS = 4
"""Rows that one thread of the stencil computes."""

_MOST_PLANES = 32
_THREADS_WANTED = 1 << 19  # enough to fill the largest GPUs twice


class DeviceKernels:
    """Factory of operators that are bound to their arrays: functions without arguments.

    Parameters
    ----------
    xp : module
        CuPy, ``grid.xp``.
    """

    def __init__(self, xp: Any) -> None:
        functions = ("stencil", "restriction", "prolongation")
        found = kernels(xp, __package__, "mg", functions, f"-DROWS={ROWS}")
        self._stencil, self._restriction, self._prolongation = found

    def stencil(self, source: Any, base: Any, out: Any, weights: Coefficients) -> Kernel:
        """Return ``out = base + S source``; see `HostKernels.stencil`."""
        check_stencil(source, base, out)
        nz, ny, nx = (extent - 2 for extent in source.shape)
        threads = block(nx)
        planes = planes_per_thread(nz, ny, nx)
        blocks = (-(-nx // threads[0]), -(-ny // (ROWS * threads[1])), -(-nz // planes))
        extents = map(np.int32, (nz, ny, nx, planes))
        arguments = (source, base, out, *_pitches(source), *extents, *map(np.float64, weights))
        return _launch(self._stencil, blocks, threads, arguments)

    def restrict(self, fine: Any, coarse: Any) -> Kernel:
        """Return the average of ``fine`` around the points of ``coarse``."""
        nz, ny, nx = (extent - 2 for extent in coarse.shape)
        threads = block(nx)
        blocks = (-(-nx // threads[0]), -(-ny // threads[1]), nz)
        extents = map(np.int32, (nz, ny, nx))
        arguments = (fine, coarse, *_pitches(fine), *_pitches(coarse), *extents)
        return _launch(self._restriction, blocks, threads, arguments)

    def prolong(self, coarse: Any, fine: Any, *, add: bool) -> Kernel:
        """Return the interpolation of ``coarse`` to ``fine``, or its addition there."""
        nz, ny, nx = coarse.shape[0] - 1, coarse.shape[1] - 1, fine.shape[2]
        threads = block(nx)
        blocks = (-(-nx // threads[0]), -(-ny // threads[1]), nz)
        extents = map(np.int32, (nz, ny, nx, add))
        arguments = (coarse, fine, *_pitches(coarse), *_pitches(fine), *extents)
        return _launch(self._prolongation, blocks, threads, arguments)


def planes_per_thread(nz: int, ny: int, nx: int) -> int:
    """Return the planes per thread of the stencil: many, unless that leaves too few threads.

    Examples
    --------
    >>> planes_per_thread(512, 512, 512), planes_per_thread(256, 256, 256), planes_per_thread(8, 8, 8)
    (32, 8, 1)
    """
    threads = nx * -(-ny // ROWS) * nz
    return max(1, min(_MOST_PLANES, nz, threads // _THREADS_WANTED))


def _pitches(array: Any) -> tuple[np.int64, np.int64]:
    """Return the distances from plane to plane and from row to row, in elements."""
    plane, row, point = array.strides
    if point != array.itemsize:
        raise ValueError("points must be adjacent along x")
    return np.int64(plane // point), np.int64(row // point)


def _launch(function: Any, blocks: Any, threads: Any, arguments: Any) -> Kernel:
    return lambda: function(blocks, threads, arguments)
