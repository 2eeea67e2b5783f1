"""Rows of the ping-pong's table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halox_bench.common.tables import Table
from halox_bench.ranks import rows
from halox_bench.ranks.rows import MethodRow


@dataclass(frozen=True)
class PingPongRow(MethodRow):
    """One method to send one case there and back; ``us`` is half a round trip, in JSON ``half_us``.

    Attributes
    ----------
    n, nbytes : int
        Order of the matrix, and payload of one message.
    place : str
        Memory of the two arrays.
    held : float
        Share of the GPU held by other work.
    gb_per_s : float or None
        Payload over half a round trip, 1e9 bytes a second.
    """

    pattern: str
    n: int
    nbytes: int
    place: str
    held: float = 0.0
    gb_per_s: float | None = None

    @property
    def label(self) -> str:
        """Name of the method, with the share of the GPU that is held."""
        return f"{self.name}, {self.held:.0%} held" if self.held else self.name

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = super().as_dict()
        return {"half_us" if key == "us" else key: value for key, value in found.items()}


_TABLE = Table(
    {
        **{"where": 6, "pattern": 18, "N": -6, "bytes": -13, "method": 34, "path": 14},
        **{"mode": 6, "us": -10, "GB/s": -8},
    }
)


def header() -> str:
    """Return the table's head."""
    return _TABLE.header()


def line(row: PingPongRow, selected_us: float | None = None) -> str:
    """Return a row's line."""
    cells = [row.place, row.pattern, str(row.n), f"{row.nbytes:,}", row.label, row.path, row.mode]
    return rows.line(_TABLE, row, None, cells, [f"{row.gb_per_s or 0:.2f}"])
