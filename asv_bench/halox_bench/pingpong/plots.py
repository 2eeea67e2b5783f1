"""Figures of the ping-pong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halox_bench.common.plots import figure, grouped, lines, make
from halox_bench.pingpong.rows import PingPongRow


def draw(rows: Sequence[PingPongRow], folder: Path) -> list[Path]:
    """Draw half a round trip over the matrix's order for each pattern and place: Wu et al. figures 10 to 12.

    Returns and errors the same as for `figure`.
    """
    make(folder)
    timed = [row for row in rows if row.us is not None]
    return [
        path
        for (pattern, place), group in grouped(timed, lambda r: (r.pattern, r.place)).items()
        for path in figure(
            folder / f"pingpong-{pattern}-{place}.png",
            lines(group, lambda row: f"{row.label}, {row.mode}", lambda row: (row.n, row.us)),
            f"Ping-pong: {pattern}, {place}",
            ("order of the matrix", "us of half a round trip"),
        )
    ]
