"""Random checkerboard grids, and the result of an exchange, computed cell by cell without halox."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

import halox
from tests.mpi.reference import cast, factorisations, poison

Halo = tuple[tuple[int, int], ...]


@dataclass
class Field:
    """One random field of one parity."""

    dtype: np.dtype[Any]
    halo: Halo
    before: tuple[int, ...]
    after: tuple[int, ...]
    parity: str
    offsets: tuple[int, ...]
    mine: bool  # allocated by the user, not by the grid

    def options(self) -> dict[str, Any]:
        return {
            "components": self.before,
            "components_after": self.after,
            "halo": self.halo,
            "parity": self.parity,
            "offsets": self.offsets or None,
        }


@dataclass
class Case:
    """One random checkerboard with its fields; ``bounds`` delimit the ranks' blocks along each axis."""

    shape: tuple[int, ...]
    bounds: tuple[tuple[int, ...], ...]
    periodic: tuple[bool, ...]
    halo: Halo
    corners: bool
    fields: list[Field] = field(default_factory=list)

    def grid(self, comm: Any, device: Any = "cpu", **options: Any) -> halox.Grid:
        return halox.Grid(
            self.shape,
            halo=self.halo,
            periodic=self.periodic,
            blocks=[tuple(b - a for a, b in pairwise(bounds)) for bounds in self.bounds],
            corners=self.corners,
            checkerboard=True,
            comm=comm,
            device=device,
            **options,
        )

    def expected(self, coords: Sequence[int]) -> list[Expected]:
        """Return a rank's arrays before and after an exchange, one per field."""
        return [expected(self, f, coords, number) for number, f in enumerate(self.fields)]


def random_case(
    rng: np.random.Generator, ranks: int, dtypes: Sequence[Any], *, wide: bool = False
) -> Case:
    """Return a random case; with ``wide`` its blocks are thin, and halos may be wider than blocks."""
    ndim = int(rng.integers(1, 5))
    choices = factorisations(ranks, ndim)
    procs = choices[int(rng.integers(len(choices)))]
    periodic = tuple(bool(b) for b in rng.integers(2, size=ndim))
    most = 4 if wide else {1: 20, 2: 9, 3: 6, 4: 5}[ndim]
    bounds = []
    for axis, parts in enumerate(procs):
        sizes = rng.integers(1, most, size=parts)
        if axis == ndim - 1:
            sizes = 2 * ((sizes + 1) // 2)
        elif sum(sizes) % 2:
            sizes[0] += 1
        bounds.append((0, *(int(n) for n in np.cumsum(sizes))))
    shape = tuple(bound[-1] for bound in bounds)

    def widths() -> Halo:
        found = []
        for bound, wraps in zip(bounds, periodic, strict=True):
            limit = min(np.diff(bound)) if len(bound) > 2 or wraps else 5
            if wide:
                limit = bound[-1]
            low, high = (int(rng.integers(0, min(limit, 5) + 1)) for _ in range(2))
            found.append((low, high))
        return tuple(found)

    case = Case(shape, tuple(bounds), periodic, widths(), bool(rng.integers(3)))
    for _ in range(int(rng.integers(1, 4))):
        halo = case.halo if rng.integers(2) else widths()
        least = min((width for widths in halo for width in widths if width), default=3)
        stencils = [
            one for one in ((1,), (2,), (1, 2), (1, 3), (1, 2, 3), (2, 5)) if max(one) <= least
        ]
        offsets = stencils[int(rng.integers(len(stencils)))] if rng.integers(2) else ()
        if (
            wide
        ):  # An exchange also moves nearer layers, which the stencil of a thin block may skip.
            offsets = ()
        extents = [tuple(int(n) for n in rng.integers(1, 4, size=rng.integers(0, 2))) for _ in "ab"]
        parity = ("even", "odd")[int(rng.integers(2))]
        dtype = np.dtype(dtypes[int(rng.integers(len(dtypes)))])
        case.fields.append(Field(dtype, halo, *extents, parity, offsets, bool(rng.integers(2))))
    return case


def coordinates(case: Case, f: Field, coords: Sequence[int]) -> list[np.ndarray]:
    """Return the global coordinates of every cell of a rank's array, not wrapped, as one array per axis."""
    axes = []
    for bound, c, (low, high) in zip(case.bounds, coords, f.halo, strict=True):
        axes.append(list(range(bound[c] - low, bound[c + 1] + high)))
    axes[-1] = sorted({cell // 2 for cell in axes[-1]})  # the pairs that contain the cells
    *others, pairs = np.meshgrid(*axes, indexing="ij")
    last = 2 * pairs
    wrong = (sum(others) + last) % 2 != (f.parity == "odd")
    return [*others, last + wrong]


@dataclass
class Expected:
    """One rank's array before and after an exchange, masks of its cells, and the bytes that it receives."""

    before: np.ndarray
    after: np.ndarray
    owned: np.ndarray
    filled: np.ndarray  # halo cells that the exchange must fill, and no others
    moved_bytes: int


def expected(case: Case, f: Field, coords: Sequence[int], number: int) -> Expected:
    cells = coordinates(case, f, coords)
    limits = [(bound[c], bound[c + 1]) for bound, c in zip(case.bounds, coords, strict=True)]

    def owns(at: Sequence[np.ndarray]) -> np.ndarray:
        return np.all([(x >= a) & (x < b) for x, (a, b) in zip(at, limits, strict=True)], axis=0)

    owned = owns(cells)
    outside = [(x < a) | (x >= b) for x, (a, b) in zip(cells, limits, strict=True)]
    kept = np.ones(owned.shape, bool)
    for x, (a, b), (low, high) in zip(cells, limits, f.halo, strict=True):
        kept &= (x >= a - low) & (x < b + high)
    for x, n, wraps in zip(cells, case.shape, case.periodic, strict=True):
        kept &= wraps | ((x >= 0) & (x < n))
    if f.offsets:  # only cells that the stencil of an owned cell reads
        near = np.zeros(owned.shape, bool)
        for axis in range(len(cells)):
            for offset in f.offsets:
                for step in (-offset, offset):
                    near |= owns([x + step * (k == axis) for k, x in enumerate(cells)])
        filled = kept & ~owned & near
    else:
        filled = kept & ~owned & (case.corners | (np.sum(outside, axis=0) <= 1))
    flat = np.zeros(owned.shape, np.int64)
    for x, n in zip(cells, case.shape, strict=True):
        flat = flat * n + x % n
    components = math.prod(f.before) * math.prod(f.after)
    numbers = np.arange(components).reshape((*f.before, *(1,) * flat.ndim, *f.after))

    def spread(a: np.ndarray) -> np.ndarray:
        a = a.reshape((1,) * len(f.before) + a.shape + (1,) * len(f.after))
        return np.broadcast_to(a, (*f.before, *flat.shape, *f.after))

    values = cast(spread(flat) * 97 + numbers * 31 + number * 17 + 1, f.dtype)
    before = poison(values.shape, f.dtype)
    before[spread(owned)] = values[spread(owned)]
    after = before.copy()
    after[spread(filled)] = values[spread(filled)]
    return Expected(
        before,
        after,
        spread(owned),
        spread(filled),
        int(filled.sum()) * components * _payload(f.dtype),
    )


def _payload(dtype: np.dtype[Any]) -> int:
    """Return the bytes of an element without the padding of a structure."""
    return sum(dtype[name].itemsize for name in dtype.names) if dtype.names else dtype.itemsize
