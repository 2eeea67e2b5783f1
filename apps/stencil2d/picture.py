"""A picture of the field with the borders of the blocks and their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# The picture shows at most this many points along an axis: every n-th of more.
_MAX_POINTS = 1500

# Decades shown: the values near the zero boundary fall off over many more.
_DECADES = 4


def draw(
    field: np.ndarray,
    borders: tuple[Sequence[int], Sequence[int]],
    ranks_at: Mapping[tuple[int, ...], int],
    path: Path,
    *,
    steps: int,
) -> None:
    """Draw a field into a PNG file.

    Parameters
    ----------
    field : numpy.ndarray
        The whole plane.
    borders : tuple of sequences of int
        First rows and columns of the blocks, with the end of the plane.
    ranks_at : mapping
        Rank by coordinates in the process grid.
    path : pathlib.Path
        File to write.
    steps : int
        Steps made, for the title.
    """
    # Selected here and not globally: a separate figure needs no display and no pyplot state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    rows, cols = field.shape
    every = max(1, -(-max(rows, cols) // _MAX_POINTS))
    shown = field[::every, ::every].astype(np.float64)
    top = float(shown.max()) or 1.0
    bottom = top / 10**_DECADES

    figure = Figure(figsize=(7.2, 6.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    image = axes.imshow(
        np.maximum(shown, bottom),
        norm=LogNorm(bottom, top),
        cmap="viridis",
        extent=(0, cols, rows, 0),
        interpolation="nearest",
    )
    for row in borders[0][1:-1]:
        axes.axhline(row, color="white", linewidth=1.2)
    for col in borders[1][1:-1]:
        axes.axvline(col, color="white", linewidth=1.2)
    for (i, j), rank in ranks_at.items():
        axes.annotate(
            f"rank {rank}",
            (borders[1][j] + 0.03 * cols / len(borders[1]), borders[0][i]),
            xytext=(0, -6),
            textcoords="offset points",
            color="white",
            va="top",
            fontweight="bold",
        )
    axes.set_title(f"SHOC Stencil2D after {steps} steps, one block a rank")
    axes.set_xlabel("column")
    axes.set_ylabel("row")
    figure.colorbar(image, ax=axes, label=f"value (largest {_DECADES} decades)")
    # A file object, since Matplotlib appends a suffix to a name without one.
    with path.open("wb") as file:
        figure.savefig(file, format="png")
