"""The benchmark's definition: sizes, evolution, the checksums to reach, and the rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .checksums import CHECKSUMS

ALPHA = 1e-6
"""Diffusion constant."""

DECAY = -4 * ALPHA * math.pi**2
"""An iteration multiplies the coefficient of wave number k by ``exp(DECAY |k|**2)``."""

SAMPLES = 1024
"""Points of a checksum."""

TOLERANCE = 1e-12
"""Limit on the relative error of each checksum of a verified run."""


@dataclass(frozen=True)
class ProblemClass:
    """One class of the benchmark.

    Attributes
    ----------
    name : str
    shape : tuple of int
        Points along z, y and x.
    iterations : int
    """

    name: str
    shape: tuple[int, int, int]
    iterations: int

    @property
    def points(self) -> int:
        """Points of the grid."""
        return math.prod(self.shape)

    @property
    def checksums(self) -> np.ndarray:
        """Official checksums, complex128, one per iteration."""
        return np.array(CHECKSUMS[self.name])

    @property
    def operations(self) -> float:
        """Floating-point operations of a run by the benchmark's count."""
        log = math.log(self.points)
        of_iteration = 5.23518 + 7.21113 * log
        return self.points * (14.8157 + 7.19641 * log + of_iteration * self.iterations)

    def errors(self, checksums: Sequence[complex] | np.ndarray) -> list[float]:
        """Return the relative errors of the checksums of all iterations; NaN counts as infinite."""
        official = self.checksums
        errors = np.abs(np.asarray(checksums) - official) / np.abs(official)
        return [error if error == error else float("inf") for error in errors.tolist()]

    def is_verified(self, checksums: Sequence[complex] | np.ndarray) -> bool:
        """Whether the benchmark accepts the checksums of all iterations.

        Examples
        --------
        >>> official = CLASSES["S"].checksums
        >>> CLASSES["S"].is_verified(official), CLASSES["S"].is_verified(official * (1 + 2e-12))
        (True, False)
        """
        return max(self.errors(checksums)) <= TOLERANCE


CLASSES = {
    found.name: found
    for found in (
        ProblemClass("S", (64, 64, 64), 6),
        ProblemClass("W", (32, 128, 128), 6),
        ProblemClass("A", (128, 256, 256), 6),
        ProblemClass("B", (256, 256, 512), 20),
        ProblemClass("C", (512, 512, 512), 20),
        ProblemClass("D", (1024, 1024, 2048), 25),
    )
}


def sample_points(shape: tuple[int, int, int]) -> np.ndarray:
    """Return the points (z, y, x) of a checksum, one row each; a point may occur more than once.

    Examples
    --------
    >>> sample_points((64, 64, 64))[:2].tolist(), len(sample_points((64, 64, 64)))
    ([[5, 3, 1], [10, 6, 2]], 1024)
    """
    j = np.arange(1, SAMPLES + 1)
    points: np.ndarray = np.stack([5 * j, 3 * j, j], axis=1) % np.array(shape)
    return points
