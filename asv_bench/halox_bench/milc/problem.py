"""A lattice with links that give eigenvectors in closed form, and the calls to measure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from types import ModuleType
from typing import Any, Self

import numpy as np

from halox.cli import catalogue
from halox_bench.milc.cases import MilcCase
from halox_bench.ranks.methods import WrongResult

MASS = 0.1
WAVES = (1, 1, 1, 0)
TOLERANCES = {"double": 1e-13, "single": 1e-5}
LOOSE = 1e-4
"""Residual of the solution that is checked."""

ITERATIONS = 10_000
REWOUND_AFTER = 100
"""Iterations after which the source is taken again, at most."""

LEAST_RESIDUALS = {"double": 1e-200, "single": 1e-50}
"""``|r|^2`` over the source's at which iterations begin again: smaller numbers lose precision and vanish, which ends
the iteration."""

_TEMPORARIES = 16
"""Temporary matrices of double precision a site, while the tables are made."""


def app(module: str) -> ModuleType:
    """Return a module of the mini-apps."""
    return import_module(f"{catalogue.package(catalogue.PACKAGE).__name__}.{module}")


class Problem:
    """Operator, solver and source of a case.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    device : {"cpu", "gpu"}

    Attributes
    ----------
    lattice, operator, gradient : object
        The mini-app's.
    sites : int
        Of one parity, on this rank.
    source : array
        On even sites.

    Raises
    ------
    halox.errors.HaloxError
        If the lattice cannot be divided, or memory does not suffice.

    Notes
    -----
    Collective, as are all methods. The links are ``G(x) G(x + mu)^dagger`` of random SU(3) matrices G: a gauge
    transformation of unit links, so that G times a plane wave is an eigenvector. They are made in the vectors' memory.
    """

    def __init__(self, case: MilcCase, comm: Any, device: str) -> None:
        lattices, self._links = app("milc.lattice"), app("milc.links")
        self._checks, self._even = app("milc.checks"), lattices.EVEN
        self._case = case
        with ExitStack() as stack:
            depth = max(case.distances)
            lattice = lattices.Lattice(case.lattice[::-1], depth, comm, device)
            self.lattice = stack.enter_context(lattice)
            needed = _bytes(case) * 2 * lattice.sites
            app("memory").check_memory(
                lattice.grid, f"--lattices {case.size}", lambda _: needed, "a smaller lattice"
            )
            self._make()
            self._stack = stack.pop_all()

    def _make(self) -> None:
        case, lattice = self._case, self.lattice
        grid, xp = lattice.grid, lattice.grid.xp
        self.sites: int = lattice.sites
        random = np.random.default_rng(1 + grid.rank)
        field = grid.zeros("c16", components_after=(3, 3))
        turns = grid.interior(field)
        turns[...] = app("milc.random_fields").special_unitary(
            2 * xp.asarray(random.random((*grid.rank_shape, 12))) - 1
        )
        grid.exchange(field)
        tables = self._links.tables_of(
            lattice, case.distances, self._matrices(field), np.dtype(case.dtype)
        )
        self._turns = turns
        self.operator: Any = app("milc.operator").Staggered(lattice, tables)
        cg = app("milc.cg")
        stop = cg.Stop(LOOSE, ITERATIONS)
        self.gradient: Any = cg.ConjugateGradient(self.operator, self._even, MASS, stop)
        self.source = self.operator.vector(self._even)
        numbers = random.random((*self.source.shape, 2)) - 0.5
        self.source[...] = xp.asarray(numbers[..., 0] + 1j * numbers[..., 1])
        self.rewind: Callable[[], None] = self.gradient.rewinding(self.source)
        self._in_a_row, self._done = self._ordinary_iterations(), 0

    def _matrices(self, field: Any) -> Callable[[int, int], Any]:
        """Return the matrices for each neighbour, made of a field of G with halo."""
        lattice, links, depth = self.lattice, self._links, self.lattice.depth
        axis_of = app("milc.lattice").axis_of
        shape, xp = lattice.grid.rank_shape, lattice.grid.xp
        inside = [slice(depth, depth + n) for n in shape]
        here = field[tuple(inside)]
        alone = len(self._case.distances) == 1

        def matrices(mu: int, step: int) -> Any:
            axis = axis_of(mu)
            place = list(inside)
            place[axis] = slice(depth + step, depth + step + shape[axis])
            there = field[tuple(place)].conj()
            coefficient = {1: 1.0 if alone else links.FAT, 3: links.LONG}[abs(step)]
            factor = xp.asarray(links.signs(lattice, mu, step) * coefficient * np.sign(step))
            # Rows times conjugate rows: the product with the adjoint.
            found = here[..., :, None, 0] * there[..., None, :, 0]
            for column in (1, 2):
                found += here[..., :, None, column] * there[..., None, :, column]
            found *= factor[..., None, None]
            return found

        return matrices

    def check(self) -> None:
        """Compare D with its eigenvalue, and solve a system.

        Raises
        ------
        WrongResult
            On all ranks, if the eigenvalue is wrong or the solution does not converge.
        """
        checks, lattice, distances = self._checks, self.lattice, self._case.distances
        expected = checks.eigenvalue(lattice.shape, WAVES, distances)
        wave = lattice.grid.xp.asarray(checks.plane_wave(lattice, WAVES))
        error = checks.eigenvector_error(
            self.operator, (self._turns * wave[..., None, :]).sum(axis=-1), expected
        )
        limit = TOLERANCES[self._case.precision]
        if not error <= limit:
            raise WrongResult(f"D^2 of an eigenvector is wrong by {error:.2g}, and at most {limit}")
        self.gradient.solve(self.source)

    def dslash(self) -> Callable[[], None]:
        """Return D without its exchange, from even to odd sites; iterations keep no values there."""
        steps = self.operator.dslash_steps(1 - self._even, self.operator.kernels.state())
        return self._only(steps, False)

    def exchanges(self) -> Callable[[], None]:
        """Return the two exchanges of an iteration."""
        return self._only(self.gradient.iteration, True)

    def _only(self, steps: Any, exchanges: bool) -> Callable[[], None]:
        calls = [step.call for step in steps if (step.part == "exchange") is exchanges]

        def run() -> None:
            for call in calls:
                call()

        return run

    def iteration(self) -> None:
        """Do one iteration."""
        for step in self.gradient.iteration:
            step.call()

    def _ordinary_iterations(self) -> int:
        """Return the number of iterations from the source with ordinary numbers."""
        self.rewind()
        least = LEAST_RESIDUALS[self._case.precision] * self.gradient.residual
        for done in range(1, REWOUND_AFTER):
            self.iteration()
            if not self.gradient.residual > least:
                return done
        return REWOUND_AFTER

    def iterations(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return a call that is an iteration; ``call`` is one, or a graph of one.

        All these calls together begin again before their numbers become too small.
        """

        def run() -> None:
            if self._done % self._in_a_row == 0:
                self.rewind()
            self._done += 1
            call()

        return run

    def floor_bytes(self) -> tuple[int, int]:
        """Return the bytes of D and of an iteration's kernels on this rank."""
        kernels = app("milc.device_kernels")
        neighbours = len(app("milc.lattice").directions(self._case.distances))
        each = kernels.iteration_bytes(neighbours, np.dtype(self._case.dtype).itemsize)
        return each["dslash"] * self.sites, sum(each.values()) * self.sites

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the lattice, unless an exception propagates."""
        self._stack.__exit__(*error)


def _bytes(case: MilcCase) -> int:
    """Return the bytes of memory a site, both parities."""
    matrices = 8 * len(case.distances) * 9 * np.dtype(case.dtype).itemsize
    places = 8 * len(case.distances) * 8
    return matrices + places + _TEMPORARIES * 144
