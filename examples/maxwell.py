"""Maxwell's equations in a metal box, by Yee's scheme: six staggered fields, compared with an exact mode.

The electric field E is known on the edges of the cells, the magnetic field H on their faces, half a step later (K. S.
Yee, IEEE Trans. Antennas Propag. 14, 302, 1966). E along an axis is staggered along the other two, H along an axis
along that one alone. Each step needs the curl of H for E, then the curl of E for H: two exchanges of three fields. E
along the walls stays 0. A mode of the box oscillates under the scheme at a frequency known exactly.

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
STRENGTH = (1.0, -0.5)  # of E along the first two axes; the third one makes it free of divergence


class Box:
    """E and H of the rank's part of the box."""

    def __init__(self, grid: halox.Grid) -> None:
        self.grid = grid
        others = [tuple(b for b in range(3) if b != a) for a in range(3)]
        self.e = [grid.zeros("f8", staggered=pair) for pair in others]
        self.h = [grid.zeros("f8", staggered=a) for a in range(3)]
        self.exchange_e, self.exchange_h = grid.plan(*self.e), grid.plan(*self.h)

    def inner(self, field: Any) -> list[slice]:
        """Return the points of a staggered field to advance: the rank's own, walls left out."""
        layout, n = self.grid.layout(field), self.grid.grid_shape
        return [
            slice(max(cut.start, 1), min(cut.stop, n[a])) if layout.spec.staggered[a] else cut
            for a, cut in enumerate(layout.owned)
        ]

    def part(self, field: Any, points: list[slice], axis: int = 0, shift: int = 0) -> Any:
        """Return the values at points of the whole box, moved along an axis; from the halo at the rim."""
        cuts = zip(points, self.grid.layout(field).origin, strict=True)
        index = [slice(cut.start - first, cut.stop - first) for cut, first in cuts]
        index[axis] = slice(index[axis].start + shift, index[axis].stop + shift)
        return field[tuple(index)]

    def advance(self, fields: list[Any], others: list[Any], shift: int, courant: float) -> None:
        """Add ``courant`` times the curl of ``others``, which lie half a cell behind (0) or before (-1) along axes."""
        for a, field in enumerate(fields):
            b, c = (a + 1) % 3, (a + 2) % 3
            points = self.inner(field)
            target = self.part(field, points)
            for sign, other, axis in ((1, others[c], b), (-1, others[b], c)):
                ahead = self.part(other, points, axis, 1 + shift)
                target += sign * courant * (ahead - self.part(other, points, axis, shift))

    def step(self, first: bool) -> None:
        """Advance H by a step, or half a one at the start, then E by a step."""
        self.exchange_e()
        self.advance(self.h, self.e, 0, -COURANT / 2 if first else -COURANT)
        self.exchange_h()
        self.advance(self.e, self.h, -1, COURANT)


def mode(grid: halox.Grid, box: Box) -> list[Any]:
    """Return E of the mode at time 0, on the rank's own points."""
    xp, n = grid.xp, grid.grid_shape
    k = [2 * math.sin(math.pi * m / (2 * length)) for m, length in zip(WAVES, n, strict=True)]
    strength = (*STRENGTH, -(STRENGTH[0] * k[0] + STRENGTH[1] * k[1]) / k[2])
    found = []
    for a, field in enumerate(box.e):
        e = strength[a]
        points = xp.ix_(*(xp.arange(cut.start, cut.stop) for cut in grid.layout(field).owned))
        for b in range(3):
            angle = math.pi * WAVES[b] / n[b]
            e = e * (xp.cos(angle * (points[b] + 0.5)) if a == b else xp.sin(angle * points[b]))
        found.append(e)
    return found


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the largest error."""
    options = parse(arguments)
    with halox.Grid(options.cells, halo=1, device=options.device) as grid:
        box = Box(grid)
        exact = mode(grid, box)
        for field, values in zip(box.e, exact, strict=True):
            grid.interior(field)[...] = values
        for step in range(options.steps):
            box.step(first=step == 0)

        sines = (math.sin(math.pi * m / (2 * n)) for m, n in zip(WAVES, options.cells, strict=True))
        turn = 2 * math.asin(COURANT * math.hypot(*sines))  # a step
        largest = 0.0
        whole = grid.gather(box.e[0]) if options.png else None
        for field, values in zip(box.e, exact, strict=True):
            grid.interior(field)[...] -= math.cos(turn * options.steps) * values
            largest = max(largest, float(grid.max(abs(field))))
        if grid.rank == 0:
            print(f"{grid.size} rank(s), {options.steps} steps: largest error {largest:.1e}")
        if whole is not None:
            draw(options.png, whole)
    if not largest < 1e-11:
        raise SystemExit("the result is wrong")
    return largest


def draw(path: Path, whole: Any) -> None:
    """Draw E along x in the middle of the box."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    plane = whole[len(whole) // 8]
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
