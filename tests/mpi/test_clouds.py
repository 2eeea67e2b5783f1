"""Clouds of particles against B-splines, of which each weight is a value, and against sums over whole fields."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
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


@pytest.mark.parametrize("dtype", ["f8", "f4", "c16"])
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("case", CASES)
def test_values_and_sums(case: str, order: int, dtype: str, comm: MPI.Intracomm) -> None:
    """Values at particles, and sums of their values, are those of B-splines on the whole field, in any memory order."""
    shape, options, layout_of = CASES[case]
    rng = np.random.default_rng([3, comm.rank])
    with halox.Grid(shape, halo=2, device="cpu", comm=comm, **options) as grid:
        x = positions_in_block(grid, 50, order)
        p = halox.Particles(grid, x)
        x = p.position
        u, w = grid.random(5, dtype=dtype, **layout_of), grid.zeros(dtype, **layout_of)
        grid.exchange(u)
        layout = grid.layout(u)
        whole = whole_of(grid, u, layout)
        along = "".join("ijk"[: len(shape)])
        product = ",".join(f"p{axis}" for axis in along)
        weights = matrices(grid.domain, layout, x, order)
        values = p.get(u, order=order)
        expected = np.einsum(f"{product},{along}...->p...", *weights, whole)
        small = 1e-6 if dtype == "f4" else 1e-14
        assert values.dtype == u.dtype and values.shape == expected.shape
        assert agree(np.allclose(values, expected, 0, small * 10), comm), "get"
        given = rng.random(values.shape).astype(dtype)
        p.add(w, given, order=order)
        grid.accumulate(w)
        total = comm.allreduce(np.einsum(f"{product},p...->{along}...", *weights, given))
        assert agree(np.allclose(whole_of(grid, w, layout), total, 0, small * 100), comm), "add"
        both = grid.dot(u, w), comm.allreduce(np.vdot(given, values))
        assert agree(np.isclose(both[0], np.conj(both[1]), small * 100), comm), "adjoint"
        p.add(w, -given, order=order, reproducible=True)
        grid.accumulate(w)
        assert agree(np.allclose(w[layout.interior], 0, 0, small * 100), comm), "reproducible"
