"""Figures of the allreduce benchmark: time over size, and how many calls pay for the set-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halox_bench.allreduce.rows import AllreduceRow
from halox_bench.common.plots import figure, grouped, lines, make
from halox_bench.ranks.rows import BASELINE, STREAM


def draw(rows: Sequence[AllreduceRow], folder: Path, against: str) -> list[Path]:
    """Draw figures 2 and 3 of Faraji and Afsahi 2014 for each dtype and operation that has several sizes.

    The set-up is held against one baseline; returns and errors the same as for `figure`.
    """
    make(folder)
    drawn: list[Path] = []
    timed = [row for row in rows if row.us is not None]
    for (dtype, op), group in grouped(timed, lambda row: (row.dtype, row.op)).items():
        if len({row.nbytes for row in group}) < 2:
            continue
        drawn += figure(
            folder / f"allreduce-{dtype}-{op}.png",
            lines(group, lambda row: f"{row.name}, {row.mode}", lambda row: (row.nbytes, row.us)),
            f"Allreduce, {op} of {dtype}",
            ("bytes of a rank's array", "us"),
        )
        paying = [
            row
            for row in group
            if row.kind != BASELINE and row.mode == STREAM and row.pays_after.get(against)
        ]
        drawn += figure(
            folder / f"allreduce-{dtype}-{op}-set-up.png",
            lines(paying, lambda row: row.name, lambda r: (r.nbytes, r.pays_after[against])),
            f"Calls that pay for the set-up, against {against}",
            ("bytes of a rank's array", "calls"),
        )
    return drawn
