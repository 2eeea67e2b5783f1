"""Heat equation on a periodic plane: explicit steps, compared with the exact solution of the scheme.

Alone: ``python examples/heat.py``; on four ranks, with a picture:
``halox run examples/heat.py -n 4 --png heat.png``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import halox

WAVES = (2, 3)
RATE = 0.2  # diffusivity * time step / cell size squared; stable up to 0.25


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the largest error."""
    options = parse(arguments)
    with halox.Grid(options.cells, halo=1, periodic=True, device=options.device) as grid:
        u, new = grid.zeros("f8"), grid.zeros("f8")
        angles = [
            2 * math.pi * waves / cells * index
            for waves, cells, index in zip(WAVES, options.cells, grid.indices(), strict=True)
        ]
        wave = grid.xp.cos(angles[0]) * grid.xp.cos(angles[1])
        grid.interior(u)[...] = wave

        for _ in range(options.steps):
            grid.exchange(u)
            around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
            new[1:-1, 1:-1] = u[1:-1, 1:-1] + RATE * (around - 4 * u[1:-1, 1:-1])
            u, new = new, u

        # A wave keeps its shape under the scheme; each step damps it by the same factor.
        damping = 1 - 4 * RATE * sum(
            math.sin(math.pi * waves / cells) ** 2
            for waves, cells in zip(WAVES, options.cells, strict=True)
        )
        whole = grid.gather(u) if options.png else None
        grid.interior(new)[...] = abs(grid.interior(u) - damping**options.steps * wave)
        error = float(grid.max(new))
        if grid.rank == 0:
            print(f"{grid.size} rank(s), {options.steps} steps: largest error {error:.1e}")
    if whole is not None:
        draw(options.png, whole)
    if not error <= 1e-12:
        raise SystemExit("the result is wrong")
    return error


def draw(path: Path, whole: Any) -> None:
    """Draw the temperature of all cells."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    figure.colorbar(axes.imshow(whole.T, origin="lower", cmap="inferno"), ax=axes)
    axes.set(title="temperature", xlabel="x", ylabel="y")
    figure.savefig(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs=2, default=(192, 128), metavar="N")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
