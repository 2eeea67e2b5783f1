"""The benchmark's definition: sizes, coefficients, the norms to reach, and the rate."""

from __future__ import annotations

from dataclasses import dataclass

Coefficients = tuple[float, float, float, float]
"""Weights of the centre, the 6 faces, the 12 edges and the 8 corners of a 27-point operator."""

OPERATOR: Coefficients = (-8 / 3, 0.0, 1 / 6, 1 / 12)
"""The operator A of the equation ``A u = v``."""

_SMOOTHER_A: Coefficients = (-3 / 8, 1 / 32, -1 / 64, 0.0)
_SMOOTHER_B: Coefficients = (-3 / 17, 1 / 33, -1 / 61, 0.0)

TOLERANCE = 1e-8
"""Limit on the relative error of the norm of a verified run."""

_OPERATIONS_PER_POINT = 58


@dataclass(frozen=True)
class ProblemClass:
    """One class of the benchmark.

    Attributes
    ----------
    name : str
    points : int
        Points per direction; a power of two.
    iterations : int
    smoother : tuple of float
        Coefficients of the operator C of ``u <- u + C r``.
    norm : float
        Official norm of the residual after the last iteration.
    """

    name: str
    points: int
    iterations: int
    smoother: Coefficients
    norm: float

    @property
    def levels(self) -> int:
        """Number of grids; level k has ``2**k`` points per direction, the finest is the last."""
        return self.points.bit_length() - 1

    @property
    def operations(self) -> int:
        """Floating-point operations of all iterations by the benchmark's count."""
        return _OPERATIONS_PER_POINT * self.iterations * self.points**3

    def error(self, norm: float) -> float:
        """Return the relative error of a norm; NaN counts as infinite."""
        error = abs(norm - self.norm) / self.norm
        return error if error == error else float("inf")

    def is_verified(self, norm: float) -> bool:
        """Whether the benchmark accepts a norm.

        Examples
        --------
        >>> CLASSES["S"].is_verified(0.53077070e-04), CLASSES["S"].is_verified(0.530771e-04)
        (True, False)
        """
        return self.error(norm) <= TOLERANCE


CLASSES = {
    found.name: found
    for found in (
        ProblemClass("S", 32, 4, _SMOOTHER_A, 0.5307707005734e-04),
        ProblemClass("W", 128, 4, _SMOOTHER_A, 0.6467329375339e-05),
        ProblemClass("A", 256, 4, _SMOOTHER_A, 0.2433365309069e-05),
        ProblemClass("B", 256, 20, _SMOOTHER_B, 0.1800564401355e-05),
        ProblemClass("C", 512, 20, _SMOOTHER_B, 0.5706732285740e-06),
        ProblemClass("D", 1024, 50, _SMOOTHER_B, 0.1583275060440e-09),
    )
}

FIRST_NORMS = {
    "S": (
        2.9337960976328e-03,
        6.3150017906228e-04,
        1.7360856792372e-04,
        5.3077070057349e-05,
    ),
    "W": (
        3.6169808586063e-04,
        7.7344445122371e-05,
        2.1179611299340e-05,
        6.4673293753392e-06,
    ),
    "A": (
        1.3240360877786e-04,
        2.8800287729946e-05,
        7.9473014547656e-06,
        2.4333653090695e-06,
    ),
    "B": (
        6.0203980728774e-04,
        3.7794573111532e-04,
        2.5234568702480e-04,
        1.7456824360352e-04,
    ),
    "C": (
        2.0685080687586e-04,
        1.2746752908389e-04,
        8.3986516608818e-05,
        5.7529179306627e-05,
    ),
}
"""Norms after the first four iterations, from an independent implementation that reaches the
official norms; without class D."""
