"""Two beams of electrons in a plasma, by the particle-in-cell method, and the growth rate of their instability.

Two cold beams flow through one another and through ions at rest. A small displacement of the electrons grows by the
rate of the dispersion relation 1 = (1/2) / (w - k v)**2 + (1/2) / (w + k v)**2, in units of the plasma frequency (C. K.
Birdsall and A. B. Langdon: Plasma Physics via Computer Simulation, 1985, section 5-6), until the beams roll up.

Alone: ``python examples/pic.py``; on four ranks, with a picture: ``halox run examples/pic.py -n 4 --png pic.png``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import halox

WAVE = math.sqrt(3 / 8)  # k v of the fastest growth
DISPLACEMENT = 1e-4  # of the electrons at first, in units of v / plasma frequency
ORDER = 2  # of the clouds


def growth_rate(wave: float) -> float:
    """Return the growth rate at a product of wave number and velocity: the root of the dispersion relation."""
    square = wave**2 + 0.5 - math.sqrt(2 * wave**2 + 0.25)
    return math.sqrt(-square)


class Plasma:
    """Electrons in a box as long as one wave; positions and velocities are in cells."""

    def __init__(self, grid: halox.Grid, fft: halox.FFT, across: int) -> None:
        self.grid, self.fft, xp = grid, fft, grid.xp
        self.cell = 2 * math.pi / WAVE / grid.grid_shape[0]  # in units of v / plasma frequency
        # Each rank begins with across**2 electrons of each beam in each of its cells.
        within = (np.arange(across) + 0.5) / across - 0.5
        x, y = (
            np.add.outer(np.arange(cut.start, cut.stop), within).reshape(-1) for cut in grid.owned
        )
        at = np.stack(np.meshgrid(x, y, indexing="ij"), axis=-1).reshape(-1, 2)
        at = np.concatenate([at, at])
        v = np.zeros_like(at)
        v[: len(at) // 2, 0], v[len(at) // 2 :, 0] = 1 / self.cell, -1 / self.cell
        phase = 2 * math.pi * at[:, 0] / grid.grid_shape[0]
        at[:, 0] += DISPLACEMENT / self.cell * np.sin(phase)
        self.electrons = halox.Particles(grid, at, v=v)
        self.charge = -1 / (2 * across**2)  # of an electron, in units of the ions in a cell
        self.density, self.force = grid.zeros(), grid.zeros(components=(..., 2))
        self.k = fft.wavenumbers([n * self.cell for n in grid.grid_shape])
        squares = sum(k * k for k in self.k)
        self.inverse = (squares > 0) / xp.where(squares > 0, squares, 1)

    def step(self, dt: float) -> float:
        """Move the electrons by a time step, and return the strength of the field before it."""
        grid, fft, p = self.grid, self.fft, self.electrons
        self.density[...] = 0
        p.add(self.density, self.charge, ORDER)
        grid.accumulate(self.density)
        potential = fft.forward(self.density) * self.inverse  # the ions are its mean, which is 0
        for axis, k in enumerate(self.k):
            kept = abs(k) < math.pi / self.cell * 0.999  # two cells per period have no derivative
            field = fft.backward(-1j * k * kept * potential)
            grid.interior(self.force)[..., axis] = -grid.interior(field)
        grid.exchange(self.force)
        p["v"] += dt / self.cell * p.get(self.force, ORDER)  # at half steps: leapfrog
        p.position[...] += dt * p["v"]
        p.migrate()
        return float(grid.norm(self.force))

    def phase_space(self) -> Any:
        """Return the number of electrons by position along x and velocity along x, of all ranks."""
        x, v = self.electrons.position[:, 0], self.electrons["v"][:, 0] * self.cell
        ranges = [(-0.5, self.grid.grid_shape[0] - 0.5), (-3, 3)]
        return self.grid.allreduce(self.grid.xp.histogram2d(x, v, bins=(96, 96), range=ranges)[0])


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the relative error of the growth rate."""
    options = parse(arguments)
    shape = options.cells, max(4, options.cells // 4)
    with (
        halox.Grid(shape, halo=1, periodic=True, device=options.device) as grid,
        halox.FFT(grid, real=True) as fft,
    ):
        plasma = Plasma(grid, fft, options.across)
        t = options.dt * np.arange(round(options.time / options.dt))
        strength = np.array([plasma.step(options.dt) for _ in t]) / math.sqrt(math.prod(shape))
        # From the time when the growing wave prevails to the time when it is too strong for a linear relation.
        linear = (t > 10) & (np.maximum.accumulate(strength) < 0.02)
        rate = np.polyfit(t[linear], np.log(strength[linear]), 1)[0]
        ratio = float(rate / growth_rate(WAVE))
        electrons = plasma.electrons.count()
        if grid.rank == 0:
            print(
                f"{grid.size} rank(s), {grid.device}: {electrons} electrons, {len(t)} steps: growth rate {rate:.4f}, "
                f"{ratio:.4f} of the exact one"
            )
        phases = plasma.phase_space() if options.png else None
    if phases is not None and grid.rank == 0:
        draw(options.png, t, strength, phases.tolist())
    if not abs(ratio - 1) < 0.02:
        raise SystemExit("the result is wrong")
    return abs(ratio - 1)


def draw(path: Path, t: Any, strength: Any, phases: Any) -> None:
    """Draw the electrons in phase space, and the strength of the field over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    density = np.log1p(np.array(phases).T)
    left.imshow(density, origin="lower", extent=(0, 1, -3, 3), aspect="auto", cmap="magma")
    left.set(title=f"electrons at t = {t[-1]:.0f}", xlabel="x / wave length", ylabel="velocity / v")
    right.semilogy(t, strength, label="field")
    exact = strength[len(t) // 4] * np.exp(growth_rate(WAVE) * (t - t[len(t) // 4]))
    right.semilogy(t, exact, "--", label="exact growth")
    right.set(
        xlabel="t, in units of 1 / plasma frequency", ylim=(strength.min() / 2, 3 * strength.max())
    )
    right.legend()
    figure.savefig(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, default=64, metavar="N", help="along a wave")
    parser.add_argument(
        "--across", type=int, default=2, metavar="N", help="electrons by axis, beam and cell"
    )
    parser.add_argument(
        "--time", type=float, default=40, help="end, in units of 1 / plasma frequency"
    )
    parser.add_argument("--dt", type=float, default=0.2, help="time step")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
