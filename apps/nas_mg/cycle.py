"""One iteration as a fixed list of steps: kernels and exchanges without decisions.

All decisions are made when the list is built. On a GPU an iteration thus consists only of launches
on the current stream, and can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .classes import OPERATOR, Coefficients
from .hierarchy import Hierarchy, Level

PARTS = ("smoother", "residual", "restriction", "prolongation", "exchange", "gather")
"""Names of the parts of an iteration, for the times of its steps."""

_MINUS_OPERATOR: Coefficients = tuple(-weight for weight in OPERATOR)  # type: ignore[assignment]


@dataclass(frozen=True)
class Step:
    """One kernel or exchange.

    Attributes
    ----------
    part : str
        One of `PARTS`.
    level : int
    call : callable
    """

    part: str
    level: int
    call: Callable[[], None]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends to other ranks in the step."""
        return int(getattr(self.call, "bytes_sent", 0))


def residual(hierarchy: Hierarchy, kernels: Any) -> list[Step]:
    """Return the steps of ``r = v - A u`` on the finest level."""
    finest = hierarchy.levels[-1]
    return [_subtract(finest, hierarchy.v, kernels), _exchange(finest, finest.exchange_r)]


def iteration(hierarchy: Hierarchy, kernels: Any, smoother: Coefficients) -> list[Step]:
    """Return the steps of one iteration: a V-cycle, and the new residual.

    Parameters
    ----------
    hierarchy : Hierarchy
    kernels : HostKernels or DeviceKernels
        Operators for the memory of its fields.
    smoother : tuple of float
        Coefficients of the class.

    Notes
    -----
    As in the original, the cycle goes down to the coarsest level, applies the smoother once, and
    goes up with one application on every level. Ghosts are filled after all steps except the
    prolongation, which computes them.
    """
    levels = hierarchy.levels
    coarsest, finest = levels[0], levels[-1]
    steps = []
    for fine, coarse in zip(levels[:0:-1], levels[-2::-1], strict=True):
        restrict = kernels.restrict(fine.r, coarse.r_block)
        steps.append(Step("restriction", fine.number, restrict))
        if coarse.gather_r is not None:
            steps.append(Step("gather", coarse.number, coarse.gather_r))
        steps.append(_exchange(coarse, coarse.exchange_r))

    steps.append(Step("smoother", coarsest.number, lambda: coarsest.u.fill(0)))
    steps += _smooth(coarsest, kernels, smoother)
    for coarse, fine in pairwise(levels[:-1]):
        # The correction starts from zero, so the interpolated values are stored rather than added.
        prolong = kernels.prolong(coarse.u_block, fine.u, add=False)
        steps.append(Step("prolongation", fine.number, prolong))
        steps.append(_subtract(fine, fine.r, kernels))
        steps.append(_exchange(fine, fine.exchange_r))
        steps += _smooth(fine, kernels, smoother)
    prolong = kernels.prolong(levels[-2].u_block, finest.u, add=True)
    steps.append(Step("prolongation", finest.number, prolong))
    steps += residual(hierarchy, kernels)
    steps += _smooth(finest, kernels, smoother)
    steps += residual(hierarchy, kernels)
    return steps


def run(steps: Iterable[Step]) -> None:
    """Call the steps in order."""
    for step in steps:
        step.call()


def set_charges(hierarchy: Hierarchy, plus: np.ndarray, minus: np.ndarray) -> None:
    """Reset the fields: u = 0, and v = 1 and -1 at the given points of the whole grid, else 0.

    Parameters
    ----------
    hierarchy : Hierarchy
    plus, minus : ndarray of int, shape (n, 3)
        Coordinates (z, y, x).

    Notes
    -----
    Local, since no exchange is needed: the ghosts of v are never read, and all of u is zero.
    """
    hierarchy.levels[-1].u.fill(0)
    hierarchy.v.fill(0)
    owned = hierarchy.finest.owned
    interior = hierarchy.finest.interior(hierarchy.v)
    for points, value in ((plus, 1.0), (minus, -1.0)):
        for point in points.tolist():
            if all(part.start <= at < part.stop for at, part in zip(point, owned, strict=True)):
                here = tuple(at - part.start for at, part in zip(point, owned, strict=True))
                interior[here] = value


def _subtract(level: Level, base: Any, kernels: Any) -> Step:
    """Return the step ``r = base - A u``."""
    return Step("residual", level.number, kernels.stencil(level.u, base, level.r, _MINUS_OPERATOR))


def _smooth(level: Level, kernels: Any, smoother: Coefficients) -> list[Step]:
    """Return the steps of ``u = u + C r``."""
    smooth = kernels.stencil(level.r, level.u, level.u, smoother)
    return [Step("smoother", level.number, smooth), _exchange(level, level.exchange_u)]


def _exchange(level: Level, plan: Callable[[], None]) -> Step:
    return Step("exchange", level.number, plan)
