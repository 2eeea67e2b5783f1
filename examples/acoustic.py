"""Acoustic waves in a closed room: pressure in cells, velocities on faces, and exchanges that overlap computation.

The pressure is known at full time steps, and the velocities at half steps on the faces between cells (leapfrog on a
staggered grid). Only the pressure is exchanged: both ranks of a shared face advance its velocity from the same values.
During the exchange each rank advances the faces between its own cells, and afterwards the faces at its boundary. Beyond
a wall the exchange fills the halo with the mirror image of the pressure, so that the velocity on the wall stays 0.

The initial state is a standing wave, whose frequency under this scheme is known exactly. With ``--bang`` it is a
local pulse; then only the mean pressure is compared.

Alone: ``python examples/acoustic.py``; on four ranks, with a picture:
``halox run examples/acoustic.py -n 4 --bang --cells 300 200 --steps 260 --png acoustic.png``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import halox

COURANT = 0.5  # speed of sound * time step / cell size; stable up to 1 / sqrt(2)
WAVES = (3, 2)  # half waves along each axis


class Room:
    """Pressure and velocities in this rank's part of a room with rigid walls."""

    def __init__(self, grid: halox.Grid) -> None:
        self.grid, self.p = grid, grid.zeros("f8")
        self.plan = grid.plan(self.p)
        self.v = [grid.zeros("f8", staggered=axis) for axis in range(2)]

    def accelerate(self, axis: int, first: int, stop: int, courant: float) -> None:
        """Advance the velocities on this rank's faces ``first`` to ``stop`` of an axis; face 0 is below cell 0."""
        p, v = (field.swapaxes(0, axis) for field in (self.p, self.v[axis]))
        v[first + 1 : stop + 1] -= courant * (p[first + 1 : stop + 1] - p[first:stop])

    def step(self, courant: float = COURANT) -> None:
        """Advance the velocities by a time step, or half a step at the start, and then the pressure by a step."""
        self.plan.start()
        for axis, length in enumerate(self.grid.rank_shape):
            self.accelerate(axis, 1, length, courant)
        self.plan.finish()
        for axis, length in enumerate(self.grid.rank_shape):
            self.accelerate(axis, 0, 1, courant)
            self.accelerate(axis, length, length + 1, courant)
        x, y = self.v
        p = self.grid.interior(self.p)
        n, m = (1 + length for length in p.shape)
        p -= COURANT * (x[2 : n + 1, 1:m] - x[1:n, 1:m] + y[1:n, 2 : m + 1] - y[1:n, 1:m])


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the largest error."""
    options = parse(arguments)
    with halox.Grid(options.cells, halo=1, boundary="symmetric", device=options.device) as grid:
        room, xp = Room(grid), grid.xp
        x, y = ((i + 0.5) / n for i, n in zip(grid.indices(), grid.grid_shape, strict=True))
        wave = xp.cos(WAVES[0] * math.pi * x) * xp.cos(WAVES[1] * math.pi * y)
        if options.bang:
            wave = xp.exp(-(((x - 0.3) / 0.02) ** 2) - ((y - 0.4) / 0.03) ** 2)
        p, error = grid.interior(room.p), grid.zeros("f8")
        p[...] = wave
        mean = grid.sum(room.p)
        for step in range(options.steps):
            room.step(COURANT if step else COURANT / 2)

        if options.bang:
            largest = abs(float((grid.sum(room.p) - mean) / mean))
        else:
            waves = zip(WAVES, options.cells, strict=True)
            sines = (math.sin(math.pi * m / (2 * n)) for m, n in waves)
            turn = 2 * math.asin(COURANT * math.hypot(*sines))  # phase per step
            grid.interior(error)[...] = p - math.cos(turn * options.steps) * wave
            largest = float(grid.max(abs(error)))
        whole = grid.gather(room.p) if options.png else None
        if grid.rank == 0:
            print(f"{grid.size} rank(s), {options.steps} steps: error {largest:.1e}")
    if whole is not None:
        draw(options.png, whole)
    if not largest < 1e-11:
        raise SystemExit("the result is wrong")
    return largest


def draw(path: Path, whole: Any) -> None:
    """Draw the pressure of all cells."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    most = float(abs(whole).max())
    axes.imshow(whole.T, origin="lower", cmap="RdBu_r", vmin=-most, vmax=most)
    axes.set(title="pressure", xlabel="x", ylabel="y")
    figure.savefig(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs=2, default=(90, 60), metavar="N")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--bang", action="store_true", help="begin with a bang, no standing wave")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
