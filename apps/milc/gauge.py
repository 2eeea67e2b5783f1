"""Gauge fields: four SU(3) matrices per site, ``(t, z, y, x, 4, 3, 3)``, along x, y, z and t; and tests of them."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np

from . import random_fields, scidac
from .lattice import AXES, Lattice

TOLERANCE = 1e-5
"""Largest deviation from SU(3) without a warning; files in single precision deviate by 1e-6."""


class Plaquettes(NamedTuple):
    """Means of ``Re Tr U U U^dagger U^dagger`` over space-space planes and over space-time planes."""

    space_space: float
    space_time: float


def gauge_field(lattice: Lattice, kind: str, seed: int) -> np.ndarray:
    """Return this rank's block of a gauge field, complex128.

    Parameters
    ----------
    lattice : Lattice
    kind : str
        "unit", "random", or the name of a SciDAC file.
    seed : int
        Seed of the random field, which does not depend on the number of ranks.

    Raises
    ------
    halox.errors.HaloxError
        If the file cannot be used, on all ranks.

    Notes
    -----
    Collective. Warns on rank 0 if links of a file are not in SU(3).
    """
    if kind == "unit":
        found = np.zeros((*lattice.grid.rank_shape, AXES, 3, 3), np.complex128)
        found[...] = np.eye(3)
        return found
    if kind == "random":
        return random_fields.random_matrices(
            lattice.shape, lattice.owned, AXES, seed, random_fields.LINKS
        )
    found = scidac.read(kind, lattice.grid, scidac.LINKS)
    far = deviation(lattice, found)
    if not far <= TOLERANCE and lattice.grid.rank == 0:
        warnings.warn(
            f"--gauge {kind}: links deviate from SU(3) by up to {far:.2g} (U U^dagger - 1, and det U - 1), and "
            f"{TOLERANCE:g} is allowed for; links with coefficients belong to --fat and --long",
            stacklevel=2,
        )
    return found


def deviation(lattice: Lattice, links: np.ndarray) -> float:
    """Return the largest modulus of an element of ``U U^dagger - 1`` and of ``det U - 1``; collective."""
    matrices = links.reshape(-1, 3, 3)
    away = np.abs(np.matmul(matrices, dagger(matrices)) - np.eye(3)).max()
    mine = np.maximum(away, np.abs(np.linalg.det(matrices) - 1).max())
    return float(lattice.grid.allreduce(mine, "max"))


def plaquettes(lattice: Lattice, links: np.ndarray) -> Plaquettes:
    """Return the mean plaquettes of a gauge field, which are 3 for unit matrices; collective.

    ::

        x + nu  --- U_mu(x + nu) --->
          ^                          ^
          | U_nu(x)                  | U_nu(x + mu)
          |                          |
          x  ------ U_mu(x) ------>  x + mu
    """
    sums = np.zeros(2)
    along = [np.ascontiguousarray(links[..., mu, :, :]) for mu in range(AXES)]
    for nu in range(1, AXES):
        for mu in range(nu):
            lower = np.matmul(along[mu], lattice.shifted(along[nu], mu, 1))
            upper = np.matmul(along[nu], lattice.shifted(along[mu], nu, 1))
            # Re Tr A B^dagger is the scalar product of their elements.
            sums[int(nu == AXES - 1)] += np.vdot(upper, lower).real
    planes = AXES - 1
    space, time = (lattice.grid.allreduce(sums) / (planes * lattice.volume)).tolist()
    return Plaquettes(space, time)


def dagger(matrices: np.ndarray) -> np.ndarray:
    """Return the adjoints of matrices, which are the last two axes of an array."""
    found: np.ndarray = matrices.conj().swapaxes(-1, -2)
    return found
