"""Figures of the MILC benchmark: the time of an iteration over the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halox_bench.common.plots import figure, grouped, lines, make
from halox_bench.milc.rows import MilcRow


def draw(rows: Sequence[MilcRow], folder: Path) -> list[Path]:
    """Draw a figure for each table of several ranks; returns and errors the same as for `figure`."""
    make(folder)
    drawn: list[Path] = []
    timed = [row for row in rows if row.us is not None and row.scaling]
    for scaling, group in grouped(timed, lambda row: row.scaling).items():
        drawn += figure(
            folder / f"milc-{scaling}.png",
            lines(group, lambda r: f"{r.operator} {r.precision}", lambda r: (r.ranks, r.us)),
            f"MILC, an iteration, {scaling} scaling",
            ("ranks", "us"),
        )
    return drawn
