"""Figures of an app or a subcommand, by name, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from halox.tables import text_table


def as_json(figures: Mapping[str, object]) -> str:
    """Return the figures as indented JSON."""
    return json.dumps(figures, indent=2, default=str)


def as_text(figures: Mapping[str, Any]) -> str:
    """Return the figures as lines ``name: value``, with ``rows`` (a list of mappings) as a table.

    Names keep their order; an underscore in a name is printed as a space.

    Examples
    --------
    >>> rows = [{"case": "a", "time_s": 0.25}, {"case": "b", "time_s": 12.0}]
    >>> print(as_text({"ranks": 2, "rows": rows}))
    ranks: 2
    <BLANKLINE>
    case  time s
    a       0.25
    b         12
    """
    lines: list[str] = []
    for name, value in figures.items():
        if name == "rows":
            lines += ["", *table(value), ""]
        elif isinstance(value, Mapping):
            lines.append(f"{_words(name)}:")
            lines += [f"  {_words(key)}: {format_value(item)}" for key, item in value.items()]
        elif isinstance(value, (list, tuple)) and any(
            "\n" in str(v) or len(str(v)) > 30 for v in value
        ):
            lines.append(f"{_words(name)}:")
            lines += [f"  {format_value(item)}" for item in value]
        else:
            lines.append(f"{_words(name)}: {format_value(value)}")
    return "\n".join(lines).rstrip()


def table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the lines of a table, with a header from the first row's names; numbers are right-aligned."""
    if not rows:
        return []
    names = list(rows[0])
    cells = [[_words(name) for name in names]]
    cells += [[format_value(row.get(name)) for name in names] for row in rows]
    is_text = [not all(_is_number(row.get(name)) for row in rows) for name in names]
    return text_table(cells, {i for i, text in enumerate(is_text) if text})


def format_value(value: object) -> str:
    """Return a value as text: four significant digits, yes / NO, lists with commas."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 100_000 else str(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(key)} {format_value(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(format_value, value)) or "none"
    return str(value)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _words(name: object) -> str:
    return str(name).replace("_", " ")
