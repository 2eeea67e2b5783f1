"""Checks of the operator without reference results of other programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import random_fields
from .lattice import AXES, EVEN, ODD, PARITIES, Lattice, axis_of
from .links import FAT, LONG, TIME
from .operator import Staggered

TOLERANCES = {"double": 1e-13, "mixed": 1e-13, "single": 1e-5}
"""Largest relative errors of a verified run."""

PLAQUETTE = 1e-12
"""Largest deviation of the plaquettes of unit matrices from 3."""


def anti_hermiticity(operator: Staggered, seed: int) -> float:
    """Return ``|<a, D b> + <D a, b>| / (|a| |D b|)`` for random vectors; zero for an exact operator. Collective."""
    lattice = operator.lattice
    dot, norm = lattice.grid.dot, lattice.grid.norm
    a, b = vectors(
        operator,
        random_fields.random_vectors(lattice.shape, lattice.owned, seed, random_fields.TEST),
    )
    forward = operator.dslash(b, EVEN)
    size = norm(a) * norm(forward)
    product = dot(a, forward)
    return float(abs(product + dot(operator.dslash(a, ODD), b)) / size)


def plane_wave_error(operator: Staggered, distances: Sequence[int]) -> float:
    """Return the relative error of ``D^2 psi`` for a plane wave on unit links; see `eigenvector_error`. Collective."""
    lattice, waves = operator.lattice, (1, 1, 1, 0)
    expected = eigenvalue(lattice.shape, waves, distances)
    return eigenvector_error(operator, plane_wave(lattice, waves), expected)


def eigenvector_error(operator: Staggered, block: Any, expected: float) -> float:
    """Return the relative error of ``D^2 psi`` for an eigenvector, the larger of both parities; collective.

    ``block`` is ``(t, z, y, x, 3)``, a NumPy array or in the memory of the operator's vectors.
    """
    psi, worst = vectors(operator, block), 0.0
    norm = operator.lattice.grid.norm
    for parity in PARITIES:
        found = operator.dslash(operator.dslash(psi[parity], 1 - parity), parity)
        error = operator.vector(parity)
        error[...] = found - expected * psi[parity]
        worst = max(worst, float(norm(error) / (abs(expected) * norm(psi[parity]))))
    return worst


def plane_wave(lattice: Lattice, waves: Sequence[int]) -> np.ndarray:
    """Return ``exp(i p x)`` times a constant colour vector, ``(t, z, y, x, 3)``, for wave numbers along x, y, z, t."""
    phase = sum(
        p
        * np.arange(part.start, part.stop).reshape(
            [-1 if axis == own else 1 for axis in range(AXES)]
        )
        for own, (p, part) in enumerate(
            zip(momenta(lattice.shape, waves)[::-1], lattice.owned, strict=True)
        )
    )
    wave: np.ndarray = np.exp(1j * np.asarray(phase))[..., None] * np.array([1, 0.5j, -0.25])
    return wave


def momenta(shape: Sequence[int], waves: Sequence[int]) -> list[float]:
    """Return the momenta along x, y, z and t of wave numbers, antiperiodic in time."""
    return [(2 * n + (mu == TIME)) * math.pi / shape[axis_of(mu)] for mu, n in enumerate(waves)]


def eigenvalue(shape: Sequence[int], waves: Sequence[int], distances: Sequence[int]) -> float:
    """Return the eigenvalue of ``D^2`` on unit links.

    Examples
    --------
    >>> eigenvalue((10, 8, 6, 4), (1, 2, 3, 2), [1])
    -13.0
    >>> round(eigenvalue((10, 8, 6, 4), (1, 2, 3, 2), [1, 3]), 12)
    -17.032986111111
    """
    coefficients = {1: 1.0} if len(distances) == 1 else {1: FAT, 3: LONG}
    terms = (
        sum(2 * value * math.sin(distance * p) for distance, value in coefficients.items())
        for p in momenta(shape, waves)
    )
    return -sum(term**2 for term in terms)


def vectors(operator: Staggered, block: Any) -> tuple[Any, Any]:
    """Split a block ``(t, z, y, x, 3)`` into fields of the even and of the odd sites, in the operator's precision."""
    fields = operator.vector(EVEN), operator.vector(ODD)
    for target, values in zip(fields, operator.lattice.split(block), strict=True):
        operator.lattice.place(values, target)
    return fields
