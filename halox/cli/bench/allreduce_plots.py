"""Figures of the allreduce benchmark: time over size, and how many calls pay for the set-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from halox.cli.bench.allreduce_rows import AllreduceRow
from halox.cli.bench.exchange_plots import lines
from halox.cli.bench.plots import figure, make
from halox.cli.bench.ranks_ways import BASELINE, STREAM


def draw(rows: Sequence[AllreduceRow], folder: Path, against: str) -> list[Path]:
    """Draw figures 2 and 3 of Faraji and Afsahi 2014 for each dtype and operation that has several sizes.

    Parameters
    ----------
    rows : sequence of AllreduceRow
    folder : pathlib.Path
        Made if it is not there.
    against : str
        The baseline that the set-up is held against.

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
    groups: dict[tuple[str, str], list[AllreduceRow]] = {}
    for row in rows:
        if row.us is not None:
            groups.setdefault((row.dtype, row.op), []).append(row)
    drawn: list[Path | None] = []
    for (dtype, op), group in groups.items():
        if len({row.nbytes for row in group}) < 2:
            continue
        drawn.append(
            figure(
                folder / f"allreduce-{dtype}-{op}.png",
                lines(group, lambda row: f"{row.name}, {row.mode}", lambda r: (r.nbytes, r.us)),
                f"Allreduce, {op} of {dtype}",
                ("bytes of a rank's array", "us"),
            )
        )
        paying = [
            replace(row, us=calls)
            for row in group
            if row.kind != BASELINE
            and row.mode == STREAM
            and (calls := row.pays_after.get(against))
        ]
        drawn.append(
            figure(
                folder / f"allreduce-{dtype}-{op}-set-up.png",
                lines(paying, lambda row: row.name, lambda row: (row.nbytes, row.us)),
                f"Calls that pay for the set-up, against {against}",
                ("bytes of a rank's array", "calls"),
            )
        )
    return [path for path in drawn if path is not None]
