"""Random fields with boundaries, and their halos by `numpy.pad` of the whole field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

import halox
from halox.decomposition import FieldLayout

MIRRORS = {"symmetric": 1, "antisymmetric": -1, "reflect": 1, "antireflect": -1}
KINDS = ("edge", *MIRRORS, "constant", "gradient", "extrapolate", None)
UNTOUCHED = -77

Whole = Any
Side = Any


def pad_side(u: Whole, axis: int, side: int, width: int, boundary: Side, staggered: bool) -> Whole:
    """Pad one side of the whole field with one boundary."""
    widths = [(0, 0)] * u.ndim
    widths[axis] = (width, 0) if side == 0 else (0, width)
    kind, number = boundary if isinstance(boundary, tuple) else (boundary, None)
    shape = [1] * u.ndim
    shape[axis] = width
    # Distances from the last point inside, in the order of the array.
    distances = np.arange(width, 0, -1) if side == 0 else np.arange(1, width + 1)
    distances = distances.reshape(shape)
    at = [slice(None)] * u.ndim
    at[axis] = slice(0, width) if side == 0 else slice(u.shape[axis], None)
    if kind in MIRRORS:
        mode = "symmetric" if "symmetric" in kind else "reflect"
        padded = np.pad(u, widths, mode=mode)
        padded[tuple(at)] *= np.array(MIRRORS[kind], u.dtype)
        if number is not None:
            padded[tuple(at)] += np.array(2 * number, u.dtype)
        return padded
    if kind == "constant":
        if staggered:
            layer = [slice(None)] * u.ndim
            layer[axis] = slice(0, 1) if side == 0 else slice(-1, None)
            u = u.copy()
            u[tuple(layer)] = number
        return np.pad(u, widths, constant_values=number)
    padded = np.pad(u, widths, mode="edge")
    if kind == "gradient":
        padded[tuple(at)] += (distances * (number if side else -number)).astype(u.dtype)
    elif kind == "extrapolate":
        edge, inner = ((0, 1), (-1, -2))[side]
        slope = np.take(u, [edge], axis) - np.take(u, [inner], axis)
        padded[tuple(at)] += distances.astype(u.dtype) * slope
    return padded


def pad(
    u: Whole,
    halo: Sequence[tuple[int, int]],
    sides: Sequence[tuple[Side, Side]],
    periodic: Sequence[bool],
    staggered: Sequence[bool],
    first: int,
) -> Whole:
    """Pad the whole field, whose grid axes begin at axis ``first``, one axis after the other."""
    for axis, (low, high) in enumerate(halo):
        at = first + axis
        if periodic[axis]:
            high += staggered[axis]  # a block stores the first point of the next one
            widths = [(0, 0)] * u.ndim
            widths[at] = (low, high)
            extent = u.shape[at]
            u = np.pad(u, widths, mode="wrap")
            if sides[axis][0] is not None:
                _, z = sides[axis][0]
                cut = [slice(None)] * u.ndim
                cut[at] = slice(low + extent, None)
                u[tuple(cut)] *= np.array(z, u.dtype)
                cut[at] = slice(0, low)
                u[tuple(cut)] *= np.array(1 / z, u.dtype)
        else:
            for side, width in enumerate((low, high)):
                if sides[axis][side] is not None:
                    u = pad_side(u, at, side, width, sides[axis][side], staggered[axis])
    for axis, widths_of in enumerate(halo):
        for side, width in enumerate(widths_of):
            if not periodic[axis] and sides[axis][side] is None:
                u = pad_side(u, first + axis, side, width, ("constant", UNTOUCHED), False)
    return u


@dataclass
class Case:
    shape: tuple[int, ...]
    halo: tuple[tuple[int, int], ...]
    periodic: tuple[bool, ...]
    dtype: np.dtype[Any]
    before: tuple[int, ...]
    after: tuple[int, ...]
    staggered: tuple[bool, ...]
    sides: dict[tuple[int, ...], tuple[tuple[Side, Side], ...]]
    proc_shape: tuple[int, ...]

    def grid(self, comm: MPI.Intracomm, device: Literal["cpu", "gpu"] = "cpu") -> halox.Grid:
        return halox.Grid(
            self.shape,
            halo=self.halo,
            periodic=self.periodic,
            proc_shape=self.proc_shape,
            comm=comm,
            device=device,
        )

    def field(self, grid: halox.Grid) -> Any:
        return grid.full(
            UNTOUCHED,
            self.dtype,
            components=self.before,
            components_after=self.after,
            staggered=[axis for axis, is_so in enumerate(self.staggered) if is_so],
            boundary=self.sides,
        )

    def padded(self, whole: Whole) -> Whole:
        """Pad each component with its boundaries."""
        extents = self.before + self.after
        first = len(self.before)
        result = None
        for component in np.ndindex(*extents):
            sides = self.sides.get(component, self.sides.get((), ((None, None),) * len(self.shape)))
            index = (
                *(slice(n, n + 1) for n in component[:first]),
                *(slice(None),) * len(self.shape),
                *(slice(n, n + 1) for n in component[first:]),
            )
            one = pad(whole[index], self.halo, sides, self.periodic, self.staggered, first)
            if result is None:
                grid_shape = one.shape[first : first + len(self.shape)]
                result = np.zeros(self.before + grid_shape + self.after, whole.dtype)
            result[index] = one
        return result


def random_case(
    rng: np.random.Generator, ranks: int, *, linear: bool = False, wide: bool = False
) -> Case:
    """Return a random case; with ``linear`` no fill adds numbers of its own, with ``wide`` the blocks are thin."""
    ndim = int(rng.integers(1, 4))
    proc = [1] * ndim
    left = ranks
    for prime in (2, 3, 5, 7):
        while left % prime == 0:
            proc[int(rng.integers(ndim))] *= prime
            left //= prime
    halo = tuple((int(rng.integers(0, 4)), int(rng.integers(0, 4))) for _ in range(ndim))
    shape = tuple(int(rng.integers(5, 8)) * n for n in proc)
    if wide:  # a mirror reads one cell more than its halo has: one owned cell, the others in the opposite halo
        halo = tuple((width, width) for width, _ in halo)
        shape = tuple(max(n, 2, 1 + width) for n, (width, _) in zip(proc, halo, strict=True))
    periodic = tuple(bool(rng.integers(3) == 0) for _ in range(ndim))
    staggered = tuple(bool(rng.integers(4) == 0) for _ in range(ndim))
    dtype = np.dtype(rng.choice(["f8", "f4", "c16", "i4"]))
    before = ((), (), (2,))[rng.integers(3)]
    after = ((), (), (3,))[rng.integers(3)]

    def side() -> Side:
        kind = KINDS[rng.integers(len(KINDS))]
        if kind in ("constant", "gradient"):
            return kind, 0 if linear else int(rng.integers(-3, 4))
        if kind in ("antireflect", "antisymmetric") and not linear and rng.integers(2):
            return kind, int(rng.integers(-3, 4))
        return kind

    def sides() -> tuple[tuple[Side, Side], ...]:
        z = 1j if dtype.kind == "c" else -1
        twisted = (("phase", z), ("phase", z))
        return tuple(
            (twisted if rng.integers(2) else (None, None)) if wraps else (side(), side())
            for wraps in periodic
        )

    by_component = {(): sides()}
    if before + after and rng.integers(2):
        one = tuple(int(rng.integers(extent)) for extent in before + after)
        by_component[one] = sides()
    return Case(shape, halo, periodic, dtype, before, after, staggered, by_component, tuple(proc))


def random_numbers(rng: np.random.Generator, shape: Any, dtype: np.dtype[Any]) -> Whole:
    """Return whole numbers for integers, otherwise numbers whose sums and products are rounded."""
    if dtype.kind in "iu":
        return rng.integers(-9, 10, shape).astype(dtype)
    real, imaginary = rng.random((2, *shape)) - 0.5
    return (real + 1j * imaginary).astype(dtype) if dtype.kind == "c" else real.astype(dtype)


def block(layout: FieldLayout, case: Case, padded: Whole) -> Whole:
    """Return a rank's part of the padded whole field."""
    cut = tuple(
        slice(at.start + low, at.stop + low)
        for at, (low, _) in zip(layout.stored, case.halo, strict=True)
    )
    return padded[(slice(None),) * len(case.before) + cut]


