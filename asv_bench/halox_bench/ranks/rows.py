"""Rows of the benchmarks on several ranks: a method on a case, beside what users write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from halox_bench.common.plots import grouped
from halox_bench.common.tables import Table

SELECTED = "selected"
BASELINE = "baseline"
PATH = "path"
STREAM = "stream"
GRAPH = "graph"

CLOSE = 1.10
"""Up to this many times the best path's time, the path chosen counts as well chosen."""


@dataclass(frozen=True, kw_only=True)
class MethodRow:
    """One method on one case.

    Attributes
    ----------
    case : str
        Name of the case.
    kind : str
        `SELECTED`: what halox chooses; `BASELINE`: what users write by hand; else what can be named, such as `PATH`.
    name : str
        Of the path, the algorithm or the baseline; ``"selected"``.
    path : str
        What was really taken, halox only: paths and protocols of the messages to other ranks, or the algorithm.
    mode : {"stream", "graph"}
        ``"stream"``: back to back, waited for at the end; for NumPy arrays, back to back. ``"graph"``: the same
        inside a replayed CUDA graph.
    us : float or None
        Wall time of one call on the slowest rank, median of batches.
    checked : bool
        Whether every value was compared; no figure without.
    beside : dict
        Microseconds of each baseline in the same run and mode, in a stream where it cannot be captured.
    error : str
        Why there is no figure.
    failed : bool
        Whether the error is one that should not be.
    """

    case: str
    kind: str
    name: str
    path: str = ""
    mode: str = STREAM
    us: float | None = None
    checked: bool = False
    beside: dict[str, float] = field(default_factory=dict)
    error: str = ""
    failed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


Row = TypeVar("Row", bound=MethodRow)


def beside(rows: list[Row]) -> list[Row]:
    """Put the baselines' times beside each figure: those of the same mode, else in a stream."""
    finished = []
    for row in rows:
        near = baselines_us(rows, STREAM) | baselines_us(rows, row.mode)
        finished.append(replace(row, beside=near) if row.us is not None else row)
    return finished


def baselines_us(rows: Iterable[MethodRow], mode: str) -> dict[str, float]:
    """Return the time of each baseline that was measured in a mode."""
    return {r.name: r.us for r in rows if r.kind == BASELINE and r.mode == mode and r.us}


def us_of(rows: Iterable[MethodRow], name: str, mode: str) -> float | None:
    """Return the time of a method in a mode, None if it was not measured."""
    return next((row.us for row in rows if row.name == name and row.mode == mode), None)


def others(rows: Iterable[MethodRow], mode: str) -> dict[str, float]:
    """Return all times in a mode, rounded, by the methods' names."""
    return {row.name: round(row.us, 2) for row in rows if row.mode == mode and row.us}


def right(rows: list[Row]) -> list[Row]:
    """Return rows none of which has failed.

    Raises
    ------
    RuntimeError
        If one has; says which.
    """
    wrong = [row for row in rows if row.failed]
    if wrong:
        raise RuntimeError("; ".join(f"{row.name}: {row.error}" for row in wrong))
    return rows


def chosen_over_best(rows: Iterable[MethodRow]) -> list[dict[str, Any]]:
    """Compare, for each case and mode, what halox chose with the best that can be named.

    Returns
    -------
    list of dict
        ``case``, ``mode``, ``chosen``, ``chosen_us``, ``best``, ``best_us``, ``ratio``, and ``same``: whether the best
        took the very same path, so that the ratio is chance. Cases without a path that can be named are left out.
    """
    timed = [row for row in rows if row.us is not None and row.kind != BASELINE]
    found = []
    for (case, mode), group in grouped(timed, lambda row: (row.case, row.mode)).items():
        chosen = next((row for row in group if row.kind == SELECTED), None)
        named = [row for row in group if row.kind != SELECTED]
        if chosen is None or chosen.us is None or not named:
            continue
        best = min(named, key=lambda row: row.us or 0.0)
        found.append(
            {
                "case": case,
                "mode": mode,
                "chosen": chosen.path,
                "chosen_us": chosen.us,
                "best": best.name,
                "best_us": best.us,
                "ratio": chosen.us / (best.us or chosen.us),
                "same": chosen.path == best.path,
            }
        )
    return found


def is_close(one: dict[str, Any]) -> bool:
    """Whether a path was well chosen: the best one itself, or one that takes little longer.

    Examples
    --------
    >>> is_close({"ratio": 1.3, "same": True}), is_close({"ratio": 1.3, "same": False})
    (True, False)
    """
    return bool(one["same"] or one["ratio"] <= CLOSE)


def share_close(compared: Sequence[dict[str, Any]]) -> float | None:
    """Return the share of cases whose path was well chosen, None if there is none to compare."""
    return sum(map(is_close, compared)) / len(compared) if compared else None


def choices(rows: Iterable[MethodRow], result: dict[str, Any], what: str = PATH) -> list[str]:
    """Put into a result how well paths, or algorithms, were chosen; return lines on it."""
    compared = chosen_over_best(rows)
    share = share_close(compared)
    result["chosen_over_best"] = {"limit": CLOSE, "share_within": share, "cases": compared}
    if share is None:
        return []
    lines = [
        "",
        f"chosen {what} over best {what}: the same, or at most {CLOSE:.2f} x its time, in {100 * share:.1f} % of "
        f"{len(compared)} cases and modes",
    ]
    worse = [one for one in compared if not is_close(one)]
    if worse:
        worst = max(worse, key=lambda one: float(one["ratio"]))
        lines.append(
            f"worst {worst['ratio']:.2f} x: {worst['case']}, {worst['mode']}: {worst['chosen']} "
            f"{worst['chosen_us']:.2f} us, {worst['best']} {worst['best_us']:.2f} us"
        )
    return lines


def header(table: Table) -> str:
    """Return the head of a table of rows."""
    return f"{table.header()}  halox over it"


def line(
    table: Table,
    row: MethodRow,
    selected_us: float | None,
    cells: Sequence[str],
    after: Sequence[str] = (),
) -> str:
    """Return a row's line.

    Parameters
    ----------
    selected_us : float or None
        Time of what halox selects, in the same mode.
    cells, after : sequence of str
        Cells before the time, and after it.
    """
    if row.us is None:
        return table.line(cells, row.error or "-", failed=row.failed)
    us = f"{row.us:.2f}" if row.us < 1e4 else f"{row.us:.0f}"
    shown = table.line([*cells, us, *after])
    if selected_us is None or row.kind == SELECTED:
        return shown
    return f"{shown:{table.width}}  {selected_us / row.us:.2f} x"
