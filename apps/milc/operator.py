"""The staggered operator, and ``M^dagger M = 4 m^2 - D^2`` on the sites of one parity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..common import Kernel
from .device_kernels import DeviceKernels
from .host_kernels import HostKernels
from .lattice import PARITIES, Lattice
from .links import Table

PARTS = ("exchange", "dslash", "linear algebra", "sums")
"""Names of the parts of an iteration."""

Lap = Callable[[str], None]
"""``lap(part)`` ends the measurement of a part of the work and starts the next measurement."""


class Step(NamedTuple):
    """A kernel, an exchange or a sum."""

    part: str
    """One of `PARTS`."""
    call: Kernel


def no_lap(part: str) -> None:
    """Measure nothing."""


def run(steps: Sequence[Step], lap: Lap = no_lap) -> None:
    """Call the steps in order."""
    for part, call in steps:
        call()
        lap(part)


class Staggered:
    """The operator D, which maps vectors of one parity to the opposite parity.

    ``D psi(x) = sum over mu of F_mu(x) psi(x+mu) - F_mu(x-mu)^dagger psi(x-mu)``, and the same with the long links at
    three times the distance. D is anti-Hermitian, so that ``M^dagger M = 4 m^2 - D^2`` for ``M = 2 m + D``.

    Parameters
    ----------
    lattice : Lattice
    tables : pair of Table
        For results on even and on odd sites.
    kernels : HostKernels or DeviceKernels, optional
        By default the kernels for the memory of the lattice's vectors.

    Attributes
    ----------
    dtype : dtype
    tables : pair of Table
    fields, interiors : list
        For each parity the vector with halo that D reads or writes, and a view of its sites as a vector without halo.

    Notes
    -----
    Collective, as are all methods. Vectors are fields from `vector`; a vector of the wrong parity is an error.
    """

    def __init__(self, lattice: Lattice, tables: tuple[Table, Table], kernels: Any = None) -> None:
        self.lattice = lattice
        self.dtype: np.dtype[Any] = tables[0].matrices.dtype
        if kernels is None:
            make = DeviceKernels if lattice.components_first else HostKernels
            kernels = make(lattice, self.dtype)
        self.kernels = kernels
        self.fields = [lattice.vectors(self.dtype, parity, halo=True) for parity in PARITIES]
        self.interiors = [lattice.interior(self.fields[parity], parity) for parity in PARITIES]
        self.tables = tables
        self._exchanges = [
            Step("exchange", lattice.grid.plan(self.fields[parity])) for parity in PARITIES
        ]
        always = kernels.state()
        self._dslash = [self.dslash_steps(parity, always) for parity in PARITIES]

    def vector(self, parity: int) -> Any:
        """Return a vector of zeros on the sites of one parity."""
        return self.lattice.vectors(self.dtype, parity)

    def dslash_steps(self, parity: int, state: Any) -> list[Step]:
        """Return the steps that write D times ``fields[1 - parity]`` to ``fields[parity]``.

        The kernels do nothing once ``state`` says that the iteration has ended.
        """
        source, out = self.fields[1 - parity], self.fields[parity]
        call = self.kernels.dslash(self.tables[parity], source, out, parity, state)
        return [self._exchanges[1 - parity], Step("dslash", call)]

    def normal_steps(self, parity: int, mass: float, out: Any, state: Any) -> list[Step]:
        """Return the steps of ``out = (4 m^2 - D^2) p`` for p in ``fields[parity]``.

        On GPUs they also store this rank's ``p . out`` in the state.
        """
        self.lattice.check("out", out, parity)
        between, p = self.fields[1 - parity], self.fields[parity]
        arguments = self.tables[parity], between, p, out, 4 * mass**2, parity, state
        return [
            *self.dslash_steps(1 - parity, state),
            self._exchanges[1 - parity],
            Step("dslash", self.kernels.normal(*arguments)),
        ]

    def dslash(self, source: Any, parity: int) -> Any:
        """Return ``D source`` on the sites of ``parity``; ``source`` has the opposite parity.

        The array belongs to the operator; the next call overwrites it.
        """
        self.put("source", source, 1 - parity)
        run(self._dslash[parity])
        return self.interiors[parity]

    def normal(self, source: Any, parity: int, mass: float, out: Any) -> None:
        """Compute ``out = (4 m^2 - D^2) source`` on the sites of ``parity``."""
        self.lattice.check("out", out, parity)
        self.put("source", source, parity)
        run(self.normal_steps(parity, mass, out, self.kernels.state()))

    def put(self, name: str, source: Any, parity: int) -> None:
        """Copy a vector to ``fields[parity]``."""
        self.lattice.check(name, source, parity)
        if source is not self.interiors[parity]:
            self.interiors[parity][...] = source