def has_the_bits_of_single_steps(
    sides: Side, comm: MPI.Intracomm, device: Literal["cpu", "gpu"]
) -> bool:
    """Whether owned cells have the same bits with an exchange for each step, for two and for three steps.

    Between exchanges the walls are filled after each step.
    """
    shape = (9 * comm.size, 11, 8)
    boundary = (sides, ("edge", ("gradient", 0.5)), None)
    results = []
    for every in (1, 2, 3):
        with halox.Grid(
            shape, halo=every, boundary=boundary, periodic=(0, 0, 1), comm=comm, device=device
        ) as grid:
            u, v = grid.full(0.5), grid.full(0.5)  # the value beyond walls without a boundary
            i, j, k = grid.indices()
            grid.interior(u)[...] = grid.xp.sin(i) + grid.xp.cos(2 * j) * k
            plan = grid.plan(u, every=every)
            for _ in range(6 // every):
                for cells in plan.steps(u):
                    v[cells] = u[cells] / 2
                    for by in np.eye(3, dtype=int).tolist():
                        back = [-n for n in by]
                        v[cells] += (u[cells.shifted(*by)] + u[cells.shifted(*back)]) / 12
                    u, v = v, u
                    plan.fill_walls(u)
            inside = grid.interior(u)
            results.append(inside.copy() if device == "cpu" else inside.get())
    assert np.isfinite(results[0]).all()
    return all(np.array_equal(results[0], other) for other in results[1:])
