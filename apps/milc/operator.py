"""The staggered operator, and ``M^dagger M = 4 m^2 - D^2`` on the sites of one parity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .host_kernels import HostKernels
from .lattice import PARITIES, Lattice
from .links import Table

PARTS = ("exchange", "dslash", "linear algebra", "sums")
"""Names of the parts of an iteration."""

Lap = Callable[[str], None]
"""``lap(part)`` ends a part of the work; the next one begins."""


def no_lap(part: str) -> None:
    """Measure nothing."""


class Staggered:
    """The operator D on vectors of one parity, which it takes to the other.

    ``D psi(x) = sum over mu of F_mu(x) psi(x+mu) - F_mu(x-mu)^dagger psi(x-mu)``, and the same with the long links at
    three times the distance. D is anti-Hermitian, so that ``M^dagger M = 4 m^2 - D^2`` for ``M = 2 m + D``.

    Parameters
    ----------
    lattice : Lattice
    tables : pair of Table
        For results on even and on odd sites.

    Notes
    -----
    Collective, as are all methods. Vectors are fields of `vector`; one on sites of the other parity is an error.
    """

    def __init__(self, lattice: Lattice, tables: tuple[Table, Table]) -> None:
        self.lattice = lattice
        self.dtype: np.dtype[Any] = tables[0].conjugates.dtype
        # With halo, by the parity of their sites; and results by that of theirs.
        self._sources = [lattice.vectors(self.dtype, parity, halo=True) for parity in PARITIES]
        self._interiors = [lattice.grid.interior(source) for source in self._sources]
        self._exchanges = [lattice.grid.plan(source) for source in self._sources]
        self._results = [self.vector(parity) for parity in PARITIES]
        self.kernels = HostKernels(self._results[0])
        self._dslash = [
            self.kernels.dslash(tables[parity], self._sources[1 - parity], self._results[parity])
            for parity in PARITIES
        ]

    def vector(self, parity: int) -> Any:
        """Return a vector of zeros on the sites of one parity."""
        return self.lattice.vectors(self.dtype, parity)

    def dslash(self, source: Any, parity: int, lap: Lap = no_lap) -> Any:
        """Return ``D source`` on the sites of ``parity``; ``source`` is on the others.

        The array is the operator's, and keeps its values until the next call.
        """
        other = 1 - parity
        self.lattice.check("source", source, other)
        self.kernels.copy(source, self._interiors[other])
        lap("linear algebra")
        self._exchanges[other]()
        lap("exchange")
        self._dslash[parity]()
        lap("dslash")
        return self._results[parity]

    def normal(self, source: Any, parity: int, mass: float, out: Any, lap: Lap = no_lap) -> None:
        """Compute ``out = (4 m^2 - D^2) source`` on the sites of ``parity``."""
        self.lattice.check("out", out, parity)
        between = self.dslash(source, 1 - parity, lap)
        self.kernels.combine(4 * mass**2, source, self.dslash(between, parity, lap), out)
        lap("linear algebra")
