"""Figures of several ranks with their targets: group by group within a time, as JSON and as a table."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from halox.cli import report
from halox.cli.bench.headlines import Figure, figure, missing
from halox.cli.bench.ranks_clock import attempt
from halox.runtime.world import load_mpi

Progress = Callable[[str, int, int], None]


def measured(
    comm: Any,
    groups: Mapping[str, Callable[[], Iterable[Figure]]],
    budget_s: float,
    progress: Progress,
) -> list[Figure]:
    """Measure groups of figures in turn; the same on all ranks.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    groups : mapping
        What measures each, by name.
    budget_s : float
        No new group is begun after so many seconds; what is left out says so.
    progress : callable
        Told what comes next.

    Notes
    -----
    Collective.
    """
    began = time.monotonic()
    found: list[Figure] = []
    for number, (name, group) in enumerate(groups.items()):
        progress(name, number, len(groups))
        if comm.bcast(time.monotonic() - began > budget_s):
            found.append(missing(name, f"left out after {budget_s:.0f} s"))
            continue
        # The other figures are still wanted.
        figures, error = attempt(comm, lambda group=group: list(group()))  # type: ignore[misc]
        if figures is None:
            figures = [missing(name, f"{type(error).__name__}: {error}")]
        found += figures
    return comm.bcast(found)  # type: ignore[no-any-return]


def limited(
    name: str,
    value: float,
    unit: str,
    target: float | None,
    baseline: float | None,
    baseline_name: str,
    **others: Any,
) -> Figure:
    """Return a figure with an upper bound, or with none."""
    found = figure(
        name, value, unit, target or 0.0, baseline, baseline_name, at_most=True, **others
    )
    return found if target is not None else found | {"target": None, "met": None}


def shown(found: Iterable[Figure]) -> str:
    """Return a table of figures."""
    rows = [
        {
            "figure": one["name"],
            "value": one["value"],
            "unit": one["unit"],
            "target": "-" if one["target"] is None else f"<= {one['target']}",
            "met": "-" if one["met"] is None else one["met"],
            "beside": one.get("failed") or f"{one['baseline']} {one['baseline_name']}",
        }
        for one in found
    ]
    return "\n".join(report.table(rows))


def main(words: list[str], headlines: Callable[[Any], list[Figure]]) -> int:
    """Measure, write the file named on the first rank, and return the exit status; collective."""
    if len(words) != 1:
        print("expected one argument: the FILE to write", file=sys.stderr)
        return 2
    comm = load_mpi().COMM_WORLD
    found = headlines(comm)
    if comm.rank == 0:
        Path(words[0]).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0
