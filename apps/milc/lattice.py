"""The lattice on the ranks: its grids, and the layout of fields on even and on odd sites.

All other modules of the app see fields of one parity as arrays ``(sites, numbers of a site)``, and the two parities
only through `Lattice.split` and `Lattice.join`.

The sites of one parity of a row along x are every second one, so that a field of one parity is a regular array with
half as many cells along x. Cell ``h`` of a row holds the site ``x = 2 h + shift``, where ``shift`` is 0 or 1 by the
parities of the field and of ``t + z + y``::

    x            0   1   2   3   4   5   6   7
    even row     E0  O0  E1  O1  E2  O2  E3  O3        E: even sites, shift 0; O: odd sites, shift 1
    odd row      O0  E0  O1  E1  O2  E2  O3  E3        E: shift 1; O: shift 0

A neighbour at an odd distance is of the other parity. Along t, z and y it has the same ``h``; along x its ``h``
depends on the row: that of x + 1 is h + shift, that of x - 3 is h + shift - 2. So three sites along x are two cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import halox

EVEN, ODD = 0, 1
PARITIES = (EVEN, ODD)
NAMES = ("even", "odd")
AXES = 4
COLORS = 3


class Lattice:
    """A periodic four-dimensional lattice, divided among ranks.

    Parameters
    ----------
    shape : sequence of int
        Sites along t, z, y and x; even numbers.
    depth : int
        Distance of the farthest neighbours, 1 or 3.
    comm : mpi4py.MPI.Intracomm

    Attributes
    ----------
    grid : halox.Grid
        The sites of both parities.
    half : halox.Grid
        The cells of one parity: half as many along x, and a halo ``depth`` sites deep.
    shape, owned : tuple
        Sites along t, z, y and x, and the slices of them that this rank owns.
    sites : int
        Sites of one parity on this rank.

    Raises
    ------
    halox.errors.DecompositionError
        If a number of sites is odd, or the ranks are too many for it.

    Notes
    -----
    Collective, as are all methods but `split`, `join`, `neighbours` and the factories of fields.
    """

    def __init__(self, shape: Sequence[int], depth: int, comm: Any) -> None:
        nt, nz, ny, nx = shape
        given = " ".join(str(n) for n in reversed(shape))
        if any(n % 2 for n in shape):
            raise halox.errors.DecompositionError(
                f"--lattice {given}: every number of sites must be even, since neighbours across the boundary are of "
                f"different parity; give {' '.join(str(n + n % 2) for n in reversed(shape))}"
            )
        options: dict[str, Any] = {
            "periodic": True,
            "corners": False,
            "device": "cpu",
            "placement": False,
        }
        try:
            self.half = halox.Grid(
                (nt, nz, ny, nx // 2),
                halo=(depth, depth, depth, (depth + 1) // 2),
                comm=comm,
                **options,
            )
        except halox.errors.DecompositionError as error:
            raise halox.errors.DecompositionError(
                f"--lattice {given} on {comm.size} rank(s): every rank needs {depth} site(s) along every axis, and "
                f"{depth + 1} along x; give more sites or fewer ranks (as a grid of t, z, y and half of x: {error})"
            ) from error
        blocks = _blocks(self.half)
        blocks[3] = [2 * n for n in blocks[3]]
        self.grid = halox.Grid(
            shape,
            halo=1,
            proc_shape=self.half.proc_shape,
            blocks=blocks,
            comm=comm,
            **options,
        )
        self.depth = depth
        self.shape, self.owned = self.grid.grid_shape, self.grid.owned
        self.volume: int = nt * nz * ny * nx
        self.sites: int = int(np.prod(self.half.rank_shape))
        # The row's parity; starts along x are even.
        t, z, y, _ = self.half.indices()
        self._row: np.ndarray = (t + z + y) & 1

    # Fields

    def vectors(self, dtype: np.dtype[Any], *, halo: bool = False) -> Any:
        """Return a field of zeros of a colour vector per site of one parity, without halo or with it."""
        width: dict[str, Any] = {} if halo else {"halo": 0}
        return self.half.zeros(dtype, components_after=COLORS, **width)

    def split(self, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the even and the odd sites of a block ``(t, z, y, x, ...)``, each ``(t, z, y, x / 2, ...)``."""
        first, second = (self._pairs(block)[..., shift, :] for shift in (0, 1))
        row = self._row[..., None]
        shape = (*self.half.rank_shape, *block.shape[AXES:])
        return (
            np.where(row == EVEN, first, second).reshape(shape),
            np.where(row == EVEN, second, first).reshape(shape),
        )

    def join(self, even: np.ndarray, odd: np.ndarray) -> np.ndarray:
        """Return the block ``(t, z, y, x, ...)`` of even and odd sites: the inverse of `split`."""
        after = even.shape[AXES:]
        block = np.empty((*self.grid.rank_shape, *after), even.dtype)
        pairs = self._pairs(block)
        flat = [values.reshape(*values.shape[:AXES], -1) for values in (even, odd)]
        row = self._row[..., None]
        pairs[..., 0, :] = np.where(row == EVEN, flat[0], flat[1])
        pairs[..., 1, :] = np.where(row == EVEN, flat[1], flat[0])
        return block

    def _pairs(self, block: np.ndarray) -> np.ndarray:
        """Return a view ``(t, z, y, x / 2, 2, numbers)`` of a contiguous block."""
        return block.reshape(*self.half.rank_shape, 2, -1)

    # Neighbours

    def neighbours(self, parity: int, distances: Sequence[int]) -> np.ndarray:
        """Return the places of the neighbours of all sites of a parity in a field of the other one with halo.

        Parameters
        ----------
        parity : {EVEN, ODD}
        distances : sequence of int
            1, or 1 and 3.

        Returns
        -------
        ndarray
            ``(sites, directions)`` of intp: sites of the flattened field. The order of the directions is that of
            `directions`.
        """
        padded = self.half.padded_shape
        starts = [low for low, _ in self.half.halo]
        cells = np.ix_(
            *(np.arange(n) + start for n, start in zip(self.half.rank_shape, starts, strict=True))
        )
        shift = self._row ^ parity
        found = np.empty((*self.half.rank_shape, 2 * AXES * len(distances)), np.intp)
        for number, (mu, step) in enumerate(directions(distances)):
            place = list(cells)
            # Along x: from 2 h + shift to 2 h' + (1 - shift).
            place[axis_of(mu)] = place[axis_of(mu)] + (step if mu else (step + 2 * shift - 1) // 2)
            found[..., number] = np.ravel_multi_index(np.broadcast_arrays(*place), padded)
        return found.reshape(self.sites, -1)

    def shifted(self, block: np.ndarray, mu: int, distance: int) -> np.ndarray:
        """Return the values of a block ``(t, z, y, x, ...)`` at the sites ``distance`` further along direction mu.

        Collective. ``distance`` may be negative, and is at most `depth`.
        """
        axis, width = axis_of(mu), abs(distance)
        low, high = (0, width) if distance > 0 else (width, 0)
        halo = [(0, 0)] * AXES
        halo[axis] = (low, high)
        field = self.grid.zeros(block.dtype, components_after=block.shape[AXES:], halo=halo)
        self.grid.interior(field)[...] = block
        self.grid.exchange(field)
        part = [slice(None)] * AXES
        part[axis] = slice(high, None) if distance > 0 else slice(0, block.shape[axis])
        return np.ascontiguousarray(field[tuple(part)])

    # Life

    def close(self) -> None:
        """Close the grids."""
        self.grid.close()
        self.half.close()

    def __enter__(self) -> Lattice:
        """Return the lattice."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close it, unless an exception propagates: other ranks may not call `close` then."""
        if kind is None:
            self.close()


def axis_of(mu: int) -> int:
    """Return the axis of an array that direction mu runs along: MILC's order is x, y, z, t.

    Examples
    --------
    >>> [axis_of(mu) for mu in range(4)]
    [3, 2, 1, 0]
    """
    return AXES - 1 - mu


def directions(distances: Sequence[int]) -> list[tuple[int, int]]:
    """Return the neighbours of a site as (direction mu, signed distance), in the order of all tables.

    Examples
    --------
    >>> directions([1])
    [(0, 1), (0, -1), (1, 1), (1, -1), (2, 1), (2, -1), (3, 1), (3, -1)]
    """
    return [(mu, sign * hop) for hop in distances for mu in range(AXES) for sign in (1, -1)]


def _blocks(grid: halox.Grid) -> list[list[int]]:
    """Return the cells of every part along every axis; collective."""
    everyone = grid.comm.allgather([(part.start, part.stop) for part in grid.owned])
    return [
        [stop - start for start, stop in sorted({parts[axis] for parts in everyone})]
        for axis in range(AXES)
    ]
