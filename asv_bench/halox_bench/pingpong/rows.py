"""Rows of the ping-pong's table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from halox_bench.common.tables import Table
from halox_bench.ranks import rows
from halox_bench.ranks.rows import MethodRow


@dataclass(frozen=True)
class TripRow(MethodRow):
    """One method to send one case there and back; ``us`` is half a round trip, in JSON ``half_us``.

    Attributes
    ----------
    pattern : str
    nbytes : int
        Payload of one message, or of one direction.
    place : str
        Memory of the arrays.
    held : float
        Share of the GPU held by other work.
    gb_per_s : float or None
        Payload over half a round trip, 1e9 bytes a second.
    """

    pattern: str
    nbytes: int
    place: str
    held: float = field(default=0.0, kw_only=True)
    gb_per_s: float | None = field(default=None, kw_only=True)

    @property
    def label(self) -> str:
        """Name of the method, with the share of the GPU that is held."""
        return f"{self.name}, {self.held:.0%} held" if self.held else self.name

    @property
    def speed(self) -> str:
        """Speed, for the table."""
        return f"{self.gb_per_s or 0:.2f}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = super().as_dict()
        return {"half_us" if key == "us" else key: value for key, value in found.items()}


@dataclass(frozen=True)
class PingPongRow(TripRow):
    """One method on one case of matrices of order ``n``."""

    n: int


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
    return rows.line(_TABLE, row, None, cells, [row.speed])
