"""Gray-Scott: two substances react and diffuse on a periodic plane, and form a maze.

Substance U is fed everywhere; V turns U into V, and is removed (J. E. Pearson, "Complex patterns in a simple system",
Science 261, 189, 1993). One exchange serves both fields. Results of arithmetic are fields, too, and are exchanged like
fields that the grid allocated. At the end rank 0 repeats all steps on whole arrays with numpy.roll, and compares.

Alone: ``python examples/gray_scott.py``; on six ranks, with a picture:
``halox run examples/gray_scott.py -n 6 --cells 240 180 --steps 8000 --png gray_scott.png``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import halox

SPREAD_U, SPREAD_V = 0.16, 0.08  # diffusivities * time step / cell size squared
FEED, KILL = 0.035, 0.060


def start(cells: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the initial concentrations in the whole plane: a mixed square in the middle, and some noise."""
    rng = np.random.default_rng(1)
    u, v = (1 - 0.02 * rng.random(cells)), 0.02 * rng.random(cells)
    middle = tuple(slice(n // 2 - n // 10, n // 2 + n // 10) for n in cells)
    u[middle], v[middle] = 0.5, 0.25
    return u, v


def react(u: Any, v: Any, around: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return both substances one time step later; ``around`` sums a cell's four neighbours."""
    reaction = u * v * v
    new_u = u + SPREAD_U * (around(u) - 4 * u) - reaction + FEED * (1 - u)
    new_v = v + SPREAD_V * (around(v) - 4 * v) + reaction - (FEED + KILL) * v
    return new_u, new_v


def from_halo(xp: Any) -> Callable[[Any], Any]:
    """Return a function that sums the neighbours in a rank's array; the sum is 0 in the halo."""

    def around(a: Any) -> Any:
        found = xp.zeros_like(a)
        found[1:-1, 1:-1] = a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:]
        return found

    return around


def rolled(a: np.ndarray) -> np.ndarray:
    """Return the sum of neighbours in the whole plane."""
    return np.roll(a, 1, 0) + np.roll(a, -1, 0) + np.roll(a, 1, 1) + np.roll(a, -1, 1)


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the largest difference from whole arrays."""
    options = parse(arguments)
    with halox.Grid(options.cells, halo=1, periodic=True, device=options.device) as grid:
        u, v = grid.zeros("f8"), grid.zeros("f8")
        for field, values in zip((u, v), start(options.cells), strict=True):
            grid.interior(field)[...] = grid.xp.asarray(values[grid.owned])
        around = from_halo(grid.xp)
        for _ in range(options.steps):
            grid.exchange(u, v)
            u, v = react(u, v, around)
        whole = [grid.gather(field) for field in (u, v)]
        blocks = grid.comm.gather(grid.owned)
        error = np.zeros(())
        if grid.rank == 0:
            expected = start(options.cells)
            for _ in range(options.steps):
                expected = react(*expected, rolled)
            error = np.max([abs(a - b).max() for a, b in zip(whole, expected, strict=True)])
            print(f"{grid.size} rank(s), {options.steps} steps: largest difference {error:.1e}")
        largest = float(grid.comm.bcast(error))
    if options.png and whole[1] is not None:
        draw(options.png, whole[1], options.steps, blocks)
    if not largest < 1e-9:
        raise SystemExit("the result is wrong")
    return largest


def draw(path: Path, v: np.ndarray, steps: int, blocks: list[tuple[slice, ...]]) -> None:
    """Draw the second substance, and the borders of the ranks' blocks."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(7.2, 5), dpi=110, layout="constrained")
    axes = figure.subplots()
    figure.colorbar(axes.imshow(v.T, origin="lower", cmap="magma"), ax=axes)
    for x, y in blocks:
        corner, size = (x.start - 0.5, y.start - 0.5), (x.stop - x.start, y.stop - y.start)
        axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor="white"))
    axes.set(title=f"V after {steps} steps, {len(blocks)} blocks", xlabel="x", ylabel="y")
    figure.savefig(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs=2, default=(96, 80), metavar="N")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
