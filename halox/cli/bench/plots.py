"""The figures of ``halox bench pack`` as pictures, after figures 4 to 8 of the papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from halox.cli.bench.baselines import MEMCPY_2D
from halox.cli.bench.rows import COPY, Row
from halox.errors import HaloxError, MissingPackageError

Line = tuple[str, Sequence[float], Sequence[float]]
"""Label, x and y."""


_COPY_LABEL = "copy of the same bytes"
_BLOCKS = (8, 128, 4096)
"""Blocks of the vectors that are told apart."""


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every figure for which there are rows.

    Parameters
    ----------
    rows : sequence of Row
    folder : pathlib.Path
        Made if it is not there.

    Returns
    -------
    list of pathlib.Path
        The PNG files written.

    Raises
    ------
    MissingPackageError
        If Matplotlib is not installed.
    HaloxError
        If the folder cannot be written to.
    """
    make(folder)
    usable = [row for row in rows if row.us and row.direction == "pack"]
    made: Sequence[Callable[[list[Row], Path], Path | None]] = (
        _bandwidth,
        _against_memcpy_2d,
        _destinations,
        _methods,
    )
    return [path for one in made if (path := one(usable, folder)) is not None]


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


def _bandwidth(rows: list[Row], folder: Path) -> Path | None:
    """Bandwidth over payload, a line a pattern: Wu et al. figure 6, Jenkins et al. figure 4."""
    chosen = _default_method(row for row in rows if row.destination in ("device", "memory"))
    copies = [row for row in rows if row.method == COPY and row in chosen.rest]
    shown = [row for row in chosen.rows if row.pattern != "vector" or row.block_bytes in _BLOCKS]
    lines = _lines(shown, _pattern_label, "payload_bytes", "gb_per_s")
    lines += _lines(copies, lambda _: _COPY_LABEL, "payload_bytes", "gb_per_s")
    return figure(
        folder / "bandwidth.png",
        lines,
        "Packing, by payload",
        ("payload, bytes", "GB/s of payload"),
    )


def _pattern_label(row: Row) -> str:
    return f"vector, blocks of {row.block_bytes} B" if row.pattern == "vector" else row.pattern


def _against_memcpy_2d(rows: list[Row], folder: Path) -> Path | None:
    """Time of cudaMemcpy2D over that of packing: Jenkins et al. figure 5, Wu et al. figure 8."""
    vectors = [row for row in rows if row.pattern == "vector" and row.cache != "cold"]
    theirs = {
        (row.size, row.destination): row.us for row in vectors if row.method == MEMCPY_2D and row.us
    }
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in vectors:
        reference = theirs.get((row.size, row.destination))
        if row.method == "auto" and row.us and reference:
            label = f"{row.payload_bytes:,} bytes to {row.destination}"
            lines.setdefault(label, []).append((row.block_bytes, reference / row.us))
    found = [(label, *_sorted(points)) for label, points in lines.items()]
    return figure(
        folder / "memcpy2d.png",
        found,
        "cudaMemcpy2D beside packing a vector",
        ("block, bytes", "time of cudaMemcpy2D / time of packing"),
        level=1.0,
    )


def _destinations(rows: list[Row], folder: Path) -> Path | None:
    """Time over payload by destination: Wu et al. figure 7."""
    kept = ("vector", "lower_triangle", "contiguous")
    wanted = [row for row in rows if row.pattern in kept and row.cache != "cold"]
    wanted = [row for row in wanted if row.pattern != "vector" or row.block_bytes == 128]
    chosen = _default_method(wanted).rows
    if len({row.destination for row in chosen}) < 2:
        return None

    def label(row: Row) -> str:
        return f"{row.pattern} to {row.destination}"

    lines = _lines(chosen, label, "payload_bytes", "us")
    return figure(
        folder / "destinations.png",
        lines,
        "Packing by destination, blocks of 128 bytes",
        ("payload, bytes", "us"),
    )


def _methods(rows: list[Row], folder: Path) -> Path | None:
    """Share of the sectors' bound over the block length, a line a packer."""
    vectors = [
        row
        for row in rows
        if row.pattern == "vector" and row.destination == "device" and row.cache == "large"
    ]
    packers = [row for row in vectors if row.kind == "packer" and row.method != "auto"]
    lines = _lines(packers, lambda row: row.method, "block_bytes", "of_bound")
    return figure(
        folder / "methods.png",
        lines,
        "Packing a vector larger than the L2 cache",
        ("block, bytes", "least time for the sectors / time"),
        level=1.0,
    )


class _Chosen:
    """Rows of the method that users get, and all others."""

    def __init__(self, rows: list[Row], rest: list[Row]) -> None:
        self.rows, self.rest = rows, rest


def _default_method(rows: Iterable[Row]) -> _Chosen:
    given = [row for row in rows if row.cache != "cold"]
    packers = [row for row in given if row.kind == "packer"]
    first = packers[0].method if packers else ""
    method = "auto" if any(row.method == "auto" for row in packers) else first
    chosen = [row for row in packers if row.method == method]
    return _Chosen(chosen, [row for row in given if row not in chosen])


def _lines(rows: Iterable[Row], label: Callable[[Row], str], x: str, y: str) -> list[Line]:
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        value = getattr(row, y)
        if value is not None:
            # Of several cases with one payload the best shows what can be reached.
            line = points.setdefault(label(row), {})
            at = float(getattr(row, x))
            better = min if y == "us" else max
            line[at] = better(value, line.get(at, value))
    return [(name, *_sorted(list(line.items()))) for name, line in points.items()]


def _sorted(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
    ordered = sorted(points)
    return [x for x, _ in ordered], [y for _, y in ordered]


def figure(
    path: Path,
    lines: Sequence[Line],
    title: str,
    axis_labels: tuple[str, str],
    level: float | None = None,
) -> Path | None:
    """Draw lines over logarithmic axes.

    Parameters
    ----------
    path : pathlib.Path
        The PNG file.
    lines : sequence of (label, x, y)
        If there is none, nothing is drawn.
    title : str
    axis_labels : (str, str)
    level : float, optional
        Height of a horizontal line.

    Returns
    -------
    pathlib.Path or None
        The file, if one was written.

    Raises
    ------
    MissingPackageError
        If Matplotlib is not installed.
    HaloxError
        If the file cannot be written.
    """
    if not lines:
        return None
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
        colour = "black" if label == _COPY_LABEL else f"C{number % 10}"
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
    return path
