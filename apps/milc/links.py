"""Links of the staggered operators: phases, the antiperiodic boundary, fat and long links, and their tables.

MILC multiplies the links by the staggered phases and the sign of the boundary, so that the operator needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .gauge import dagger
from .lattice import AXES, PARITIES, Lattice, directions

FAT, LONG = 9 / 8, -1 / 24
"""Coefficients of the links and of their threefold products, without smearing. Errors of second order in the lattice
spacing cancel (Naik 1989)."""

TIME = AXES - 1


class Table(NamedTuple):
    """Matrices and neighbours for results on the sites of one parity.

    Attributes
    ----------
    matrices : array
        Matrices that act on the neighbours, in the order of `directions`. Backward matrices are ``-U^dagger`` of the
        neighbour's link. With components first: ``(directions, 3, 3, sites)``. Otherwise the conjugate matrices, side
        by side: ``(sites, 3, directions * 3)``.
    neighbours : ndarray or None
        ``(sites, directions)`` of intp: see `Lattice.neighbours`. None with components first.
    """

    matrices: Any
    neighbours: np.ndarray | None = None

    def astype(self, dtype: np.dtype[Any]) -> Table:
        """Return the table in another precision."""
        return self._replace(matrices=self.matrices.astype(dtype))


def phased(lattice: Lattice, links: np.ndarray, distance: int = 1) -> np.ndarray:
    """Return links times MILC's phases and the sign of the antiperiodic boundary in time.

    The phases are 1 along t, ``(-1)^t`` along x, ``(-1)^(t+x)`` along y and ``(-1)^(t+x+y)`` along z. The sign is -1
    for links along t that cross the boundary: the links of the last ``distance`` time slices. Not collective.
    """
    found = links.copy()
    for mu in range(AXES):
        found[..., mu, :, :] *= signs(lattice, mu, distance)[..., None, None]
    return found


def signs(lattice: Lattice, mu: int, step: int) -> np.ndarray:
    """Return phase times boundary sign of the link between each site and the site ``step`` further along mu.

    The array can be broadcast to ``(t, z, y, x)``.
    """
    t, _, y, x = (
        np.arange(part.start, part.stop).reshape([-1 if axis == own else 1 for axis in range(AXES)])
        for own, part in enumerate(lattice.owned)
    )
    if mu == TIME:
        there = t + step
        return np.where((there < 0) | (there >= lattice.shape[0]), -1.0, 1.0)
    exponent: np.ndarray = (t, t + x, t + x + y)[mu]
    return 1.0 - 2.0 * (exponent % 2)


def of_thin(lattice: Lattice, links: np.ndarray, *, naive: bool) -> dict[int, np.ndarray]:
    """Compute the links of an operator from a gauge field, with phases, keyed by distance; collective."""
    if naive:
        return {1: phased(lattice, links)}
    return dict(zip((1, 3), naik(lattice, links), strict=True))


def naik(lattice: Lattice, links: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute fat and long links from thin links, 9/8 U and -1/24 U U U, with phases, unsmeared; collective."""
    long = np.empty_like(links)
    for mu in range(AXES):
        one = np.ascontiguousarray(links[..., mu, :, :])
        two = np.matmul(one, lattice.shifted(one, mu, 1))
        long[..., mu, :, :] = np.matmul(two, lattice.shifted(one, mu, 2))
    return phased(lattice, FAT * links), phased(lattice, LONG * long, 3)


def tables(
    lattice: Lattice, links: dict[int, np.ndarray], dtype: np.dtype[Any]
) -> tuple[Table, Table]:
    """Return the tables of the even and of the odd sites.

    Parameters
    ----------
    lattice : Lattice
    links : dict
        Links with phases, keyed by distance: 1, or 1 and 3.
    dtype : dtype
        complex64 or complex128.

    Notes
    -----
    Collective. The tables store backward links in addition to forward links. This doubles the memory, but later calls
    neither read nor exchange links of neighbours.
    """

    def matrices(mu: int, step: int) -> np.ndarray:
        found = np.ascontiguousarray(links[abs(step)][..., mu, :, :])
        return found if step > 0 else -dagger(lattice.shifted(found, mu, step))

    return tables_of(lattice, list(links), matrices, dtype)


def tables_of(
    lattice: Lattice,
    distances: Sequence[int],
    matrices: Callable[[int, int], Any],
    dtype: np.dtype[Any],
) -> tuple[Table, Table]:
    """Build the tables of the even and of the odd sites from the matrices for each neighbour.

    Parameters
    ----------
    lattice : Lattice
    distances : sequence of int
        Distances of the neighbours: 1, or 1 and 3.
    matrices : callable
        ``matrices(mu, step)`` returns the block ``(t, z, y, x, 3, 3)`` that acts on the neighbours ``step`` further
        along mu, as a NumPy array or in the memory of the lattice's vectors.
    dtype : dtype
        complex64 or complex128.
    """
    hops = directions(distances)
    if lattice.components_first:
        shape: tuple[int, ...] = (len(hops), 3, 3, lattice.sites)
    else:
        shape = (lattice.sites, 3, len(hops), 3)
    made = [lattice.grid.xp.empty(shape, dtype) for _ in PARITIES]
    for number, hop in enumerate(hops):
        for target, part in zip(made, lattice.split(matrices(*hop)), strict=True):
            part = part.reshape(-1, 3, 3)
            if lattice.components_first:
                target[number] = lattice.on_device(np.moveaxis(part, 0, -1), dtype)
            else:
                np.conjugate(part, out=target[:, :, number], casting="same_kind")
    if lattice.components_first:
        even, odd = map(Table, made)
    else:
        even, odd = (
            Table(made[parity].reshape(*shape[:2], -1), lattice.neighbours(parity, distances))
            for parity in PARITIES
        )
    return even, odd
