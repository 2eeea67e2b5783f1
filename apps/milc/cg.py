"""The conjugate gradient for ``(4 m^2 - D^2) x = b`` on the sites of one parity, as MILC's ``d_congrad5_fn`` does it.

Two global sums an iteration. When the residual of the recursion is small enough, the true one is computed; if that is
still too large, the iteration starts again from the solution found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import halox

from .lattice import NAMES
from .operator import Lap, Staggered, no_lap

MOST_RESTARTS = 5


@dataclass
class Solution:
    """Result for one parity.

    Attributes
    ----------
    x : array
    iterations : int
    applications : int
        Of ``M^dagger M``: one an iteration, and one for every true residual. MILC counts these as iterations.
    residual : float
        ``|b - M^dagger M x|^2 / |b|^2``.
    history : list of float
        ``|r|^2 / |b|^2`` of the recursion after every iteration.
    """

    x: Any
    iterations: int = 0
    applications: int = 0
    residual: float = math.inf
    history: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Stop:
    """End of the iteration: ``|r|^2 / |b|^2`` at most ``residual``, and an error after ``iterations``."""

    residual: float
    iterations: int


def solve(
    operator: Staggered, b: Any, parity: int, mass: float, stop: Stop, lap: Lap = no_lap
) -> Solution:
    """Solve ``(4 m^2 - D^2) x = b`` from ``x = 0``.

    Raises
    ------
    halox.errors.HaloxError
        If it does not converge, or ``b`` is not on these sites; on all ranks.

    Notes
    -----
    Collective. The scalars are real parts of sums formed in double precision, the same on all ranks.
    """
    kernels, dot = operator.kernels, operator.lattice.grid.dot
    operator.lattice.check("b", b, parity)
    found = Solution(operator.vector(parity))
    r, p, ap = (operator.vector(parity) for _ in range(3))
    of_b = _squared(dot(b, b))
    if not math.isfinite(of_b):
        raise halox.errors.HaloxError(
            f"the source has numbers on {NAMES[parity]} sites that are not finite; give another --source"
        )
    target = stop.residual * of_b
    for _ in range(MOST_RESTARTS + 1):
        operator.normal(found.x, parity, mass, ap, lap)
        kernels.copy(b, r)
        kernels.add(-1.0, ap, r)
        kernels.copy(r, p)
        lap("linear algebra")
        of_r = _squared(dot(r, r))
        lap("sums")
        found.applications += 1
        found.residual = of_r / of_b if of_b else of_r
        if of_r <= target:
            return found
        while not of_r <= target and found.iterations < stop.iterations:  # NaN as well
            operator.normal(p, parity, mass, ap, lap)
            of_p = _squared(dot(p, ap))
            lap("sums")
            if not of_p > 0:
                raise _failed(found, parity, stop, f"p . M^dagger M p is {of_p:.3g}")
            step = of_r / of_p
            kernels.add(step, p, found.x)
            kernels.add(-step, ap, r)
            lap("linear algebra")
            before, of_r = of_r, _squared(dot(r, r))
            lap("sums")
            kernels.scale_add(of_r / before, r, p)
            lap("linear algebra")
            found.iterations += 1
            found.applications += 1
            found.history.append(of_r / of_b)
        if not of_r <= target:
            raise _failed(found, parity, stop, "no more iterations are allowed")
    raise _failed(found, parity, stop, f"{MOST_RESTARTS} restarts have not reduced it")


def _squared(value: Any) -> float:
    return float(value.real)


def _failed(found: Solution, parity: int, stop: Stop, why: str) -> halox.errors.HaloxError:
    """Return the error of a solution that does not converge."""
    reached = found.history[-1] if found.history else found.residual
    return halox.errors.HaloxError(
        f"the conjugate gradient on {NAMES[parity]} sites has not converged after {found.iterations} iterations: "
        f"|r|^2 / |b|^2 is {reached:.3g}, the true one {found.residual:.3g} when last computed, and "
        f"{stop.residual:.3g} is asked for ({why}); give more --iterations, a larger --residual or --mass, or "
        "--precision double"
    )
