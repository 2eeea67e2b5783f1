"""Staggered operators on a whole lattice of NumPy arrays, by their definitions: the reference of the mini-app milc."""

from __future__ import annotations

import numpy as np

AXIS = (3, 2, 1, 0)
"""Axes of x, y, z and t in arrays ``(t, z, y, x, ...)``."""


def phases(shape: tuple[int, ...]) -> np.ndarray:
    """MILC's staggered phases, ``(t, z, y, x, 4)``."""
    t, _, y, x = np.indices(shape)
    return np.stack([(-1.0) ** t, (-1.0) ** (t + x), (-1.0) ** (t + x + y), np.ones(shape)], -1)


def there(field: np.ndarray, mu: int, distance: int) -> np.ndarray:
    """Values at ``x + distance mu``, periodic."""
    return np.roll(field, -distance, AXIS[mu])


def times(matrices: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    return np.einsum("...ab,...b->...a", matrices, vectors)


def dagger(matrices: np.ndarray) -> np.ndarray:
    return np.conj(np.swapaxes(matrices, -1, -2))


def hop(psi: np.ndarray, links: np.ndarray, distance: int) -> np.ndarray:
    """Sum over mu of ``U psi(x+d) - U(x-d)^dagger psi(x-d)``, with psi antiperiodic in time."""
    nt = psi.shape[0]
    signs = phases(psi.shape[:4])
    total = np.zeros_like(psi)
    for mu in range(4):
        ahead, behind = there(psi, mu, distance), there(psi, mu, -distance)
        if mu == 3:
            ahead[nt - distance :] *= -1
            behind[:distance] *= -1
        u, phase = links[..., mu, :, :], signs[..., mu, None]
        total += phase * times(u, ahead)
        # The phase of direction mu does not depend on the coordinate along mu.
        total -= phase * times(dagger(there(u, mu, -distance)), behind)
    return total


def dslash(psi: np.ndarray, links: np.ndarray, *, naive: bool) -> np.ndarray:
    """D psi, with 9/8 U and -1/24 U U U; with U alone for the naive operator."""
    if naive:
        return hop(psi, links, 1)
    long = np.empty_like(links)
    for mu in range(4):
        u = links[..., mu, :, :]
        long[..., mu, :, :] = u @ there(u, mu, 1) @ there(u, mu, 2)
    return hop(psi, 9 / 8 * links, 1) - hop(psi, long, 3) / 24


def normal(psi: np.ndarray, links: np.ndarray, mass: float, *, naive: bool) -> np.ndarray:
    """(4 m^2 - D^2) psi."""
    once = dslash(psi, links, naive=naive)
    return 4 * mass**2 * psi - dslash(once, links, naive=naive)


def plaquettes(links: np.ndarray) -> tuple[float, float]:
    """Means of Re Tr over space-space plaquettes and over space-time plaquettes."""
    sums: dict[bool, list[float]] = {False: [], True: []}
    for nu in range(4):
        for mu in range(nu):
            u, v = links[..., mu, :, :], links[..., nu, :, :]
            loop = u @ there(v, mu, 1) @ dagger(there(u, nu, 1)) @ dagger(v)
            sums[nu == 3].append(np.trace(loop, axis1=-2, axis2=-1).real.mean())
    return float(np.mean(sums[False])), float(np.mean(sums[True]))
