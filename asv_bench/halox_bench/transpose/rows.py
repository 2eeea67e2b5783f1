"""Rows of the transpose benchmark's table."""

from __future__ import annotations

from dataclasses import dataclass

from halox_bench.common.tables import Table
from halox_bench.ranks import rows
from halox_bench.ranks.rows import MethodRow
from halox_bench.transpose.baselines import COPY


@dataclass(frozen=True)
class TransposeRow(MethodRow):
    """One method on one case's transpose.

    Attributes
    ----------
    shape, axes, dtype, components, division, direction, method
        The same as in `TransposeCase`.
    proc_shapes : tuple of tuple of int
        Ranks along each axis of the first and the second grid.
    nbytes : int
        Bytes of one rank's block of the source, the largest.
    bytes_sent : int
        Bytes that a rank sends to other ranks, the most.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str
    components: tuple[int, ...]
    division: str
    direction: str
    method: str
    proc_shapes: tuple[tuple[int, ...], tuple[int, ...]]
    nbytes: int
    bytes_sent: int

    @property
    def of_copy(self) -> float | None:
        """Speed as a share of that of a plain copy of the same bytes, in the same run."""
        copy = self.beside.get(COPY)
        return None if copy is None or self.us is None else copy / self.us


_TABLE = Table(
    {
        **{"case": 46, "bytes sent": -13, "method": 28, "path": 18, "mode": 6, "us": -10},
        **{"% copy": -7},
    }
)


def header() -> str:
    """Return the table's head."""
    return rows.header(_TABLE)


def line(row: TransposeRow, selected_us: float | None) -> str:
    """Return a row's line, given the time of what halox does in the same mode.

    Examples
    --------
    >>> what = ((8, 4), (1, 0), "f4", (), "whole", "forward", "transpose", ((1, 1), (1, 1)))
    >>> row = TransposeRow(*what, 128, 0, case="8x4 f4 axes 10 forward", kind="baseline", name="by hand", us=4.0,
    ...     beside={COPY: 3.0})
    >>> line(row, 2.0).split()
    ['8x4', 'f4', 'axes', '10', 'forward', '0', 'by', 'hand', 'stream', '4.00', '75.0', '0.50', 'x']
    """
    cells = [row.case, f"{row.bytes_sent:,}", row.name, row.path, row.mode]
    share = "" if row.of_copy is None else f"{100 * row.of_copy:.1f}"
    return rows.line(_TABLE, row, selected_us, cells, [share])
