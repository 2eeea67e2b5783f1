"""The same arithmetic on whole NumPy arrays, as users write it for one rank: gathers by index, without halos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from halox_bench.milc.cases import MilcCase
from halox_bench.milc.problem import MASS, Problem

WHOLE = "whole NumPy arrays"
PIECES = "whole NumPy arrays in pieces"
PIECE = 256
"""Sites of a piece; their neighbours' vectors fit into the cache."""

Calls = tuple[Callable[[], Any], Callable[[], None]]


class WholeArrays:
    """Vectors ``(sites, 3)`` of the even and of the odd sites of a lattice on one rank.

    Parameters
    ----------
    problem : Problem
        On NumPy arrays; its matrices and source are used.
    piece : int
        Sites that D processes at a time; 0 for all.
    """

    def __init__(self, case: MilcCase, problem: Problem, piece: int) -> None:
        self._matrices = [table.matrices for table in problem.operator.tables]
        self._neighbours = [_neighbours(case, parity) for parity in (0, 1)]
        self._b = problem.source.reshape(-1, 3)
        self._between, self.result, self._p = (np.empty_like(self._b) for _ in range(3))
        self._x, self._r = np.zeros_like(self._b), np.zeros_like(self._b)
        self._piece = piece or len(self._b)
        self._scale = self._b.real.dtype.type(4 * MASS**2)
        self._r2, self._iterations = 0.0, 0

    def dslash(self, parity: int, source: np.ndarray, out: np.ndarray) -> None:
        """Compute D of a vector on the sites of a parity."""
        neighbours, matrices = self._neighbours[parity], self._matrices[parity]
        for start in range(0, len(out), self._piece):
            part = slice(start, start + self._piece)
            rows = np.take(source, neighbours[part], axis=0, mode="clip")
            np.vecdot(matrices[part], rows.reshape(len(rows), 1, -1), out=out[part])

    def multiply(self) -> None:
        """Compute D of the source on odd sites."""
        self.dslash(1, self._b, self.result)

    def iteration(self, rewound_after: int) -> None:
        """Do an iteration of the conjugate gradient."""
        x, r, p, ap = self._x, self._r, self._p, self.result
        if self._iterations % rewound_after == 0:
            x[...] = 0
            r[...] = p[...] = self._b
            self._r2 = np.vdot(r, r).real
        self._iterations += 1
        self.dslash(1, p, self._between)
        self.dslash(0, self._between, ap)
        np.subtract(self._scale * p, ap, out=ap)
        a = r.real.dtype.type(self._r2 / np.vdot(p, ap).real)
        r -= a * ap
        r2 = np.vdot(r, r).real
        x += a * p
        p *= r.real.dtype.type(r2 / self._r2)
        p += r
        self._r2 = r2


def _neighbours(case: MilcCase, parity: int) -> np.ndarray:
    """Return the numbers of all neighbours, which have the other parity, ``(sites, directions)``."""
    shape = case.lattice[::-1]
    sites = np.indices(shape).reshape(4, -1)
    sites = sites[:, sites.sum(axis=0) % 2 == parity]
    found = []
    for distance in case.distances:
        for axis in (3, 2, 1, 0):
            for step in (distance, -distance):
                there = sites.copy()
                there[axis] = (there[axis] + step) % shape[axis]
                # Sites alternate along x: a site is number half its place.
                found.append(np.ravel_multi_index(there, shape) // 2)
    return np.stack(found, axis=1)
