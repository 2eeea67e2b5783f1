"""Rows of the halo benchmark's table."""

from __future__ import annotations

from dataclasses import dataclass

from halox_bench.common.tables import Table
from halox_bench.ranks import rows
from halox_bench.ranks.rows import MethodRow


@dataclass(frozen=True)
class ExchangeRow(MethodRow):
    """One method on one case's exchange.

    Attributes
    ----------
    shape, components : tuple of int
        Cells a rank owns; extents of axes behind them.
    proc_shape : tuple of int
        Ranks along each axis.
    faces, halo, dtype, fields
        The same as in `ExchangeCase`.
    bytes_each_way : int
        Bytes a rank sends to other ranks in one exchange, and receives from them.
    """

    shape: tuple[int, ...]
    components: tuple[int, ...]
    proc_shape: tuple[int, ...]
    faces: str
    halo: int
    dtype: str
    fields: int
    bytes_each_way: int


_TABLE = Table({"case": 30, "bytes": -12, "method": 34, "path": 18, "mode": 6, "us": -10})


def header() -> str:
    """Return the table's head."""
    return rows.header(_TABLE)


def line(row: ExchangeRow, selected_us: float | None) -> str:
    """Return a row's line, given the time of what halox selects in the same mode.

    Examples
    --------
    >>> row = ExchangeRow((8, 8, 8), (), (1, 1, 2), "x", 1, "f8", 1, 1024, case="8^3 f8 x", kind="baseline",
    ...     name="by hand", us=4.0)
    >>> line(row, 2.0).split()
    ['8^3', 'f8', 'x', '1,024', 'by', 'hand', 'stream', '4.00', '0.50', 'x']
    """
    cells = [row.case, f"{row.bytes_each_way:,}", row.name, row.path, row.mode]
    return rows.line(_TABLE, row, selected_us, cells)
