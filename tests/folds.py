"""Grids with connections, and a serial reference: positions of points in half cells, mapped by the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

import halox
from halox.decomposition import FieldLayout

UNTOUCHED = -77
CENTERS = {"T": (1, 1), "U": (0, 1), "V": (1, 0), "F": (0, 0)}
PLACES = ("low", "center", "high")


@dataclass
class Case:
    shape: tuple[int, ...]
    halo: tuple[tuple[int, int], ...]
    periodic: tuple[bool, ...]
    connect: dict[Any, halox.Connection]
    staggered: tuple[bool, ...]
    position: tuple[str, ...] | None
    sign: Any
    before: tuple[int, ...]
    after: tuple[int, ...]
    dtype: str
    corners: bool = True

    def grid(
        self,
        comm: MPI.Intracomm,
        proc_shape: Sequence[int],
        device: Literal["cpu", "gpu"] = "cpu",
    ) -> halox.Grid:
        return halox.Grid(
            self.shape,
            halo=self.halo,
            periodic=self.periodic,
            connect=self.connect,
            proc_shape=proc_shape,
            corners=self.corners,
            comm=comm,
            device=device,
        )

    @property
    def options(self) -> dict[str, Any]:
        return {
            "components": self.before,
            "components_after": self.after,
            "staggered": [axis for axis, is_so in enumerate(self.staggered) if is_so],
            "sign": self.sign,
            "position": self.position,
        }

    def field(self, grid: halox.Grid) -> Any:
        return grid.full(UNTOUCHED, self.dtype, **self.options)

    def expected(self, layout: FieldLayout, whole: Any, before: Any = UNTOUCHED) -> Any:
        """Return a rank's array after an exchange, from the values of all owned points, and the array before."""
        result = np.full(layout.padded_shape, before, self.dtype)
        first = len(self.before)
        ranges = [range(cut.start, cut.stop) for cut in layout.stored]
        signs = np.array(
            [self._sign(component) for component in np.ndindex(*self.before, *self.after)],
            self.dtype,
        ).reshape(self.before + self.after)
        for index in product(*ranges):
            outside = sum(
                not cut.start <= i < cut.stop for i, cut in zip(index, layout.owned, strict=True)
            )
            source = self.source(index)
            if source is None or (outside > 1 and not self.corners):
                continue
            at = tuple(i - o for i, o in zip(index, layout.origin, strict=True))
            value = whole[(slice(None),) * first + source[0]]
            result[(slice(None),) * first + at] = value * signs if source[1] else value
        return result

    def _sign(self, component: tuple[int, ...]) -> int:
        if not isinstance(self.sign, dict):
            return int(self.sign)
        keyed = component[0] if len(component) == 1 else component
        return int(self.sign.get(keyed, self.sign.get((), 1)))

    def source(self, index: tuple[int, ...]) -> tuple[tuple[int, ...], bool] | None:
        """Return the point of which a point is an image, and whether it is beyond a connection."""
        places = [
            0 if is_so else 1 if self.position is None else PLACES.index(self.position[axis])
            for axis, is_so in enumerate(self.staggered)
        ]
        at = [2 * i + place for i, place in zip(index, places, strict=True)]  # in half cells
        ends = [2 * n for n in self.shape]
        for axis, wraps in enumerate(self.periodic):
            at[axis] = at[axis] % ends[axis] if wraps else at[axis]
        crossed = False
        for key, connection in self.connect.items():
            axis, side = key if isinstance(key, tuple) else (key, None)
            along_x, along_y = CENTERS[connection.pivot]
            end = ends[axis]
            if side is None:
                if 0 <= at[axis] - places[axis] < end:
                    continue
                turn = 1 if at[axis] < places[axis] else -1
                at[axis] += turn * end
                at = self._across(at, connection, along_x, -turn)
                crossed = True
                continue
            line = end - along_y if side == "high" else along_y
            image = self._across([*at], connection, along_x, 1)
            image[axis] = 2 * line - at[axis]
            is_beyond = at[axis] > line if side == "high" else at[axis] < line
            other = connection.flip if connection.flip is not None else connection.shift[0]  # type: ignore[index]
            # On the line the copy is the point with the higher index.
            number, copy = (
                (p - places[other]) // 2 % (ends[other] // 2 + self.staggered[other])
                for p in (image[other], at[other])
            )
            if is_beyond or (at[axis] == line and number < copy):
                at, crossed = image, True
        source = []
        for axis, (p, place, n) in enumerate(zip(at, places, self.shape, strict=True)):
            i = (p - place) // 2
            if self.periodic[axis]:
                i %= n
            elif not 0 <= i < n + self.staggered[axis]:
                return None
            source.append(i)
        return tuple(source), crossed

    def _across(
        self, at: list[int], connection: halox.Connection, along_x: int, turn: int
    ) -> list[int]:
        if connection.flip is not None:
            x = connection.flip
            at[x] = 2 * (along_x if self.periodic[x] else self.shape[x]) - at[x]
        else:
            x, cells = connection.shift  # type: ignore[misc]
            at[x] += 2 * cells * turn
        if self.periodic[x]:
            at[x] %= 2 * self.shape[x]
        return at


