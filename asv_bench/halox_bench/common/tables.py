"""Tables that grow row by row: columns of fixed width, numbers to the right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Table:
    """Columns by name.

    Parameters
    ----------
    columns : mapping of str to int
        Width of each; negative for numbers, which stand to the right.

    Examples
    --------
    >>> table = Table({"case": 6, "us": -5})
    >>> print(table.header(), table.line(["8^3", "4.00"]), sep="\\n")
    case      us
    8^3     4.00
    """

    def __init__(self, columns: Mapping[str, int]) -> None:
        self._columns = dict(columns)
        self.width = sum(map(abs, columns.values())) + len(columns) - 1

    def header(self) -> str:
        """Return the names of the columns."""
        return self.line(self._columns)

    def line(self, cells: Iterable[str], error: str = "", *, failed: bool = False) -> str:
        """Return a row; fewer cells than columns leave the last ones empty.

        An error stands, by its first line, behind the cells that there are.
        """
        padded = [
            cell.rjust(-width) if width < 0 else cell.ljust(width)
            for cell, width in zip(cells, self._columns.values(), strict=False)
        ]
        shown = " ".join(padded).rstrip()
        if not error:
            return shown
        return f"{shown}  {'FAILED: ' if failed else ''}{error.splitlines()[0]}"
