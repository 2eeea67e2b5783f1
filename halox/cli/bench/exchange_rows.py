"""Rows of the halo benchmark's table, and what follows from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from halox.cli.bench.ranks_ways import BASELINE, SELECTED, STREAM, TimedRow

PATH = "path"

CLOSE = 1.10
"""Up to this many times the best path's time, the path chosen counts as well chosen."""


@dataclass(frozen=True)
class ExchangeRow:
    """One way to do one case's exchange.

    Attributes
    ----------
    case : str
        Name of the case.
    shape, components : tuple of int
        Cells a rank owns; extents of axes behind them.
    proc_shape : tuple of int
        Ranks along each axis.
    faces, halo, dtype, fields
        As of `ExchangeCase`.
    bytes_each_way : int
        What a rank sends to other ranks in one exchange; as much comes from them.
    kind : {"selected", "path", "baseline"}
        What halox chooses; a path named by ``path=``; what users write by hand.
    name : str
        Of the path or the baseline; ``"selected"``.
    path : str
        Paths and ways the messages to other ranks really took, halox only.
    mode, us, checked, beside, error, failed
        As of `TimedRow`, of one exchange.
    """

    case: str
    shape: tuple[int, ...]
    components: tuple[int, ...]
    proc_shape: tuple[int, ...]
    faces: str
    halo: int
    dtype: str
    fields: int
    bytes_each_way: int
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


def chosen_over_best(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Compare, for each case and mode, what halox chose with the best path that can be named.

    Parameters
    ----------
    rows : iterable of TimedRow
        That have a ``case`` and a ``path`` as well.

    Returns
    -------
    list of dict
        ``case``, ``mode``, ``chosen``, ``chosen_us``, ``best``, ``best_us``, ``ratio``, and ``same``: whether the best
        took the very same path, so that the ratio is chance. Cases without a path that can be named are left out.
    """
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in rows:
        if row.us is not None:
            groups[row.case, row.mode].append(row)
    found = []
    for (case, mode), group in groups.items():
        chosen = next((row for row in group if row.kind == SELECTED), None)
        paths = [row for row in group if row.kind not in (SELECTED, BASELINE)]
        if chosen is None or chosen.us is None or not paths:
            continue
        best = min(paths, key=lambda row: row.us or 0.0)
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
    if not compared:
        return None
    return len([one for one in compared if is_close(one)]) / len(compared)


Columns = Sequence[tuple[str, int]]
"""Names and widths."""

_COLUMNS = (("case", 30), ("bytes", 12), ("way", 34), ("path", 18), ("mode", 6), ("us", 10))
_NUMBERS = ("bytes", "us", "set-up us")


def heading(columns: Columns) -> str:
    """Return the head of a table of `TimedRow`."""
    return f"{_aligned([name for name, _ in columns], columns)}  halox over it"


def timed_line(
    row: TimedRow,
    selected_us: float | None,
    columns: Columns,
    cells: Sequence[str],
    after: Sequence[str] = (),
) -> str:
    """Return a row's line.

    Parameters
    ----------
    row : TimedRow
    selected_us : float or None
        Time of what halox selects, in the same mode.
    columns : sequence of (str, int)
    cells, after : sequence of str
        What stands before the time, and after it.
    """
    if row.us is None:
        said = row.error.splitlines()[0] if row.error else "-"
        return f"{_aligned(cells, columns)}  {'FAILED: ' if row.failed else ''}{said}"
    us = f"{row.us:.2f}" if row.us < 1e4 else f"{row.us:.0f}"
    shown = _aligned([*cells, us, *after], columns)
    if selected_us is None or row.kind == SELECTED:
        return shown
    width = sum(wide + 1 for _, wide in columns) - 1
    return f"{shown:{width}}  {selected_us / row.us:.2f} x"


def _aligned(cells: Sequence[str], columns: Columns) -> str:
    padded = [
        cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
        for cell, (name, width) in zip(cells, columns, strict=False)
    ]
    return " ".join(padded).rstrip()


def header() -> str:
    """Return the table's head."""
    return heading(_COLUMNS)


def line(row: ExchangeRow, selected_us: float | None) -> str:
    """Return a row's line.

    Parameters
    ----------
    row : ExchangeRow
    selected_us : float or None
        Time of what halox selects, in the same mode.

    Examples
    --------
    >>> row = ExchangeRow("8^3 f8 x", (8, 8, 8), (), (1, 1, 2), "x", 1, "f8", 1, 1024, "baseline", "by hand", us=4.0)
    >>> line(row, 2.0).split()
    ['8^3', 'f8', 'x', '1,024', 'by', 'hand', 'stream', '4.00', '0.50', 'x']
    """
    cells = [row.case, f"{row.bytes_each_way:,}", row.name, row.path, row.mode]
    return timed_line(row, selected_us, _COLUMNS, cells)


def summary(compared: Sequence[dict[str, Any]], what: str = "path") -> list[str]:
    """Return lines on how well paths, or others, were chosen; none where nothing can be compared."""
    share = share_close(compared)
    if share is None:
        return []
    lines = [
        "",
        f"chosen {what} over best {what}: the same, or at most {CLOSE:.2f} x its time, in {100 * share:.1f} % of "
        f"{len(compared)} cases and modes",
    ]
    others = [one for one in compared if not is_close(one)]
    if others:
        worst = max(others, key=lambda one: float(one["ratio"]))
        lines.append(
            f"worst {worst['ratio']:.2f} x: {worst['case']}, {worst['mode']}: {worst['chosen']} "
            f"{worst['chosen_us']:.2f} us, {worst['best']} {worst['best_us']:.2f} us"
        )
    return lines


def choices(rows: Iterable[Any], result: dict[str, Any], what: str = "path") -> list[str]:
    """Put into a result how well paths, or others, were chosen; return lines on it."""
    compared = chosen_over_best(rows)
    result["chosen_over_best"] = {
        "limit": CLOSE,
        "share_within": share_close(compared),
        "cases": compared,
    }
    return summary(compared, what)
