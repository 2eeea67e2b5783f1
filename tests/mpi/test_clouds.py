"""Clouds of particles against B-splines, of which each weight is a value, and against sums over whole fields."""

from __future__ import annotations

from collections.abc import Callable
from math import fsum
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError
from tests import ppic2
from tests.mpi.bad_input import raised_by_all, read_only
from tests.mpi.conftest import agree

pytestmark = pytest.mark.usually(1, 3, 4)


def spline(distance: np.ndarray, order: int) -> np.ndarray:
    """Return the B-spline of an order: the part of a cloud at a distance from its center."""
    d = abs(distance)
    if order == 0:
        return ((distance >= -0.5) & (distance < 0.5)).astype("f8")
    if order == 1:
        return np.maximum(0, 1 - d)
    return np.where(d < 0.5, 0.75 - d**2, np.maximum(0, 1.5 - d) ** 2 / 2)


def matrices(grid: Any, layout: Any, x: np.ndarray, order: int) -> list[np.ndarray]:
    """Return the weights (particles, points) of all points along each axis, with their images if it is periodic."""
    found = []
    for axis, cells in enumerate(grid.grid_shape):
        points = layout.global_shape[len(layout.spec.components_before) + axis]
        at = np.arange(points) - layout.spec.staggered[axis] / 2
        images = (-1, 0, 1) if grid.decomposition.periodic[axis] else (0,)
        found.append(sum(spline(x[:, axis, None] - at - n * cells, order) for n in images))
    return found


def positions_in_block(grid: Any, number: int, seed: int) -> np.ndarray:
    """Return random positions in this rank's cells, some of them at centers and faces, and not beside walls."""
    rng = np.random.default_rng([seed, grid.rank])
    low = np.array([cut.start - 0.5 for cut in grid.owned])
    high = np.array([cut.stop - 0.5 for cut in grid.owned])
    x = rng.uniform(low, high, (number, len(low)))
    x[::4] = np.floor(x[::4] + 0.5)
    x[1::4] = np.floor(x[1::4] + 0.5) - 0.5
    ends = np.array(grid.grid_shape) - 1.5
    inside = np.where(grid.domain.decomposition.periodic, x, np.clip(x, 0.5, ends))
    return inside[((inside >= low) & (inside < high)).all(axis=1)]


def whole_of(grid: Any, u: Any, layout: Any) -> Any:
    """Return the whole field on all ranks, with the grid axes first."""
    whole = grid.comm.bcast(grid.gather(u, root=0))
    first, ndim = len(layout.spec.components_before), len(grid.grid_shape)
    return np.moveaxis(whole, range(first, first + ndim), range(ndim))


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "1D": ((11,), {"periodic": True}, {}),
    "2D": ((9, 7), {"periodic": (True, False)}, {"components": (2, ..., 3)}),
    "Yee": ((7, 6, 5), {"periodic": (True, True, False)}, {"staggered": (0, 2), "components": 2}),
    "thin": ((6, 8), {"periodic": True, "proc_shape": (0, 1)}, {"staggered": 0}),
}


@pytest.mark.parametrize(("order", "dtype"), [(0, "c8"), (1, "f8"), (2, "f4"), (2, "c16")])
@pytest.mark.parametrize("case", CASES)
def test_values_and_sums(case: str, order: int, dtype: str, comm: MPI.Intracomm) -> None:
    """Values at particles, and sums of their values, are those of B-splines on the whole field."""
    shape, options, layout_of = CASES[case]
    rng = np.random.default_rng([3, comm.rank])
    small = 1e-4 if dtype in ("f4", "c8") else 1e-12
    with halox.Grid(shape, halo=2, device="cpu", comm=comm, **options) as grid:
        p = halox.Particles(grid, positions_in_block(grid, 50, order))
        u, w = grid.random(5, dtype=dtype, **layout_of), grid.zeros(dtype, **layout_of)
        grid.exchange(u)
        layout = grid.layout(u)
        whole = whole_of(grid, u, layout)
        along = "".join("ijk"[: len(shape)])
        product = ",".join(f"p{axis}" for axis in along)
        weights = matrices(grid.domain, layout, p.position, order)
        values = p.get(u, order=order)
        expected = np.einsum(f"{product},{along}...->p...", *weights, whole)
        assert values.dtype == u.dtype and values.shape == expected.shape
        assert agree(np.allclose(values, expected, 0, small), comm), "get"
        given = rng.random(values.shape).astype(dtype)
        p.add(w, given, order=order)
        grid.accumulate(w)
        total = comm.allreduce(np.einsum(f"{product},p...->{along}...", *weights, given))
        assert agree(np.allclose(whole_of(grid, w, layout), total, 0, small), comm), "add"
        products = np.conj(grid.dot(u, w)), comm.allreduce(np.vdot(given, values))
        assert agree(np.isclose(*products, small, small), comm), "adjoint"
        p.add(w, -given, order=order, reproducible=True)
        grid.accumulate(w)
        assert agree(np.allclose(w[layout.interior], 0, 0, small), comm), "reproducible"


