"""Tables as plain text for reports, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape


def text_table(rows: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Return the lines of a table, each cell padded to its column; columns in ``left`` are left-aligned.

    Examples
    --------
    >>> text_table([("case", "us"), ("a", "12.5")], {0})
    ['case    us', 'a     12.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return [line(row) for row in rows]


class Text(str):
    """Text of several lines, which a prompt and a notebook show as lines."""

    def __repr__(self) -> str:
        """Return the text itself."""
        return str(self)


def html_table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as HTML, without a header row if ``head`` is empty; text is escaped, numbers are right-aligned.

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
    """Return names and values as an HTML table; entries with the value None are omitted."""
    shown = {name: value for name, value in facts.items() if value is not None}
    return html_table(title, (), [(name, str(value)) for name, value in shown.items()])


def _side(cell: object) -> str:
    return "right" if str(cell).replace(",", "").replace(".", "").isdecimal() else "left"
