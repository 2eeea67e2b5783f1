"""The operations on NumPy arrays, in pieces with temporaries that stay in the L2 cache of a core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..common import Kernel
from ..nas_random_numbers import MASK, MODULUS

Array = np.ndarray

PIECE = 24576
"""Real numbers per piece; a point has two."""


class HostKernels:
    """Factory of operations that are bound to their arrays: functions without arguments.

    Fields are C-contiguous blocks of ``(z, y, x)`` points, complex128.
    """

    def copy(self, values: Array, target: Array) -> None:
        """Copy host memory to an array of this device, of the same shape and dtype."""
        target[...] = values

    def initial(self, u: Array, factors: tuple[Array, Array, Array]) -> Kernel:
        """Return the initialization of ``u`` with random numbers from the factors of `initial.factors`.

        Each call reads the factors.
        """
        z, y, x = factors
        parts = _parts(u)
        products = np.empty(_piece_shape(parts.shape), np.uint64)

        def run() -> None:
            for planes, rows in _pieces(parts.shape):
                some = parts[planes, rows]
                found = products[: some.shape[0], : some.shape[1]]
                starts = z[planes, None] * y[rows] & MASK
                np.multiply(starts[..., None], x, found)
                np.bitwise_and(found, MASK, found)
                np.multiply(found, 1 / MODULUS, some)

        return run

    def evolve(self, spectrum: Array, factors: tuple[Array, Array, Array], step: Array) -> Kernel:
        """Return ``spectrum *= z y x`` with one float64 factor per coordinate.

        Each call reads the factors, and adds one to ``step``, an array of one integer.
        """
        z, y, x = factors
        parts = _parts(spectrum)
        products = np.empty(_piece_shape(parts.shape))

        def run() -> None:
            of_row = np.repeat(x, 2)  # for real and imaginary part
            for planes, rows in _pieces(parts.shape):
                some = parts[planes, rows]
                found = products[: some.shape[0], : some.shape[1]]
                np.multiply((z[planes, None] * y[rows])[..., None], of_row, found)
                np.multiply(some, found, some)
            step[0] += 1

        return run

    def sample(self, u: Array, offsets: Array, samples: Array, step: Array) -> Kernel:
        """Return the copy of the points of a checksum to row ``step - 1`` of ``samples``.

        ``offsets``, int64, are the points' linear indices in ``u``; ``samples`` has a column for each.
        """
        points = u.reshape(-1)

        def run() -> None:
            np.take(points, offsets, out=samples[step[0] - 1])

        return run

    def sums(self, samples: Array) -> Any:
        """Return the sums of the rows, on the host."""
        return samples.sum(axis=1)


def check_field(array: Any) -> None:
    """Refuse arrays that the operations do not support.

    Raises
    ------
    ValueError
        If the array is not C-contiguous, not complex128, or has not three axes.
    """
    if array.ndim != 3 or array.dtype != np.complex128 or not array.flags.c_contiguous:
        raise ValueError("expected a C-contiguous array of complex128 with three axes")


def _parts(field: Array) -> Array:
    """Return a view as float64, with real and imaginary parts adjacent along x."""
    check_field(field)
    return field.view(np.float64)


def _piece_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the planes, rows and columns of a piece: whole rows, and whole planes if several fit."""
    planes, rows, columns = shape
    high = max(1, min(rows, PIECE // columns))
    deep = max(1, min(planes, PIECE // (columns * rows))) if high == rows else 1
    return deep, high, columns


def _pieces(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield the planes and rows of every piece."""
    deep, high, _ = _piece_shape(shape)
    for plane in range(0, shape[0], deep):
        for row in range(0, shape[1], high):
            yield slice(plane, plane + deep), slice(row, row + high)
