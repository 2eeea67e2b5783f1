"""Tables as plain text for reports."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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
