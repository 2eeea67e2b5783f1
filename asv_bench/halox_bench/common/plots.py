"""Figures of lines over logarithmic axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from halox.errors import HaloxError, MissingPackageError

Row = TypeVar("Row")

Line = tuple[str, Sequence[float], Sequence[float]]
"""Label, x and y."""

COPY_LABEL = "copy of the same bytes"
"""Label of the line that is drawn in black."""


def make(folder: Path) -> None:
    """Make the folder for figures if it is not there.

    Raises
    ------
    HaloxError
        If it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HaloxError(f"--plot: {folder} cannot be made ({error.strerror})") from error


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Return rows by a key, in the order in which the keys first appear."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def lines(
    rows: Iterable[Row], label: Callable[[Row], str], point: Callable[[Row], tuple[float, Any]]
) -> list[Line]:
    """Join the points of rows with the same label to lines, in ascending order of x."""
    found: list[Line] = []
    for name, group in grouped(rows, label).items():
        points = sorted(map(point, group))
        found.append((name, [x for x, _ in points], [y for _, y in points]))
    return found


def figure(
    path: Path,
    lines: Sequence[Line],
    title: str,
    axis_labels: tuple[str, str],
    level: float | None = None,
) -> list[Path]:
    """Draw lines over logarithmic axes.

    Parameters
    ----------
    path : pathlib.Path
        The PNG file.
    lines : sequence of (label, x, y)
        If there is none, nothing is drawn.
    level : float, optional
        Height of a horizontal line.

    Returns
    -------
    list of pathlib.Path
        The file, if one was written.

    Raises
    ------
    MissingPackageError
        If Matplotlib is not installed.
    HaloxError
        If the file cannot be written.
    """
    if not lines:
        return []
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "--plot needs Matplotlib, which is not installed: pip install matplotlib"
        ) from error
    # A figure of its own needs no display and no pyplot state.
    figure = Figure(figsize=(9.0, 5.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    styles = ("-", "--", ":", "-.")
    for number, (label, x, y) in enumerate(lines):
        colour = "black" if label == COPY_LABEL else f"C{number % 10}"
        style = styles[number // 10 % len(styles)]
        axes.plot(x, y, style, color=colour, marker="o", markersize=3, label=label)
    if level is not None:
        axes.axhline(level, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(True, which="major", linewidth=0.3)
    axes.set_title(title)
    axes.set_xlabel(axis_labels[0])
    axes.set_ylabel(axis_labels[1])
    axes.legend(
        fontsize=6, ncols=2 if len(lines) > 14 else 1, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise HaloxError(f"--plot: {path} cannot be written ({error.strerror})") from error
    return [path]
