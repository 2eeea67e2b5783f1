"""The operations on CuPy arrays: ``ft.cu``, launched on the current stream.

The methods have the arguments, shapes and meaning of `HostKernels`. The arguments of a launch are
prepared in advance, so that a call only launches.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..common import Kernel, block
from ..device import kernels
from .host_kernels import check_field

ROWS = 4
"""Rows that one thread of ``evolve`` processes."""

_THREADS = 128


class DeviceKernels:
    """Factory of operations that are bound to their arrays: functions without arguments.

    Parameters
    ----------
    xp : module
        CuPy, ``grid.xp``.
    """

    def __init__(self, xp: Any) -> None:
        functions = ("initial", "evolve", "sample")
        found = kernels(xp, __package__, "ft", functions, f"-DROWS={ROWS}")
        self._initial, self._evolve, self._sample = found

    def copy(self, values: np.ndarray, target: Any) -> None:
        """Copy host memory to an array of this device; see `HostKernels.copy`."""
        target.set(values)

    def initial(self, u: Any, factors: tuple[Any, Any, Any]) -> Kernel:
        """Return the setting of ``u`` to random numbers; see `HostKernels.initial`."""
        return _launch(self._initial, u, 1, (u, *factors))

    def evolve(self, spectrum: Any, factors: tuple[Any, Any, Any], step: Any) -> Kernel:
        """Return the product with the factors; see `HostKernels.evolve`."""
        return _launch(self._evolve, spectrum, ROWS, (spectrum, *factors, step))

    def sample(self, u: Any, offsets: Any, samples: Any, step: Any) -> Kernel:
        """Return the copy of the points of a checksum; see `HostKernels.sample`."""
        count = len(offsets)
        if count == 0:
            return lambda: None
        blocks = (-(-count // _THREADS), 1, 1)
        arguments = (u, offsets, samples, step, np.int32(count))
        return lambda: self._sample(blocks, (_THREADS, 1), arguments)

    def sums(self, samples: Any) -> np.ndarray:
        """Return the sums of the rows on the host; waits for the GPU."""
        found: np.ndarray = samples.sum(axis=1).get()
        return found


def _launch(function: Any, field: Any, rows: int, arguments: tuple[Any, ...]) -> Kernel:
    """Return the launch of a kernel in which each thread processes ``rows`` rows at one x."""
    check_field(field)
    nz, ny, nx = field.shape
    threads = block(nx)
    blocks = (-(-nx // threads[0]), -(-ny // (rows * threads[1])), nz)
    arguments = (*arguments, *map(np.int32, (nz, ny, nx)))
    return lambda: function(blocks, threads, arguments)
