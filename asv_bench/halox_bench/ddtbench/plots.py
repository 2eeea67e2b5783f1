"""Figures of DDTBench."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halox_bench.common.plots import figure, grouped, lines, make
from halox_bench.ddtbench.rows import DdtRow


def draw(rows: Sequence[DdtRow], folder: Path) -> list[Path]:
    """Draw half a round trip over the payload for each pattern and place.

    Returns and errors the same as for `figure`.
    """
    make(folder)
    timed = [row for row in rows if row.us is not None]
    return [
        path
        for (pattern, place), group in grouped(timed, lambda r: (r.pattern, r.place)).items()
        for path in figure(
            folder / f"ddtbench-{pattern}-{place}.png",
            lines(group, lambda row: f"{row.name}, {row.mode}", lambda row: (row.nbytes, row.us)),
            f"DDTBench: {pattern}, {place}",
            ("bytes", "us of half a round trip"),
        )
    ]