def test_constants_and_linear_functions(comm: MPI.Intracomm) -> None:
    """Weights have the sum 1; order 1 and 2 give linear functions their values, in arrays of any memory order."""
    with halox.Grid((12, 9), halo=1, device="cpu", comm=comm) as grid:
        p = halox.Particles(grid, positions_in_block(grid, 100, 1))
        x, y = p.position.T
        i, j = grid.indices(halo=True)
        u = 3.0 * i - 0.5 * j + 1
        every = np.zeros((2 * u.shape[0], u.shape[1]))[::2]
        every[...] = u
        for array in (u, np.asfortranarray(u), every):
            assert agree(np.allclose(p.get(array), 3 * x - 0.5 * y + 1), comm)
            assert agree(np.allclose(p.get(array, order=2), 3 * x - 0.5 * y + 1), comm)
            array[...] = 0
            for order, number in ((0, 1.0), (1, 2.0), (2, np.full(len(p), 3.0))):
                p.add(array, number, order=order)
            assert agree(np.isclose(array.sum(), 6 * len(p)), comm)


def test_reproducible_sums_do_not_depend_on_the_order(comm: MPI.Intracomm) -> None:
    """Of values of unlike magnitudes, of which plain sums depend on it; and they are more exact."""
    rng = np.random.default_rng([8, comm.rank])
    with halox.Grid((6, 7), halo=1, device="cpu", comm=comm) as grid:
        x = positions_in_block(grid, 3000, 2)
        values = rng.normal(size=len(x)) * 2.0 ** rng.integers(0, 40, len(x))
        found: dict[bool, set[bytes]] = {False: set(), True: set()}
        for _ in range(4):
            order = rng.permutation(len(x))
            p = halox.Particles(grid, x[order], value=values[order])
            for reproducible, results in found.items():
                w = grid.zeros()
                p.add(w, p["value"], reproducible=reproducible)
                results.add(w.tobytes())
        assert agree(len(found[True]) == 1, comm)
        i, j = (cut.start for cut in grid.owned)
        weights = matrices(grid.domain, grid.layout(w), p.position, 1)
        exact = fsum(weights[0][:, i] * weights[1][:, j] * p["value"])
        assert agree(bool(np.isclose(w[1, 1], exact, 1e-14)), comm)
        assert agree(len(found[False]) > 1 or len(x) < 500, comm), "the test would see it"


def test_a_plasma_has_the_energies_of_one_rank(comm: MPI.Intracomm) -> None:
    """A small case of ppic2, whose published energies tests/gpu compares."""
    found = []
    for ranks in (comm, MPI.COMM_SELF):
        with halox.Grid((32, 32), halo=1, periodic=True, device="cpu", comm=ranks) as grid:
            found.append(ppic2.run(grid, 64, 6))
    assert agree(np.allclose(*found, 1e-9, 0), comm) and found[0][0] > 1


def test_errors(comm: MPI.Intracomm) -> None:
    with halox.Grid((8, 6), halo=0, device="cpu", comm=comm) as grid:
        at = [cut.start + 0.25 for cut in grid.owned]
        p = halox.Particles(grid, [at])
        u = grid.zeros()
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("order: clouds of order 1 need a halo of 1", lambda: p.get(u)),
            ("order must be 0, 1 or 2", lambda: p.get(u, order=3)),
            ("order must be 0, 1 or 2", lambda: p.add(u, 1, order="1")),  # type: ignore[arg-type]
            ("field: expected all cells in float32", lambda: p.add(grid.zeros("i4"), 1, order=0)),
            ("values: expected a number", lambda: p.add(u, np.zeros(3), order=0)),
            ("values: numbers of complex128", lambda: p.add(u, 1j, order=0)),
            ("cannot be added to a read-only field", lambda: p.add(read_only(grid), 1, order=0)),
        ]
        p.position[0, 0] += 8
        calls.append(("position: particle 0 is at", lambda: p.get(u, order=0)))
        for text, call in calls:
            raised_by_all(comm, FieldError, text, call)
        assert not u.any()
