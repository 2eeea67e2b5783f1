"""Rows of all benchmarks, a method on a case each, and their table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

SELECTED, BASELINE = "selected", "baseline"
STREAM, GRAPH = "stream", "graph"

CLOSE = 1.10
"""A path counts as well chosen up to this multiple of the best path's time."""


@dataclass(frozen=True)
class Row:
    """One method on one case. Entries of ``details`` are attributes too: ``row.nbytes``."""

    case: str
    kind: str  # halox's own choice, code without halox, or "named": a path or packer by its name
    name: str
    mode: str = STREAM  # calls back to back, or the same in a replayed CUDA graph
    us: float | None = None  # median on the slowest rank, of methods with a right result
    path: str = ""  # paths and protocols, algorithm or packer
    error: str = ""  # the reason for a missing time, a failure or a limitation
    failed: bool = False
    details: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        details: dict[str, Any] = self.__dict__.get("details", {})
        if name not in details:
            raise AttributeError(f"row of {self.__dict__.get('case')!r} has no {name!r}")
        return details[name]

    def with_(self, **found: Any) -> Self:
        """Return the row with other attributes; unknown names become details."""
        own = {one.name for one in fields(self)} & {*found}
        others = {name: value for name, value in found.items() if name not in own}
        return replace(self, **{name: found[name] for name in own}, details=self.details | others)

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = asdict(self)
        details: dict[str, Any] = found.pop("details")
        return found | details


def find(rows: Iterable[Row], name: str, mode: str = STREAM, case: str = "") -> Row | None:
    """Return the row of a method in a mode, None without a time; of a case, by default of any."""
    return next(
        (
            row
            for row in rows
            if (row.name, row.mode) == (name, mode) and row.us and case in ("", row.case)
        ),
        None,
    )


def right(rows: list[Row]) -> list[Row]:
    """Return the rows; raise `RuntimeError` if a method failed, with the error of each that did."""
    wrong = [row for row in rows if row.failed]
    if wrong:
        raise RuntimeError("; ".join(f"{row.name}: {row.error}" for row in wrong))
    return rows


def choices(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Compare halox's own choice with the fastest named path, for each case and mode with both.

    ``ratio`` is the time of the choice over the time of the fastest path, and ``close`` whether that is chance, because
    both took the same path, or at most `CLOSE`.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.us and row.kind != BASELINE:
            groups.setdefault((row.case, row.mode), []).append(row)
    found = []
    for (case, mode), group in groups.items():
        named = [row for row in group if row.kind != SELECTED]
        chosen = next((row for row in group if row.kind == SELECTED), None)
        if named and chosen is not None:
            best = min(named, key=lambda row: row.us or 0.0)
            ratio = (chosen.us or 0.0) / (best.us or 1.0)
            close = chosen.path == best.path or ratio <= CLOSE
            what = {"case": case, "mode": mode, "chosen": chosen.path, "best": best.name}
            found.append({**what, "ratio": ratio, "close": close})
    return found


class Column(NamedTuple):
    """A column of a kind's own: its head, a detail of the rows, the factor for it, and the number's format."""

    head: str
    detail: str
    form: str = ",.0f"
    factor: float = 1.0

    def text(self, row: Row) -> str:
        value = row.details.get(self.detail)
        if value is None or isinstance(value, str):
            return value or ""
        return format(value * self.factor, self.form)


HEADS, WIDTHS = ("case", "method", "path", "mode"), (34, 32, 22, 6)


def header(columns: Sequence[Column]) -> str:
    heads = (text.ljust(width) for text, width in zip(HEADS, WIDTHS, strict=True))
    own = (column.head.rjust(11) for column in columns)
    return " ".join([*heads, *own, "us".rjust(10)]) + "  halox over it"


def line(row: Row, columns: Sequence[Column], selected: Row | None) -> str:
    """Return a row's line; its last cell is the time of halox's own choice over the row's."""
    words = (row.case, row.name, row.path, row.mode)
    cells = [text.ljust(width) for text, width in zip(words, WIDTHS, strict=True)]
    if row.us is None:
        first = (row.error or "-").splitlines()[0]
        return f"{' '.join(cells).rstrip()}  {'FAILED: ' if row.failed else ''}{first}"
    cells += [column.text(row).rjust(11) for column in columns]
    cells.append(f"{row.us:.2f}".rjust(10) if row.us < 1e4 else f"{row.us:.0f}".rjust(10))
    if selected is None or selected.us is None or row.kind == SELECTED:
        return " ".join(cells)
    return f"{' '.join(cells)}  {selected.us / row.us:.2f} x"
