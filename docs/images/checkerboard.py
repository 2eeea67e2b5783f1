"""Draws ``checkerboard.png`` from an exchange: ``python docs/images/checkerboard.py`` in a checkout."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import halox

CELLS = 8, 8
FILE = Path(__file__).with_name("checkerboard.png")


def even_sites() -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Return the even sites of a block, and the even halo sites that an exchange fills for neighbours 1 and 3 away."""
    with halox.Grid(
        CELLS, halo=3, periodic=True, corners=False, checkerboard=True, device="cpu"
    ) as grid:
        u = grid.full(-1.0, "f8", parity="even", offsets=(1, 3))
        grid.interior(u)[...] = 1
        grid.exchange(u)
        y, x = np.broadcast_arrays(*grid.indices(halo=True, parity="even"))
        inside = (x >= 0) & (x < CELLS[1]) & (y >= 0) & (y < CELLS[0])
        filled = (u == 1) & ~inside
    return set(zip(y[inside], x[inside], strict=True)), set(zip(y[filled], x[filled], strict=True))


def draw() -> None:
    """Write the picture."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    owned, halo = even_sites()
    height, width = CELLS
    figure = Figure(figsize=(7.2, 5.4), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    box = Rectangle((-0.5, -0.5), width, height, facecolor="#f3efe2", edgecolor="0.5")
    axes.add_patch(box)
    odd = [(y, x) for y in range(height) for x in range(width) if (x + y) % 2]
    for sites, label, style in (
        (odd, "odd sites of the block: computed", {"marker": "x", "color": "0.5", "s": 36}),
        (owned, "even sites of the block: read", {"marker": "o", "color": "C0", "s": 60}),
        (halo, "even sites of the halo: sent by neighbours, read", {"color": "C3", "s": 60}),
    ):
        rows, columns = zip(*sorted(sites), strict=True)
        axes.scatter(columns, rows, label=label, **style)
    axes.set_aspect("equal")
    axes.set_xticks(range(-3, width + 3))
    axes.set_yticks(range(-3, height + 3))
    axes.invert_yaxis()
    axes.set_xlabel("x")
    axes.set_ylabel("y")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False)
    figure.savefig(FILE)


if __name__ == "__main__":
    draw()
