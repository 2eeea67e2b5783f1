"""Heat in a box with two walls of fixed temperature and two insulated walls, compared with the scheme's exact solution.

The boundaries of the grid fill the halo beyond the walls in each exchange. The mirror image of the cells inside
insulates. For a fixed temperature the mean of the cells on both sides of the wall is that temperature.

Alone: ``python examples/heat_walls.py``; on four ranks, with a picture:
``halox run examples/heat_walls.py -n 4 --png heat_walls.png``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import halox

RATE = 0.2  # diffusivity * time step / cell size squared; stable up to 0.25
COLD, HOT = 0.0, 1.0
WAVES = (3, 2)  # half waves along each axis, of the part that decays
WALLS = ((("antisymmetric", COLD), ("antisymmetric", HOT)), "symmetric")


def step(u: Any) -> Any:
    """Return the temperature of the cells one time step later."""
    around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    return u[1:-1, 1:-1] + RATE * (around - 4 * u[1:-1, 1:-1])


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the largest error."""
    options = parse(arguments)
    with halox.Grid(options.cells, boundary=WALLS, device=options.device) as grid:
        xp, cells = grid.xp, grid.grid_shape
        x, y = ((i + 0.5) / n for i, n in zip(grid.indices(), cells, strict=True))
        steady = COLD + (HOT - COLD) * x
        wave = xp.sin(WAVES[0] * math.pi * x) * xp.cos(WAVES[1] * math.pi * y)
        u, error = grid.zeros("f8"), grid.zeros("f8")
        grid.interior(u)[...] = steady + wave
        for _ in range(options.steps):
            grid.exchange(u)
            grid.interior(u)[...] = step(u)

        # The wave keeps its shape under the scheme; each step damps it by the same factor.
        angles = (waves * math.pi / (2 * n) for waves, n in zip(WAVES, cells, strict=True))
        damping = 1 - 4 * RATE * sum(math.sin(angle) ** 2 for angle in angles)
        grid.interior(error)[...] = grid.interior(u) - steady - damping**options.steps * wave
        largest = float(grid.max(abs(error)))
        whole = grid.gather(u) if options.png else None
        if grid.rank == 0:
            print(f"{grid.size} rank(s), {options.steps} steps: largest error {largest:.1e}")
    if whole is not None:
        draw(options.png, whole, options.steps)
    if not largest < 1e-12:
        raise SystemExit("the result is wrong")
    return largest


def draw(path: Path, whole: Any, steps: int) -> None:
    """Draw the temperature of all cells."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(whole.T, origin="lower", cmap="inferno", vmin=COLD, vmax=HOT)
    axes.contour(whole.T, levels=9, colors="white", linewidths=0.6)
    axes.set(
        title=f"temperature after {steps} steps", xlabel="x: fixed ends", ylabel="y: insulated"
    )
    figure.colorbar(image, ax=axes)
    figure.savefig(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs=2, default=(120, 80), metavar="N")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
