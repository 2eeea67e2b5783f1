"""The scheme of mpi4jax's demo ``shallow_water.py`` on fields of halox, a program for `test_compare`.

As published, the demo changes u and v by the viscosity and does not exchange them again, though the next step reads
their halos. The argument "right" adds this exchange.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import halox

SHAPE, STEPS = (24, 30), 4
SIZE, GRAVITY, DEPTH, CORIOLIS = 5e3, 9.81, 100.0, 2e-4
VISCOSITY = 1e-3 * CORIOLIS * SIZE**2
DT = 0.125 * SIZE / (GRAVITY * DEPTH) ** 0.5
NEW, OLD = 1.6, -0.6  # Adams-Bashforth


def at(y: int, x: int) -> tuple[slice, slice]:
    """Return the index of the cells that are neighbours of the owned cells."""
    return slice(1 + y, (y - 1) or None), slice(1 + x, (x - 1) or None)


HERE, NORTH, SOUTH, EAST, WEST = at(0, 0), at(1, 0), at(-1, 0), at(0, 1), at(0, -1)


def fill(array: Any, is_v: bool = False) -> None:
    """Fill the halo; v is 0 at the northern wall."""
    grid.exchange(array)
    if is_v and grid.at_wall(0, "high"):
        array[-2] = 0


def divergence() -> Any:
    """Return the divergence of the fluxes fe and fn."""
    return (fe[HERE] - fe[WEST]) / SIZE + (fn[HERE] - fn[SOUTH]) / SIZE


grid = halox.Grid(SHAPE, halo=1, periodic=(False, True), device="cpu")
h, u, v, hc, fe, fn, q, ke = (grid.zeros() for _ in range(8))
before: Any = None
y, x = grid.indices(halo=True)
h[...] = DEPTH - 0.01 * y + 0.2 * np.sin(np.pi / 3 * x) * np.cos(np.pi / 6 * y)
u[...] = 10 * np.exp(-(((y - 12) / 4) ** 2)) + 0 * x
fill(u)
fill(v, is_v=True)
fill(h)

for _ in range(STEPS):
    hc[...] = h
    hc[0], hc[-1] = hc[1], hc[-2]
    fill(hc)
    fe[HERE] = 0.5 * (hc[HERE] + hc[EAST]) * u[HERE]
    fn[HERE] = 0.5 * (hc[HERE] + hc[NORTH]) * v[HERE]
    fill(fe)
    fill(fn, is_v=True)
    q[HERE] = CORIOLIS + ((v[EAST] - v[HERE]) - (u[NORTH] - u[HERE])) / SIZE
    q[HERE] *= 4 / (hc[HERE] + hc[EAST] + hc[NORTH] + hc[at(1, 1)])
    fill(q)
    ke[HERE] = (u[HERE] ** 2 + u[WEST] ** 2 + v[HERE] ** 2 + v[SOUTH] ** 2) / 4
    fill(ke)
    north = q[HERE] * (fn[HERE] + fn[EAST]) + q[SOUTH] * (fn[SOUTH] + fn[at(-1, 1)])
    east = q[HERE] * (fe[HERE] + fe[NORTH]) + q[WEST] * (fe[WEST] + fe[at(1, -1)])
    after = (
        -divergence(),
        (-GRAVITY * (h[EAST] - h[HERE]) - (ke[EAST] - ke[HERE])) / SIZE + north / 4,
        (-GRAVITY * (h[NORTH] - h[HERE]) - (ke[NORTH] - ke[HERE])) / SIZE - east / 4,
    )
    for field, new, old in zip((h, u, v), after, before or after, strict=True):
        field[HERE] += DT * (NEW * new + OLD * old)
    before = after
    fill(h)
    fill(u)
    fill(v, is_v=True)
    for field in (u, v):  # the viscosity
        fe[HERE] = VISCOSITY * (field[EAST] - field[HERE]) / SIZE
        fn[HERE] = VISCOSITY * (field[NORTH] - field[HERE]) / SIZE
        fill(fe)
        fill(fn, is_v=True)
        field[HERE] += DT * divergence()
    if "right" in sys.argv:
        grid.exchange(u, v)

print(grid.norm(u))
