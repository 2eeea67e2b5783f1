"""The lattice on the ranks: its grid, and fields on even and on odd sites.

All other modules of the app see fields of one parity as arrays ``(sites, numbers of a site)``, and convert between
blocks of all sites and parities by `Lattice.split` and `Lattice.join`. The fields are halox fields of one parity
(``docs/checkerboards.md``): the even field holds at index ``h`` the even site of the pair ``2 h``, ``2 h + 1`` along x,
and the odd field the odd site::

    x            0   1   2   3   4   5   6   7
    even row     E0  O0  E1  O1  E2  O2  E3  O3        E: even sites, O: odd sites, with their h
    odd row      O0  E0  O1  E1  O2  E2  O3  E3

A neighbour at an odd distance has the opposite parity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

import halox

EVEN, ODD = 0, 1
PARITIES = (EVEN, ODD)
NAMES: tuple[Literal["even", "odd"], ...] = ("even", "odd")
Device = Literal["auto", "cpu", "gpu"]
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
    device : {"auto", "cpu", "gpu"}
        Memory of vectors and tables. Blocks of links, files and random fields are always NumPy arrays.

    Attributes
    ----------
    grid, host : halox.Grid
        Grids of all sites with a halo ``depth`` sites deep: on the device of the vectors, and on the host. Both are the
        same grid if the vectors are NumPy arrays.
    components_first : bool
        Whether the components of a vector are outermost in memory, for coalesced reads on GPUs, rather than innermost.
    offsets : tuple of int
        Distances of the neighbours, 1 or 1 and 3.
    shape, owned : tuple
        Sites along t, z, y and x, and the slices that this rank owns.
    sites : int
        Sites of one parity on this rank.

    Raises
    ------
    halox.errors.DecompositionError
        If a number of sites is odd, or too small for the number of ranks.

    Notes
    -----
    Collective, as are all methods except `check`, `split`, `join`, `place`, `on_device`, `values` and `neighbours`.
    """

    def __init__(self, shape: Sequence[int], depth: int, comm: Any, device: Device = "cpu") -> None:
        given = " ".join(str(n) for n in reversed(shape))
        if any(n % 2 for n in shape):
            raise halox.errors.DecompositionError(
                f"--lattice {given}: every number of sites must be even, since neighbours across the boundary are of "
                f"different parity; give {' '.join(str(n + n % 2) for n in reversed(shape))}"
            )
        if min(shape) < depth:
            raise halox.errors.DecompositionError(
                f"--lattice {given}: every number of sites must be {depth} or more, since links reach so far"
            )
        options: dict[str, Any] = {
            "halo": depth,
            "periodic": True,
            "corners": False,
            "checkerboard": True,
            "comm": comm,
            "placement": False,
        }
        try:
            self.grid = halox.Grid(shape, device=device, **options)
        except halox.errors.DecompositionError as error:
            raise halox.errors.DecompositionError(
                f"--lattice {given} on {comm.size} rank(s): every rank needs {depth} site(s) along every axis, and "
                f"{depth + 1} along x; give more sites or fewer ranks (as a grid of t, z, y and x: {error})"
            ) from error
        self.components_first = self.grid.device == "gpu"
        self.host = self.grid
        if self.components_first:
            # HALOX_PATH may name a GPU path, which the host grid cannot use.
            options |= {"device": "cpu", "path": "host", "proc_shape": self.grid.proc_shape}
            self.host = halox.Grid(shape, **options)
        self._kept_places: dict[tuple[int, str], tuple[Any, ...]] = {}
        self.depth = depth
        self.offsets = tuple(range(1, depth + 1, 2))
        self.shape, self.owned = self.grid.grid_shape, self.grid.owned
        self.volume: int = math.prod(shape)
        self.sites: int = math.prod(self.grid.rank_shape) // 2

    # Fields

    def vectors(self, dtype: np.dtype[Any], parity: int, *, halo: bool = False) -> Any:
        """Return a field of zeros with a colour vector per site of one parity, by default without halo."""
        width: dict[str, Any] = {"offsets": self.offsets} if halo else {"halo": 0}
        return self.grid.zeros(dtype, parity=NAMES[parity], **self._components(), **width)

    def interior(self, field: Any, parity: int) -> Any:
        """Return a view of the owned sites of a field with halo, declared as a field without halo."""
        view = self.grid.interior(field)
        return self.grid.declare(view, parity=NAMES[parity], halo=0, **self._components())

    def check(self, name: str, field: Any, parity: int) -> None:
        """Raise `halox.errors.FieldError` unless a field has this parity."""
        found = self.grid.layout(field).spec.parity
        if found != NAMES[parity]:
            raise halox.errors.FieldError(
                f"{name} is on {found or 'all'} sites, and must be on {NAMES[parity]} ones; give a field of that "
                "parity, or ask for the other one"
            )

    def place(self, values: Any, field: Any) -> None:
        """Copy vectors ``(t, z, y, x / 2, 3)`` to a field without halo."""
        if self.components_first:
            values = np.moveaxis(values, -1, 0)
        field[...] = self.on_device(values, field.dtype)

    def on_device(self, values: Any, dtype: np.dtype[Any]) -> Any:
        """Return an array in the memory of the lattice's vectors; on GPUs a NumPy array is converted and copied."""
        if self.grid.device == "gpu" and isinstance(values, np.ndarray):
            return self.grid.xp.asarray(np.ascontiguousarray(values, dtype))
        return values

    def values(self, field: Any) -> np.ndarray:
        """Return the vectors of a field without halo as a NumPy array ``(t, z, y, x / 2, 3)``."""
        found: np.ndarray = field.get() if self.grid.device == "gpu" else field
        return np.moveaxis(found, 0, -1) if self.components_first else found

    def split(self, block: Any) -> tuple[Any, Any]:
        """Return the even and the odd sites of a block ``(t, z, y, x, ...)``, each ``(t, z, y, x / 2, ...)``."""
        xp = np if isinstance(block, np.ndarray) else self.grid.xp
        even, odd = (block[self._places(parity, xp)] for parity in PARITIES)
        return even, odd

    def join(self, even: np.ndarray, odd: np.ndarray) -> np.ndarray:
        """Return the block ``(t, z, y, x, ...)`` of even and odd sites: the inverse of `split`."""
        block = np.empty((*self.grid.rank_shape, *even.shape[AXES:]), even.dtype)
        block[self._places(EVEN, np)] = even
        block[self._places(ODD, np)] = odd
        return block

    def _components(self) -> dict[str, Any]:
        return {"components": COLORS if self.components_first else (..., COLORS)}

    def _places(self, parity: int, xp: Any) -> tuple[Any, ...]:
        """Return the sites of a parity as an index of a block ``(t, z, y, x, ...)`` of NumPy or CuPy."""
        key = parity, xp.__name__
        if key not in self._kept_places:
            sites = self.host.indices(parity=NAMES[parity])
            self._kept_places[key] = tuple(
                xp.asarray(along - part.start)
                for along, part in zip(sites, self.owned, strict=True)
            )
        return self._kept_places[key]

    # Neighbours

    def neighbours(self, parity: int, distances: Sequence[int]) -> np.ndarray:
        """Return the indices of all neighbours of the sites of a parity, in a field of the opposite parity with halo.

        Parameters
        ----------
        parity : {EVEN, ODD}
        distances : sequence of int
            1, or 1 and 3.

        Returns
        -------
        ndarray
            ``(sites, directions)`` of intp: indices in the flattened field, with the directions in the order of the
            function `directions`.
        """
        sites = self.host.indices(parity=NAMES[parity])
        *outer, x = self.host.indices(halo=True, parity=NAMES[1 - parity])
        # First site and padded shape of the field of opposite parity; x counts pairs of sites.
        origin, padded = [int(along.flat[0]) for along in (*outer, x // 2)], x.shape
        found = np.empty((*sites[-1].shape, 2 * AXES * len(distances)), np.intp)
        for number, (mu, step) in enumerate(directions(distances)):
            place = list(sites)
            place[axis_of(mu)] = place[axis_of(mu)] + step
            place[-1] = place[-1] // 2
            place = [along - first for along, first in zip(place, origin, strict=True)]
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
        field = self.host.zeros(block.dtype, components=(..., *block.shape[AXES:]), halo=halo)
        self.host.interior(field)[...] = block
        self.host.exchange(field)
        part = [slice(None)] * AXES
        part[axis] = slice(high, None) if distance > 0 else slice(0, block.shape[axis])
        return np.ascontiguousarray(field[tuple(part)])

    # Life

    def close(self) -> None:
        """Close the grids."""
        if self.host is not self.grid:
            self.host.close()
        self.grid.close()

    def __enter__(self) -> Lattice:
        """Return the lattice."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the lattice, unless an exception propagates: other ranks may not call `close` then."""
        if kind is None:
            self.close()


def axis_of(mu: int) -> int:
    """Return the array axis of direction mu; MILC numbers the directions in the order x, y, z, t.

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