def random_case(rng: np.random.Generator, *, corners: bool = True) -> Case:
    """Return a random grid of two or three axes; blocks may be thinner than the halos."""
    ndim = int(rng.integers(2, 4))
    axis, other = (int(n) for n in rng.permutation(ndim)[:2])
    shape = [int(n) for n in rng.integers(8, 11, ndim)]
    periodic = [bool(n) for n in rng.integers(0, 2, ndim)]
    periodic[axis] = False
    kind = rng.choice(["fold", "folds", "pole", "poles", "strip", "helix"])
    staggered = [bool(rng.integers(0, 3) == 0) for _ in range(ndim)]
    points = None
    if kind in ("pole", "poles", "helix"):
        periodic[other] = True
        shape[other] += shape[other] % 2
        shift = shape[other] // 2 if kind != "helix" else int(rng.integers(-3, 9))
        connections = [halox.Connection(shift=(other, shift), pivot=p) for p in ("F", "T")]  # type: ignore[arg-type]
    else:
        pivots = list("TUVF" if periodic[other] else "UF") if kind != "strip" else ["F"]
        chosen = rng.choice(pivots, 2)
        connections = [halox.Connection(flip=other, pivot=str(p)) for p in chosen]  # type: ignore[arg-type]
    if not any(staggered) and rng.integers(0, 2):
        points = [str(rng.choice(PLACES)) for _ in range(ndim)]
        if not periodic[other]:
            points[other] = "center"
    sides = [(axis, "low"), (axis, "high")]
    if kind in ("strip", "helix"):
        connect = {axis: halox.Connection(connections[0].flip, connections[0].shift)}
    elif kind in ("folds", "poles"):
        connect = dict(zip(sides, connections, strict=True))
    else:
        connect = {sides[rng.integers(0, 2)]: connections[rng.integers(0, 2)]}
    before = ((), (), (3,), (2, 2))[rng.integers(0, 4)]
    after = ((), (2,))[rng.integers(0, 2)] if len(before) < 2 else ()
    extents = before + after
    sign: Any = int(rng.choice([1, -1]))
    if extents and rng.integers(0, 2):
        key: Any = tuple(int(rng.integers(0, n)) for n in extents)
        sign = {(key[0] if len(key) == 1 else key): -1, (): int(rng.choice([1, -1]))}
    return Case(
        tuple(shape),
        tuple((int(rng.integers(0, 4)), int(rng.integers(0, 4))) for _ in shape),
        tuple(periodic),
        connect,
        tuple(staggered),
        None if points is None else tuple(points),
        sign,
        before,
        after,
        str(rng.choice(["f8", "i4", "c16", "f4"])),
        corners,
    )


def process_grids(ranks: int, ndim: int) -> list[tuple[int, ...]]:
    """Return all process grids of some ranks."""
    return [grid for grid in product(range(1, ranks + 1), repeat=ndim) if np.prod(grid) == ranks]
