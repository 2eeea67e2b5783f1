"""Rows of all benchmarks: a method on a case, beside the baselines; their table, and the choice of paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple, Self, TypeVar

SELECTED = "selected"
BASELINE = "baseline"
PATH = "path"
STREAM = "stream"
GRAPH = "graph"

CLOSE = 1.10
"""A path counts as well chosen up to this multiple of the best path's time."""

Item = TypeVar("Item")


def grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Return items by a key, in the order of the keys' first appearance."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True)
class Row:
    """One method on one case. Entries of ``details`` are attributes too: ``row.nbytes``.

    Attributes
    ----------
    case : str
        Name of the case.
    kind : str
        `SELECTED`: halox's own choice; `BASELINE`: hand-written code; else the kind of ``name``: `PATH`.
    name : str
        Name of the path, the algorithm or the baseline; ``"selected"``.
    path : str
        Paths and protocols of the messages to other ranks, or the algorithm; halox only.
    mode : str
        ``"stream"``: calls back to back, one wait at the end. ``"graph"``: the same in a replayed CUDA graph.
    us : float or None
        Median time of one call on the slowest rank.
    checked : bool
        Whether every value was compared; a row without the check has no time.
    beside : dict
        Microseconds of each baseline in the same mode, or in a stream if it cannot be captured.
    error : str
        Reason for a missing time.
    failed : bool
        Whether the error is a failure, not a limitation.
    details : dict
        Properties of the case, and further figures.
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
    details: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """Return an entry of ``details``."""
        details: dict[str, Any] = self.__dict__.get("details", {})
        if name not in details:
            raise AttributeError(f"row of {self.__dict__.get('case')!r} has no {name!r}")
        return details[name]

    def with_(self, **found: Any) -> Self:
        """Return the row with other attributes; unknown names become details."""
        own = {one.name for one in fields(self)}
        attributes = {name: value for name, value in found.items() if name in own}
        others = {name: value for name, value in found.items() if name not in own}
        return replace(self, **attributes, details=self.details | others)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found: dict[str, Any] = asdict(self)
        details: dict[str, Any] = found.pop("details")
        return found | details


def beside(rows: Iterable[Row]) -> list[Row]:
    """Put the baselines' times beside each time: of the same mode, else of the stream."""
    rows = list(rows)
    finished = []
    for row in rows:
        near = baselines_us(rows, STREAM) | baselines_us(rows, row.mode)
        finished.append(replace(row, beside=near) if row.us is not None else row)
    return finished


def baselines_us(rows: Iterable[Row], mode: str) -> dict[str, float]:
    """Return the time of each baseline that was measured in a mode."""
    return {r.name: r.us for r in rows if r.kind == BASELINE and r.mode == mode and r.us}


def us_of(rows: Iterable[Row], name: str, mode: str = STREAM) -> float | None:
    """Return the time of a method in a mode, None if it was not measured."""
    return next((row.us for row in rows if row.name == name and row.mode == mode), None)


def others(rows: Iterable[Row], mode: str) -> dict[str, float]:
    """Return all times in a mode, rounded, by the methods' names."""
    return {row.name: round(row.us, 2) for row in rows if row.mode == mode and row.us}


def right(rows: list[Row]) -> list[Row]:
    """Return the rows.

    Raises
    ------
    RuntimeError
        If a method failed; names each of them.
    """
    wrong = [row for row in rows if row.failed]
    if wrong:
        raise RuntimeError("; ".join(f"{row.name}: {row.error}" for row in wrong))
    return rows


def why_not(rows: Iterable[Row], name: str, mode: str) -> str:
    """Return the reason why a method has no time in a mode."""
    errors = (row.error for row in rows if (row.name, row.mode) == (name, mode))
    return next(filter(None, errors), f"{name} was not measured in a {mode}")


def chosen_over_best(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Compare, for each case and mode, halox's choice with the best named path.

    Returns
    -------
    list of dict
        ``case``, ``mode``, ``chosen``, ``chosen_us``, ``best``, ``best_us``, ``ratio``, and ``same``: whether both took
        the same path, so that the ratio is chance. Cases without a named path are left out.
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


def is_close(one: Mapping[str, Any]) -> bool:
    """Whether the best path was chosen, or one that takes little longer.

    Examples
    --------
    >>> is_close({"ratio": 1.3, "same": True}), is_close({"ratio": 1.3, "same": False})
    (True, False)
    """
    return bool(one["same"] or one["ratio"] <= CLOSE)


def share_close(compared: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of cases with a well chosen path, None without cases."""
    return sum(map(is_close, compared)) / len(compared) if compared else None


def choices(rows: Iterable[Row], result: dict[str, Any], what: str = PATH) -> list[str]:
    """Add the comparison of chosen and best paths, or algorithms, to a result; return lines about it."""
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


class Column(NamedTuple):
    """A column of a table.

    Attributes
    ----------
    head : str
    width : int
        Negative for numbers, which are aligned to the right.
    of : str or callable
        Attribute of the row, or a function of it; None leaves the cell empty.
    form : str
        Format of the value, as in `format`; ``"%"`` multiplies by 100 and leaves one digit.
    """

    head: str
    width: int
    of: str | Callable[[Row], Any]
    form: str = ""

    def text(self, row: Row) -> str:
        """Return the cell of a row."""
        value = self.of(row) if callable(self.of) else getattr(row, self.of, None)
        if value is None:
            return ""
        return f"{100 * value:.1f}" if self.form == "%" else format(value, self.form)

    def padded(self, text: str) -> str:
        """Return a text as wide as the column."""
        return text.rjust(-self.width) if self.width < 0 else text.ljust(self.width)


def time_text(us: float) -> str:
    """Return microseconds with two digits, or none if they are many."""
    return f"{us:.2f}" if us < 1e4 else f"{us:.0f}"


CASE = Column("case", 30, "case")
METHOD = Column("method", 34, "name")
MODE = Column("mode", 6, "mode")
TAKEN = Column("path", 18, "path")
US = Column("us", -10, lambda row: time_text(row.us or 0.0))


class Table:
    """A table that grows row by row.

    Parameters
    ----------
    columns : sequence of Column
        A row without a time has the columns before the first time, and its error.
    first_time : str
        Head of the first column with a time.

    Examples
    --------
    >>> table = Table((Column("case", 6, "case"), METHOD._replace(width=8), US))
    >>> print(table.header(), table.line(Row("8^3", BASELINE, "by hand", us=4.0), 2.0), sep="\\n")
    case   method           us  halox over it
    8^3    by hand        4.00  0.50 x
    """

    def __init__(
        self, columns: Sequence[Column], first_time: str = "us", *, compares: bool = True
    ) -> None:
        self._columns = tuple(columns)
        self._known = [column.head for column in columns].index(first_time)
        self._compares = compares

    def header(self) -> str:
        """Return the names of the columns."""
        shown = " ".join(column.padded(column.head) for column in self._columns)
        return f"{shown}  halox over it" if self._compares else shown.rstrip()

    def line(self, row: Row, selected_us: float | None = None) -> str:
        """Return a row's line; its last cell compares it with the time of halox's own choice."""
        columns = self._columns if row.us is not None else self._columns[: self._known]
        shown = " ".join(column.padded(column.text(row)) for column in columns)
        if row.us is None:
            error = (row.error or "-").splitlines()[0]
            return f"{shown.rstrip()}  {'FAILED: ' if row.failed else ''}{error}"
        if not self._compares or selected_us is None or row.kind == SELECTED:
            return shown.rstrip()
        return f"{shown}  {selected_us / row.us:.2f} x"
