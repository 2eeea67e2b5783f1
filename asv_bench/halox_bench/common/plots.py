"""Figures of lines over logarithmic axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from halox.errors import HaloxError, MissingPackageError
from halox_bench.common.rows import Row, grouped

Line = tuple[str, Sequence[float], Sequence[float]]
"""Label, x and y."""


class Plot(NamedTuple):
    """Figures of rows: one for each combination of some of their attributes, with a line for each label.

    Attributes
    ----------
    name, title : str
        First words of the file's name and of the title.
    by : tuple of str
        Attributes that the rows of a figure have in common.
    x, y : str
        Attributes along the axes.
    x_label, y_label : str
    label : callable
        Returns the name of a row's line.
    wanted : callable
        Tells whether a row is shown.
    """

    name: str
    title: str
    by: tuple[str, ...]
    x: str
    x_label: str
    y: str = "us"
    y_label: str = "us"
    label: Callable[[Row], str] = lambda row: f"{row.name}, {row.mode}"
    wanted: Callable[[Row], bool] = lambda row: True


def draw(plots: Iterable[Plot], rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw each figure that has more than one value of x.

    Returns
    -------
    list of pathlib.Path
        The PNG files.

    Raises
    ------
    MissingPackageError
        If Matplotlib is not installed.
    HaloxError
        If the folder cannot be made, or a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HaloxError(f"--plot: {folder} cannot be made ({error.strerror})") from error
    drawn = []
    for plot in plots:
        shown = [row for row in rows if row.us and plot.wanted(row)]
        for values, group in grouped(shown, partial(_values, plot.by)).items():
            points = [
                (plot.label(row), getattr(row, plot.x), getattr(row, plot.y)) for row in group
            ]
            points = [point for point in points if point[1] and point[2] is not None]
            if len({x for _, x, _ in points}) < 2:
                continue
            words = [word for word in map(_word, values) if word]
            path = folder / f"{'-'.join([plot.name, *words])}.png"
            _figure(path, _lines(points), " ".join([f"{plot.title}:", *words]).rstrip(":"), plot)
            drawn.append(path)
    return drawn


def _values(names: Sequence[str], row: Row) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in names)


def _word(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _lines(points: Iterable[tuple[str, float, float]]) -> list[Line]:
    """Join points with the same label to lines; of several at one x the median is shown."""
    found: list[Line] = []
    for label, group in grouped(points, lambda point: point[0]).items():
        at = grouped(group, lambda point: point[1])
        middle = {x: sorted(y for _, _, y in same)[len(same) // 2] for x, same in at.items()}
        found.append((label, sorted(middle), [middle[x] for x in sorted(middle)]))
    return found


def _figure(path: Path, lines: Sequence[Line], title: str, plot: Plot) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "--plot needs Matplotlib, which is not installed: pip install matplotlib"
        ) from error
    # A figure without pyplot needs no display and leaves no global state.
    figure = Figure(figsize=(9.0, 5.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    styles = ("-", "--", ":", "-.")
    for number, (label, x, y) in enumerate(lines):
        style = styles[number // 10 % len(styles)]
        axes.plot(x, y, style, color=f"C{number % 10}", marker="o", markersize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(True, which="major", linewidth=0.3)
    axes.set_title(title)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    columns = 2 if len(lines) > 14 else 1
    axes.legend(fontsize=6, ncols=columns, loc="center left", bbox_to_anchor=(1, 0.5))
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise HaloxError(f"--plot: {path} cannot be written ({error.strerror})") from error
