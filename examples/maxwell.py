"""Maxwell's equations in a metal box by Yee's scheme: six staggered fields, compared with an exact mode.

The electric field E is known on the edges of the cells, and the magnetic field H on their faces, half a step later (K.
S. Yee, IEEE Trans. Antennas Propag. 14, 302, 1966). The component of E along an axis is staggered along the two other
axes, and the component of H only along its own axis. Each step adds the curl of E to H and then the curl of H to E: two
exchanges of three fields. E along the walls stays 0. The frequency of a mode of the box is known exactly for this
scheme.

Alone: ``python examples/maxwell.py``; on four ranks, with a picture:
``halox run examples/maxwell.py -n 4 --png maxwell.png``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import halox

COURANT = 0.5  # speed of light * time step / cell size; stable up to 1 / sqrt(3)
WAVES = (2, 1, 3)  # half waves along each axis
STRENGTH = (1.0, -0.5)  # of E along the first two axes; the third follows from zero divergence


def inner(grid: halox.Grid, field: Any) -> Any:
    """Index of the points to advance: the rank's own points without walls."""
    staggered = grid.layout(field).spec.staggered
    return grid.cells.of(field)[tuple(slice(1, -1) if s else slice(None) for s in staggered)]


def moved(points: Any, axis: int, by: int) -> Any:
    """Move an index along one axis."""
    return points.shifted(*(by * (n == axis) for n in range(3)))


def add_curl(grid: halox.Grid, fields: list[Any], factor: float, of: list[Any], up: int) -> None:
    """Add ``factor`` times the curl of ``of``, whose points around index ``i`` are ``i + up - 1`` and ``i + up``."""
    for a, field in enumerate(fields):
        points = inner(grid, field)
        for sign, b in ((1, (a + 1) % 3), (-1, (a + 2) % 3)):
            other = of[3 - a - b]
            difference = other[moved(points, b, up)] - other[moved(points, b, up - 1)]
            field[points] += sign * factor * difference


def mode(grid: halox.Grid, e: list[Any]) -> list[Any]:
    """Return E of the mode at time 0, on the rank's own points."""
    xp, waves = grid.xp, list(zip(WAVES, grid.grid_shape, strict=True))
    k = [2 * math.sin(math.pi * m / (2 * n)) for m, n in waves]
    found = [*STRENGTH, -(STRENGTH[0] * k[0] + STRENGTH[1] * k[1]) / k[2]]
    for a, field in enumerate(e):
        points = xp.ix_(*(xp.arange(cut.start, cut.stop) for cut in grid.layout(field).owned))
        for b, (m, n) in enumerate(waves):
            angle = math.pi * m / n * (points[b] + (0.5 if a == b else 0))
            found[a] = found[a] * (xp.cos(angle) if a == b else xp.sin(angle))
    return found


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the largest error."""
    options = parse(arguments)
    with halox.Grid(options.cells, halo=1, device=options.device) as grid:
        e = [grid.zeros("f8", staggered=[b for b in range(3) if b != a]) for a in range(3)]
        h = [grid.zeros("f8", staggered=a) for a in range(3)]
        exact = mode(grid, e)
        for field, values in zip(e, exact, strict=True):
            grid.interior(field)[...] = values
        for step in range(options.steps):
            grid.exchange(*e)
            add_curl(grid, h, -COURANT if step else -COURANT / 2, e, 1)
            grid.exchange(*h)
            add_curl(grid, e, COURANT, h, 0)

        sines = (math.sin(math.pi * m / (2 * n)) for m, n in zip(WAVES, options.cells, strict=True))
        turn = 2 * math.asin(COURANT * math.hypot(*sines))  # phase per step
        whole = grid.gather(e[0]) if options.png else None
        for field, values in zip(e, exact, strict=True):
            grid.interior(field)[...] -= math.cos(turn * options.steps) * values
        largest = max(float(grid.max(abs(field))) for field in e)
        if grid.rank == 0:
            print(f"{grid.size} rank(s), {options.steps} steps: largest error {largest:.1e}")
    if whole is not None:
        draw(options.png, whole[len(whole) // 8])
    if not largest < 1e-11:
        raise SystemExit("the result is wrong")
    return largest


def draw(path: Path, plane: Any) -> None:
    """Draw E along x in a plane of the box."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    most = float(abs(plane).max())
    axes.imshow(plane.T, origin="lower", cmap="RdBu_r", vmin=-most, vmax=most)
    axes.set(title="E along x, at x = 1/8", xlabel="y", ylabel="z")
    figure.savefig(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs=3, default=(24, 20, 28), metavar="N")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
