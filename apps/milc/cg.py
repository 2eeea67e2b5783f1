"""The conjugate gradient for ``(4 m^2 - D^2) x = b`` on the sites of one parity, as in MILC's ``d_congrad5_fn``.

Each iteration has two global sums. When the residual of the recursion is small enough, the true residual is computed.
If it is still too large, the iteration restarts from the current solution.

An iteration is a fixed list of steps. Its scalars (`state`) are in the memory of the vectors, and its kernels decide
there that the iteration has ended; later steps then do nothing. On GPUs an iteration can be captured in a graph, and
the host reads the state only after several iterations.

Mixed precision is iterative refinement: iterations solve ``A e = r`` in single precision for the residual
``r = b - A x`` in double precision, and ``e`` is added to ``x``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import halox

from ..capture import captured
from .lattice import NAMES
from .operator import Lap, Staggered, Step, no_lap, run
from .state import SLOTS, Slot, Status

MOST_RESTARTS = 5

MOST_CORRECTIONS = 30
"""Limit of corrections in mixed precision."""

CORRECTION = 1e-9
"""Reduction of ``|r|^2`` by one correction in mixed precision, within the reach of single precision."""

LAUNCHED = 8
"""Iterations that the host launches on a GPU before it reads whether the solver has ended."""


@dataclass
class Solution:
    """Result for one parity.

    Attributes
    ----------
    x : array
    iterations : int
    applications : int
        Applications of ``M^dagger M``: one per iteration and one per true residual. MILC counts these as iterations.
    residuals : int
        Number of true residuals computed.
    residual : float
        ``|b - M^dagger M x|^2 / |b|^2``.
    history : list of float
        ``|r|^2 / |b|^2`` of the recursion after every iteration.
    """

    x: Any
    iterations: int = 0
    applications: int = 0
    residuals: int = 0
    residual: float = math.inf
    history: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Stop:
    """End of the iteration: ``|r|^2 / |b|^2`` at most ``residual``, and an error after ``iterations``."""

    residual: float
    iterations: int


class ConjugateGradient:
    """Vectors and steps of the iteration on the sites of one parity.

    Parameters
    ----------
    operator : Staggered
    parity : {EVEN, ODD}
    mass : float
    stop : Stop
    inner : Staggered, optional
        The operator in single precision, for the iterations of mixed precision; by default ``operator`` iterates.

    Attributes
    ----------
    iteration : list of Step

    Notes
    -----
    Collective, as are all methods.
    """

    def __init__(
        self,
        operator: Staggered,
        parity: int,
        mass: float,
        stop: Stop,
        inner: Staggered | None = None,
    ) -> None:
        self._operator, self._parity, self._stop = operator, parity, stop
        self._kernels = kernels = operator.kernels
        self._b, self._x, self._r, ap = (operator.vector(parity) for _ in range(4))
        p = operator.fields[parity]
        # A separate state, so that true residuals are computed even after the iteration has ended.
        self._outer_state, self._state = kernels.state(), kernels.state()
        self._begin = [
            Step("linear algebra", lambda: operator.put("x", self._x, parity)),
            *operator.normal_steps(parity, mass, ap, self._outer_state),
            Step("linear algebra", kernels.begin(self._b, ap, self._r, p, self._outer_state)),
            Step("sums", kernels.sum(Slot.R2, self._r, self._r, self._outer_state)),
        ]

        self._is_mixed = inner is not None
        within, x, r = operator, self._x, self._r
        if inner is not None:
            within = inner
            x, r, ap = (inner.vector(parity) for _ in range(3))
            self._inner_vectors = x, r, inner.interiors[parity]
        kernels, state = within.kernels, self._state
        p, values = within.fields[parity], within.interiors[parity]
        self._history = kernels.history(stop.iterations)
        self.iteration = [
            *within.normal_steps(parity, mass, ap, state),
            Step("sums", kernels.sum(Slot.PAP, values, ap, state)),
            Step("linear algebra", kernels.reduce(ap, r, state)),
            Step("sums", kernels.sum(Slot.NEW_R2, r, r, state)),
            Step("linear algebra", kernels.update(r, x, p, state, self._history)),
        ]
        self._replay: Any = None

    def capture(self, stream: Any) -> None:
        """Capture an iteration in a graph, and replay it from now on; ``stream`` is the current stream.

        Raises
        ------
        halox.errors.StateError
            If the path of an exchange or a sum cannot be captured.
        """
        self._write(STATUS=Status.CONVERGED)
        run(self.iteration)  # builds kernels, plans and sums; CONVERGED prevents computation
        self._replay = captured(lambda: run(self.iteration), stream)

    def rewinding(self, b: Any) -> Callable[[], None]:
        """Return a function that restarts at ``x = 0``, so that `iteration` runs up to ``stop.iterations`` times.

        For measurements: the function is local and does not wait for the GPU; ``b`` must not change. Not for mixed
        precision, whose iterations solve for a correction.
        """
        of_b = float(self._operator.lattice.grid.dot(b, b).real)
        begin = self._kernels.state()
        numbers = _numbers(STATUS=Status.RUNNING, R2=of_b, TARGET=-1, MOST=self._stop.iterations)
        self._kernels.write(begin, numbers)

        def rewind() -> None:
            self._x.fill(0)
            self._r[...] = b
            self._operator.put("b", b, self._parity)
            self._state[...] = begin

        return rewind

    @property
    def residual(self) -> float:
        """``|r|^2`` of the recursion; waits for the GPU."""
        return float(self._kernels.read(self._state)[Slot.R2])

    @property
    def is_running(self) -> bool:
        """Whether the iteration has not ended; waits for the GPU."""
        return bool(self._kernels.read(self._state)[Slot.STATUS] == Status.RUNNING)

    def solve(self, b: Any, lap: Lap = no_lap) -> Solution:
        """Solve from ``x = 0``; the next call overwrites the array of the solution.

        Raises
        ------
        halox.errors.HaloxError
            If the iteration does not converge, or ``b`` has the wrong parity or is not finite; on all ranks.
        """
        operator, parity, stop = self._operator, self._parity, self._stop
        operator.lattice.check("b", b, parity)
        self._b[...] = b
        self._x.fill(0)
        found = Solution(self._x)
        of_b = float(operator.lattice.grid.dot(self._b, self._b).real)
        if not math.isfinite(of_b):
            raise halox.errors.HaloxError(
                f"the source has numbers on {NAMES[parity]} sites that are not finite; give another --source"
            )
        target = stop.residual * of_b
        most = MOST_CORRECTIONS if self._is_mixed else MOST_RESTARTS
        for _ in range(most + 1):
            run(self._begin, lap)
            of_r = float(self._kernels.read(self._outer_state)[Slot.R2])
            found.applications += 1
            found.residuals += 1
            found.residual = of_r / of_b if of_b else of_r
            if of_r <= target:
                return found
            self._iterate(found, of_r, of_b, target, lap)
        what = "corrections" if self._is_mixed else "restarts"
        raise self._failed(found, f"{most} {what} have not reduced it")

    def _iterate(self, found: Solution, of_r: float, of_b: float, target: float, lap: Lap) -> None:
        """Iterate until the residual of the recursion is small enough, and update x."""
        before, most = found.iterations, self._stop.iterations - found.iterations
        if self._is_mixed:
            e, r, p = self._inner_vectors
            e.fill(0)
            r[...] = self._r
            p[...] = self._r
            target = max(target / 2, CORRECTION * of_r)  # half, since the true residual is larger
            lap("linear algebra")
        # A NaN starts the iteration, too, which reports it as BROKEN.
        status = Status.EXHAUSTED if most <= 0 else Status.RUNNING
        self._write(STATUS=status, R2=of_r, TARGET=target, MOST=most)
        state = self._kernels.read(self._state)
        on_gpu = self._operator.lattice.grid.device == "gpu"
        while state[Slot.STATUS] == Status.RUNNING:
            for _ in range(LAUNCHED if on_gpu else 1):
                if self._replay is not None:
                    self._replay()
                else:
                    run(self.iteration, lap)
            state = self._kernels.read(self._state)
        done = int(state[Slot.ITERATIONS])
        found.iterations = before + done
        found.applications += done
        history = self._kernels.read(self._history[:done])
        found.history += (history / of_b).tolist()
        if state[Slot.STATUS] == Status.BROKEN:
            raise self._failed(found, f"p . M^dagger M p is {state[Slot.PAP]:.3g}")
        if state[Slot.STATUS] == Status.EXHAUSTED:
            raise self._failed(found, "no more iterations are allowed")
        if self._is_mixed:
            self._x += self._inner_vectors[0]
            lap("linear algebra")

    def _write(self, **values: float) -> None:
        self._kernels.write(self._state, _numbers(**values))

    def _failed(self, found: Solution, why: str) -> halox.errors.HaloxError:
        """Return the error of a solution that does not converge."""
        reached = found.history[-1] if found.history else found.residual
        return halox.errors.HaloxError(
            f"the conjugate gradient on {NAMES[self._parity]} sites has not converged after {found.iterations} "
            f"iterations: |r|^2 / |b|^2 is {reached:.3g}, the true one {found.residual:.3g} when last computed, and "
            f"{self._stop.residual:.3g} is asked for ({why}); give more --iterations, a larger --residual or --mass, "
            "or --precision double"
        )


def _numbers(**values: float) -> np.ndarray:
    """Return the scalars of an iteration: the given values, and 0 for the others."""
    state = np.zeros(SLOTS)
    for name, value in values.items():
        state[Slot[name]] = value
    return state


def solve(
    operator: Staggered,
    b: Any,
    parity: int,
    mass: float,
    stop: Stop,
    inner: Staggered | None = None,
) -> Solution:
    """Solve ``(4 m^2 - D^2) x = b`` once; see `ConjugateGradient`."""
    return ConjugateGradient(operator, parity, mass, stop, inner).solve(b)
