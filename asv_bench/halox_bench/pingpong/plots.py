"""Figures of ping-pongs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from halox_bench.common.plots import figure, grouped, lines, make
from halox_bench.pingpong.rows import TripRow


def draw(
    rows: Sequence[TripRow],
    folder: Path,
    kind: str = "pingpong",
    title: str = "Ping-pong",
    along: tuple[str, Callable[[Any], float]] = ("order of the matrix", lambda row: row.n),
) -> list[Path]:
    """Draw half a round trip for each pattern and place, over what ``along`` names and returns of a row.

    Returns and errors the same as for `figure`. By default Wu et al., figures 10 to 12.
    """
    make(folder)
    label, x = along
    timed = [row for row in rows if row.us is not None]
    return [
        path
        for (pattern, place), group in grouped(timed, lambda r: (r.pattern, r.place)).items()
        for path in figure(
            folder / f"{kind}-{pattern}-{place}.png",
            lines(group, lambda row: f"{row.label}, {row.mode}", lambda row: (x(row), row.us)),
            f"{title}: {pattern}, {place}",
            (label, "us of half a round trip"),
        )
    ]


OVER_BYTES: tuple[str, Callable[[Any], float]] = "bytes", lambda row: row.nbytes
"""For cases of different payloads."""
