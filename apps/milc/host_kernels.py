"""The operations on NumPy arrays.

The numbers of a site are adjacent in memory. The result at a site is three scalar products of a row of the table with
the gathered vectors of all neighbours, 24 or 48 complex numbers long::

    neighbours (sites, D)  ->  gathered (sites, 3 D)
    result (sites, 3) = sum over k of matrices (sites, 3, 3 D) * gathered (sites, 3 D)

One call of `numpy.vecdot` computes the products, and reads every matrix once. Other layouts are slower: with sites
innermost, a product and a sum over an axis take 1.3 to 1.6 times as long, and `numpy.einsum` 1.8 to 3 times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..common import Kernel
from .lattice import Lattice
from .links import Table
from .state import SLOTS, Slot, Status

PIECE = 256
"""Sites per piece; the vectors of their neighbours, 200 KiB, stay in the L2 cache of a core."""


class HostKernels:
    """Factory of operations that are bound to their arrays: complex vectors of one parity, ``(t, z, y, x / 2, 3)``.

    Parameters
    ----------
    lattice : Lattice
        With components last.
    dtype : dtype
        Dtype of all arrays except ``state``: complex64 or complex128. ``state`` is float64, see `Slot`.

    Notes
    -----
    The operations of an iteration do nothing once it has ended.
    """

    def __init__(self, lattice: Lattice, dtype: np.dtype[Any]) -> None:
        self._lattice = lattice
        self._result = np.empty((lattice.sites, 3), dtype)
        self._work = _reals(self._result)

    def state(self) -> np.ndarray:
        """Return the scalars of a running iteration, all zero."""
        return np.zeros(SLOTS)

    def history(self, most: int) -> np.ndarray:
        """Return memory of ``r . r`` after each iteration."""
        return np.empty(most)

    def read(self, array: np.ndarray) -> np.ndarray:
        """Return the array; on a GPU this copies to the host."""
        return array

    def write(self, array: np.ndarray, values: np.ndarray) -> None:
        """Copy values to an array."""
        array[...] = values

    def dslash(
        self, table: Table, source: np.ndarray, out: np.ndarray, parity: int, state: np.ndarray
    ) -> Kernel:
        """Return ``out = D source`` on the sites of the table's parity.

        Parameters
        ----------
        table : Table
        source : ndarray
            Vector of the opposite parity, with halo.
        out : ndarray
            Vector with halo; the halo does not change.
        parity : {EVEN, ODD}
            Parity of the result.
        state : ndarray

        Raises
        ------
        ValueError
            If an array is not C-contiguous, or has a wrong dtype.
        """
        apply = self._apply(table, source)
        interior = self._lattice.grid.interior(out)
        result = self._result.reshape(interior.shape)

        def run() -> None:
            apply()
            interior[...] = result

        return _unless_ended(state, run)

    def normal(
        self,
        table: Table,
        source: np.ndarray,
        p: np.ndarray,
        out: np.ndarray,
        scale: float,
        parity: int,
        state: np.ndarray,
    ) -> Kernel:
        """Return ``out = scale p - D source``; only p has a halo. On GPUs, also this rank's ``p . out``."""
        apply, minus = self._apply(table, source), _reals(self._result)
        interior, target = _reals(self._lattice.grid.interior(p)), _reals(out)
        minus, factor = minus.reshape(target.shape), target.dtype.type(scale)

        def run() -> None:
            apply()
            np.multiply(interior, factor, out=target)
            np.subtract(target, minus, out=target)

        return _unless_ended(state, run)

    def begin(
        self, b: np.ndarray, ap: np.ndarray, r: np.ndarray, p: np.ndarray, state: np.ndarray
    ) -> Kernel:
        """Return ``r = b - ap, p = r``; only p has a halo. On GPUs, also this rank's sum ``r . r``."""
        interior = self._lattice.grid.interior(p)

        def run() -> None:
            np.subtract(b, ap, out=r)
            interior[...] = r

        return run

    def reduce(self, ap: np.ndarray, r: np.ndarray, state: np.ndarray) -> Kernel:
        """Return ``r = r - a ap`` with ``a = R2 / PAP``. On GPUs, also this rank's sum ``r . r``.

        If ``PAP`` is not positive, the operation ends the iteration instead.
        """
        step, target = _reals(ap), _reals(r)
        work = self._work.reshape(target.shape)

        def run() -> None:
            if not state[Slot.PAP] > 0:  # NaN as well
                state[Slot.STATUS] = Status.BROKEN
                return
            a = target.dtype.type(state[Slot.R2] / state[Slot.PAP])
            np.multiply(step, a, out=work)
            np.subtract(target, work, out=target)

        return _unless_ended(state, run)

    def update(
        self,
        r: np.ndarray,
        x: np.ndarray,
        p: np.ndarray,
        state: np.ndarray,
        history: np.ndarray,
    ) -> Kernel:
        """Return ``x = x + a p, p = r + b p`` with ``a = R2 / PAP`` and ``b = NEW_R2 / R2``; only p has a halo.

        The operation counts the iteration, and ends it if ``r . r`` is small enough or the limit is reached.
        """
        left, target = _reals(r), _reals(x)
        step = _reals(self._lattice.grid.interior(p))
        work = self._work.reshape(target.shape)
        real = target.dtype.type

        def run() -> None:
            r2, new_r2 = state[Slot.R2], state[Slot.NEW_R2]
            np.multiply(step, real(r2 / state[Slot.PAP]), out=work)
            np.add(target, work, out=target)
            np.multiply(step, real(new_r2 / r2), out=step)
            np.add(step, left, out=step)
            done = int(state[Slot.ITERATIONS])
            history[done] = state[Slot.R2] = new_r2
            state[Slot.ITERATIONS] = done + 1
            if new_r2 <= state[Slot.TARGET]:
                state[Slot.STATUS] = Status.CONVERGED
            elif done + 1 >= state[Slot.MOST]:
                state[Slot.STATUS] = Status.EXHAUSTED

        return _unless_ended(state, run)

    def sum(self, slot: Slot, a: Any, b: Any, state: np.ndarray) -> Kernel:
        """Return the reduction of the real part of ``a . b`` in double precision to ``state[slot]``; collective."""
        dot = self._lattice.grid.dot

        def run() -> None:
            state[slot] = dot(a, b).real

        return run

    def _apply(self, table: Table, source: np.ndarray) -> Kernel:
        """Return the computation of ``D source`` to a work array of this object."""
        neighbours, matrices = table.neighbours, table.matrices
        assert neighbours is not None
        for array in (source, matrices, self._result):
            if not array.flags.c_contiguous or array.dtype != matrices.dtype:
                raise ValueError(f"expected C-contiguous arrays of {matrices.dtype}")
        vectors, result = source.reshape(-1, 3), self._result
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


def _unless_ended(state: np.ndarray, work: Callable[[], None]) -> Kernel:
    def run() -> None:
        if state[Slot.STATUS] == Status.RUNNING:
            work()

    return run


def _reals(array: np.ndarray) -> np.ndarray:
    """Return a view of a complex array as real numbers, twice as many along the last axis."""
    return array.view(array.real.dtype)
