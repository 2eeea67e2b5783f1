"""Figures of the halo benchmark and of the ping-pong."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from halox.cli.bench.exchange_rows import ExchangeRow, chosen_over_best
from halox.cli.bench.pingpong_run import PingPongRow
from halox.cli.bench.plots import Line, figure, make


def draw(rows: Sequence[ExchangeRow], folder: Path) -> list[Path]:
    """Draw time over bytes for each kind of faces, and the choice of paths.

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
    drawn: list[Path | None] = []
    timed = [row for row in rows if row.us is not None]
    groups: dict[tuple[Any, ...], list[ExchangeRow]] = {}
    for row in timed:
        key = (len(row.shape), row.faces, row.dtype, row.components, row.halo, row.fields)
        groups.setdefault(key, []).append(row)
    for (ndim, faces, dtype, components, halo, fields), group in groups.items():
        # One rank sends nothing: there is no size to draw over.
        if len({row.shape for row in group}) < 2 or not group[0].bytes_each_way:
            continue
        what = f"{ndim}d-{faces}-{dtype}{''.join(f'-{n}' for n in components)}-halo{halo}-fields{fields}"
        drawn.append(
            figure(
                folder / f"exchange-{what}.png",
                lines(group, lambda r: f"{r.name}, {r.mode}", lambda r: (r.bytes_each_way, r.us)),
                f"Halo exchange, {what.replace('-', ' ')}",
                ("bytes a rank sends", "us"),
            )
        )
    compared = chosen_over_best(timed)
    ratios = sorted(one["ratio"] for one in compared)
    share: list[Line] = [
        (
            "cases, by how well their path was chosen",
            [(i + 1) / len(ratios) for i in range(len(ratios))],
            ratios,
        )
    ]
    drawn.append(
        figure(
            folder / "chosen-over-best.png",
            share if ratios else [],
            "Chosen path over best path",
            ("share of cases", "time of the chosen path / time of the best"),
            level=1.0,
        )
    )
    return [path for path in drawn if path is not None]


def draw_pingpong(rows: Sequence[PingPongRow], folder: Path) -> list[Path]:
    """Draw half a round trip over the matrix's order for each pattern and place: Wu et al. figures 10 to 12.

    Returns and errors as of `draw`.
    """
    make(folder)
    groups: dict[tuple[str, str], list[PingPongRow]] = {}
    for row in rows:
        if row.half_us is not None:
            groups.setdefault((row.pattern, row.place), []).append(row)
    drawn = [
        figure(
            folder / f"pingpong-{pattern}-{place}.png",
            lines(group, _way, lambda row: (row.n, row.half_us)),
            f"Ping-pong: {pattern}, {place}",
            ("order of the matrix", "us of half a round trip"),
        )
        for (pattern, place), group in groups.items()
    ]
    return [path for path in drawn if path is not None]


def _way(row: PingPongRow) -> str:
    held = f", {row.held:.0%} of the GPU held" if row.held else ""
    return f"{row.name}, {row.mode}{held}"


def lines(
    rows: Sequence[Any],
    label: Callable[[Any], str],
    point: Callable[[Any], tuple[float, Any]],
) -> list[Line]:
    """Join rows with the same label to lines, in ascending order of x."""
    found: dict[Hashable, list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault(label(row), []).append(point(row))
    return [
        (str(name), [x for x, _ in sorted(points)], [y for _, y in sorted(points)])
        for name, points in found.items()
    ]
