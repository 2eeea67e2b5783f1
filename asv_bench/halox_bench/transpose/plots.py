"""Figures of the transpose benchmark: the share of a copy's speed over bytes, for each order of the axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halox_bench.common.plots import figure, grouped, lines, make
from halox_bench.transpose.rows import TransposeRow


def draw(rows: Sequence[TransposeRow], folder: Path) -> list[Path]:
    """Draw a figure for each kind of case with several sizes; returns and errors the same as for `figure`."""
    make(folder)
    drawn: list[Path] = []
    timed = [row for row in rows if row.us is not None]
    groups = grouped(
        timed, lambda r: (r.axes, r.method, r.division, r.direction, r.dtype, r.components)
    )
    for (axes, method, division, direction, dtype, components), group in groups.items():
        if len({row.nbytes for row in group}) < 2:
            continue
        order, element = "".join(map(str, axes)), dtype + "".join(f"-{n}" for n in components)
        what = f"{method}-{order}-{division}-{direction}-{element}"
        drawn += figure(
            folder / f"transpose-{what}.png",
            lines(group, lambda r: f"{r.name}, {r.mode}", lambda r: (r.nbytes, r.us)),
            f"Transpose, {what.replace('-', ' ')}",
            ("bytes of a rank's block", "us"),
        )
    return drawn
