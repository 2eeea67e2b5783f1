"""The plasma of UCLA's skeleton code ppic2, whose published energies are an oracle that is not ours.

Electrons in a uniform background of ions, in a periodic box of 512 x 512 cells: 3072 x 3072 particles on a lattice with
normally distributed velocities, 100 steps of 0.1 plasma periods / (2 pi). Particles are clouds in cells; the field is
solved in Fourier space with Gaussian particles of radius 0.912871. The published run, in single precision and on 3
ranks, is in https://github.com/UCLA-Plasma-Simulation-Group/PIC-skeleton-codes, ppic2/output. This is another program.

By hand: ``halox run -m tests.ppic2 -n 3``.
"""

from __future__ import annotations

import sys
from time import perf_counter

import numpy as np

import halox

FIELD, KINETIC = 7758.228, 9.431428e6  # of the last step
RADIUS, DT = 0.912871, 0.1

_STATES = 885098780 << 31 | 1824280461, 1396483093 << 31 | 55318673
_FACTORS = 2**31 - 5, 2**31 - 11
_MODULUS = 1 << 62


def uniform(stream: int, first: int, number: int) -> np.ndarray:
    """Return consecutive numbers in (0, 1) of one of two multiplicative congruential generators modulo 2**62."""
    factor, mask = _FACTORS[stream], np.uint64(_MODULUS - 1)
    start = _STATES[stream] * pow(factor, first + 1, _MODULUS) % _MODULUS
    found = np.array([start], np.uint64)
    while len(found) < number:  # a leap of the numbers found so far
        leap = np.uint64(pow(factor, len(found), _MODULUS))
        found = np.concatenate([found, found * leap & mask])
    return found[:number] / float(_MODULUS)


def normal_pairs(first: int, number: int) -> np.ndarray:
    """Return consecutive pairs of normally distributed numbers, by Box-Muller."""
    radius = np.sqrt(-2 * np.log(uniform(0, first, number)))
    angle = 2 * np.pi * uniform(1, first, number)
    return np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=1)


def plasma(grid: halox.Grid, across: int) -> halox.Particles:
    """Return across x across particles, of which each rank makes some rows; axes are y and x."""
    first, end = (n * across // grid.size for n in (grid.rank, grid.rank + 1))
    width = np.float32(grid.grid_shape[0] / across)
    at = (np.arange(across, dtype="f4") + np.float32(0.5)) * width
    y, x = np.meshgrid(at[first:end], at, indexing="ij")
    v = normal_pairs(first * across, x.size)[:, ::-1]
    p = halox.Particles(grid, np.stack([y.ravel(), x.ravel()], axis=1), v=v)
    p["v"] -= grid.allreduce(p["v"].sum(axis=0)) / p.count()
    return p


def run(grid: halox.Grid, across: int, steps: int) -> tuple[float, float]:
    """Return the energies of the field and of the particles in the last of some steps."""
    xp, cells = grid.xp, grid.grid_shape[0]
    p = plasma(grid, across)
    charge, force = grid.zeros("f8"), grid.zeros("f8", components=(..., 2))
    with halox.FFT(grid, real=True, norm="forward") as fft:
        k = fft.wavenumbers((cells, cells))
        squares = sum(a * a for a in k)
        kept = (squares > 0) & (abs(k[0]) < np.pi * 0.999) & (k[1] < np.pi * 0.999)
        shape = xp.exp(-squares * RADIUS**2)  # of both particles that interact
        green = kept * shape * (cells / across) ** 2 / xp.where(squares > 0, squares, 1)
        halves = xp.where(k[1] > 0, 1.0, 0.5)  # modes with k[1] < 0 are left out
        for _ in range(steps):
            charge[...] = 0
            p.add(charge, -1.0)
            grid.accumulate(charge)
            q = fft.forward(charge)
            field = cells**2 * float(fft.grid.sum(halves * green * abs(q) ** 2))
            for axis in (0, 1):
                part = fft.backward(-1j * k[axis] * green * q)
                grid.interior(force)[..., axis] = grid.interior(part)
            grid.exchange(force)
            before = p["v"].copy()
            p["v"] -= DT * p.get(force)
            kinetic = float(grid.allreduce(((p["v"] + before) ** 2).sum())) / 8
            p.position[...] += DT * p["v"]
            p.migrate()
    return field, kinetic


def main(across: int = 3072, steps: int = 100, device: str = "auto") -> None:
    """Print the energies beside those published."""
    with halox.Grid((512, 512), halo=1, periodic=True, device=device) as grid:
        start = perf_counter()
        field, kinetic = run(grid, across, steps)
        if grid.rank == 0:
            print(f"{grid.size} rank(s), {grid.device}, {perf_counter() - start:.1f} s after start")
            print(f"field {field:.3f} (published {FIELD}), kinetic {kinetic:.7g} ({KINETIC:.7g})")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
