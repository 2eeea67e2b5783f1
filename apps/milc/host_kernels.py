"""The operations on NumPy arrays.

Numbers of a site are adjacent. A site of the operator's result is then three scalar products of a row of the table
with the vectors of all neighbours, 24 or 48 complex numbers long, for which the vectors are gathered first::

    neighbours (sites, D)  ->  gathered (sites, 3 D)
    result (sites, 3) = sum over k of matrices (sites, 3, 3 D) * gathered (sites, 3 D)

`numpy.vecdot` does it in one call, which reads every matrix once. Other layouts were slower: with sites innermost, a
product and a sum over an axis take 1.3 to 1.6 times as long, and `numpy.einsum` 1.8 to 3 times.
"""

from __future__ import annotations

import numpy as np

from ..common import Kernel
from .links import Table

PIECE = 256
"""Sites per piece: their neighbours' vectors, 200 KiB, stay in a core's second-level cache."""


class HostKernels:
    """Factory of the operations on given arrays: vectors of one parity, ``(t, z, y, x / 2, 3)``, complex."""

    def __init__(self, like: np.ndarray) -> None:
        """Make the work array of the operations on vectors like this one."""
        self._work = _reals(np.empty_like(like))

    def dslash(self, table: Table, source: np.ndarray, out: np.ndarray) -> Kernel:
        """Return ``out = D source`` on the sites of the table's parity.

        Parameters
        ----------
        table : Table
        source : ndarray
            Of the other parity, with halo.
        out : ndarray
            Without halo. Both are C-contiguous and of the dtype of the table.

        Raises
        ------
        ValueError
            If an array is not C-contiguous, or of another dtype.
        """
        neighbours, matrices = table
        for array in (source, out, matrices):
            if not array.flags.c_contiguous or array.dtype != matrices.dtype:
                raise ValueError(f"expected C-contiguous arrays of {matrices.dtype}")
        vectors, result = source.reshape(-1, 3), out.reshape(-1, 3)
        sites, directions = neighbours.shape
        gathered = np.empty((min(PIECE, sites), directions, 3), source.dtype)
        rows = gathered.reshape(len(gathered), 1, -1)

        def run() -> None:
            for start in range(0, sites, PIECE):
                stop = min(start + PIECE, sites)
                n = stop - start
                # "clip" writes into its result directly; no index is outside.
                np.take(vectors, neighbours[start:stop], axis=0, out=gathered[:n], mode="clip")
                np.vecdot(matrices[start:stop], rows[:n], out=result[start:stop])

        return run

    def combine(self, scale: float, p: np.ndarray, q: np.ndarray, out: np.ndarray) -> None:
        """Compute ``out = scale p - q``."""
        target = _reals(out)
        np.multiply(_reals(p), target.dtype.type(scale), out=target)
        np.subtract(target, _reals(q), out=target)

    def add(self, scale: float, p: np.ndarray, out: np.ndarray) -> None:
        """Compute ``out = out + scale p``."""
        target = _reals(out)
        np.multiply(_reals(p), target.dtype.type(scale), out=self._work)
        np.add(target, self._work, out=target)

    def scale_add(self, scale: float, p: np.ndarray, out: np.ndarray) -> None:
        """Compute ``out = p + scale out``."""
        target = _reals(out)
        np.multiply(target, target.dtype.type(scale), out=target)
        np.add(target, _reals(p), out=target)

    def copy(self, p: np.ndarray, out: np.ndarray) -> None:
        """Copy; one of the two may be the interior of a field with halo."""
        np.copyto(out, p)


def _reals(array: np.ndarray) -> np.ndarray:
    """Return a view of a contiguous complex array's numbers as real ones, twice as many."""
    return array.reshape(-1).view(array.real.dtype)
