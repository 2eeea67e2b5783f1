"""A tracer on a tripolar grid: it turns with the water of a basin and crosses the fold between two poles.

The lines of this grid are confocal ellipses and hyperbolas, like those of a tripolar ocean grid in the far north. Two
poles are the foci. The fold is the segment between them, and both of its shores are the upper side of the grid::

    x = cosh(m) cos(n), y = sinh(m) sin(n)      m from the wall of the basin to 0 at the fold, n around

The water turns like a rigid ellipse, without flow through the wall: after one turn the exact tracer is that of the
start. The stream function is a field on the corners of the cells, and transports are its differences. On the fold both
shores need the same transport, and the exchange copies one half of the line to the other. The sum of the tracer is then
conserved to rounding.

Alone: ``python examples/tripolar.py``; on four ranks, with a picture:
``halox run examples/tripolar.py -n 4 --png tripolar.png``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import halox

WALL = 1.2  # m of the wall
FOLD = {(0, "high"): halox.Connection(flip=1)}  # axis 0 leads to the fold, axis 1 around


def places(grid: halox.Grid, j: Any, i: Any) -> tuple[Any, Any, Any, Any]:
    """Return m, n, x and y at some indices."""
    rows, columns = grid.grid_shape
    m, n = WALL * (1 - j / rows), 2 * np.pi * i / columns
    xp = grid.xp
    return m, n, xp.cosh(m) * xp.cos(n), xp.sinh(m) * xp.sin(n)


def blob(xp: Any, x: Any, y: Any) -> Any:
    """Return the tracer at the start."""
    return xp.exp(-(x**2 + (y - 0.45) ** 2) / 0.4**2)


def turn(grid: halox.Grid, turns: float = 1.0) -> tuple[Any, float]:
    """Return the tracer after some turns, and by how much its sum has changed, as a fraction."""
    xp = grid.xp
    stream = grid.zeros(staggered=(0, 1))
    owned = grid.layout(stream).owned
    *_, x, y = places(grid, *xp.ix_(*(xp.arange(at.start, at.stop) for at in owned)))
    grid.interior(stream)[...] = 1 - (x / np.cosh(WALL)) ** 2 - (y / np.sinh(WALL)) ** 2
    grid.wall(stream, 0, "low")[...] = 0
    grid.exchange(stream)
    corners = stream[1:-1, 1:-1]  # of this rank's cells
    across = (
        corners[1:] - corners[:-1]
    )  # transport in the direction of axis 1, through faces between columns
    along = corners[:, :-1] - corners[:, 1:]
    j, i = grid.indices()
    (m0, n0, *_), (m1, n1, *_) = places(grid, j + 1, i), places(grid, j, i + 1)
    area = (xp.sinh(2 * m1) - xp.sinh(2 * m0)) * (n1 - n0) - (xp.sin(2 * n1) - xp.sin(2 * n0)) * (
        m1 - m0
    )
    area = area / 4
    outflow = abs(across[:, 1:]) + abs(across[:, :-1]) + abs(along[1:]) + abs(along[:-1])
    fastest = float(grid.allreduce((outflow / area).max().reshape(1), op="max")[0])
    time = np.pi * np.cosh(WALL) * np.sinh(WALL) * turns
    steps = int(np.ceil(time * fastest / 2.4))
    tracer, before, areas = grid.zeros(), grid.zeros(), grid.zeros()
    grid.interior(areas)[...] = area
    *_, x, y = places(grid, j + 0.5, i + 0.5)
    inside = grid.interior(tracer)
    inside[...] = blob(xp, x, y)

    def total() -> float:
        return float(grid.sum("area * tracer", area=areas, tracer=tracer))

    start = total()
    for _ in range(steps):
        before[...] = tracer
        for share in (1 / 3, 1 / 2, 1):  # Runge and Kutta's method of third order
            grid.exchange(tracer)
            c = tracer
            flow_across = across * (c[1:-1, :-1] + c[1:-1, 1:])
            flow_along = along * (c[:-1, 1:-1] + c[1:, 1:-1])
            change = flow_across[:, 1:] - flow_across[:, :-1] + flow_along[1:] - flow_along[:-1]
            inside[...] = grid.interior(before) - share * (time / steps / 2) * change / area
    return tracer, abs(total() / start - 1)


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return by how much the sum of the tracer has changed, as a fraction."""
    options = parse(arguments)
    with halox.Grid(
        options.cells, periodic=(False, True), connect=FOLD, device=options.device
    ) as grid:
        tracer, lost = turn(grid)
        half, _ = turn(grid, 0.22) if options.png else (None, 0)
        j, i = grid.indices()
        *_, x, y = places(grid, j + 0.5, i + 0.5)
        difference = grid.zeros()
        grid.interior(difference)[...] = grid.interior(tracer) - blob(grid.xp, x, y)
        error = float(grid.max(abs(difference)))
        if grid.rank == 0:
            print(
                f"{grid.size} rank(s): sum changed by {lost:.1e}, largest error {error:.1%} after one turn"
            )
        whole = grid.gather(tracer if half is None else half)
        if whole is not None and options.png:
            draw(options.png, np.asarray(whole))
    if not error < 1300 / options.cells[1] ** 2:  # a scheme of second order
        raise SystemExit("the result is wrong")
    return lost


def draw(path: Path, tracer: Any) -> None:
    """Draw the tracer on its way over the fold."""
    from matplotlib.figure import Figure

    rows, columns = tracer.shape
    m = WALL * (1 - np.arange(rows + 1) / rows)[:, None]
    n = 2 * np.pi * np.arange(columns + 1) / columns
    x, y = np.cosh(m) * np.cos(n), np.sinh(m) * np.sin(n)
    figure = Figure(figsize=(6, 4.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.pcolormesh(x, y, tracer, cmap="viridis", rasterized=True)
    axes.plot(x[::4].T, y[::4].T, color="white", lw=0.3)
    axes.plot(x[:, ::4], y[:, ::4], color="white", lw=0.3)
    axes.plot([-1, 1], [0, 0], "o-", color="tab:red", lw=1, ms=4)
    axes.set(aspect="equal", xticks=[], yticks=[], title="The fold between two poles")
    figure.savefig(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs=2, default=(48, 144), metavar="N")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
