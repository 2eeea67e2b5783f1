"""The HTML by which objects show themselves in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def html_table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as HTML; all text is escaped, and columns of numbers stand to the right.

    Parameters
    ----------
    title : str
    head : sequence of str
        Names of the columns; empty for a table of names and values.
    rows : iterable of sequences
        The cells, as they are to be printed.

    Examples
    --------
    >>> html_table("<u>", (), [("a & b", 1)]).count("&lt;u&gt;")
    1
    """

    def line(cells: Sequence[object], tag: str) -> str:
        shown = "".join(
            f'<{tag} style="text-align: {_side(cell)}">{escape(str(cell))}</{tag}>'
            for cell in cells
        )
        return f"<tr>{shown}</tr>"

    top = f"<thead>{line(head, 'th')}</thead>" if head else ""
    body = "".join(line(row, "td") for row in rows)
    return (
        f'<table><caption style="text-align: left">{escape(title)}</caption>'
        f"{top}<tbody>{body}</tbody></table>"
    )


def html_facts(title: str, facts: Mapping[str, object]) -> str:
    """Return names and values as an HTML table; those that are None are left out."""
    shown = {name: value for name, value in facts.items() if value is not None}
    return html_table(title, (), [(name, str(value)) for name, value in shown.items()])


def _side(cell: object) -> str:
    return "right" if str(cell).replace(",", "").replace(".", "").isdecimal() else "left"
