"""Rows of the table of DDTBench."""

from __future__ import annotations

from dataclasses import dataclass

from halox_bench.common.tables import Table
from halox_bench.pingpong.rows import TripRow
from halox_bench.ranks import rows

PHASES = ("pack", "communicate", "unpack")


@dataclass(frozen=True)
class DdtRow(TripRow):
    """One method on one case.

    Attributes
    ----------
    size : str
    block_bytes : int
        Mean contiguous run of what is sent.
    pack_us, communicate_us, unpack_us : float or None
        DDTBench's phases, each measured by itself: packing, half a round trip of packed bytes, unpacking; the slower
        rank's. None where MPI or halox does all at once.
    """

    size: str
    block_bytes: int
    pack_us: float | None = None
    communicate_us: float | None = None
    unpack_us: float | None = None


_TABLE = Table(
    {
        **{"where": 6, "pattern": 14, "size": 12, "bytes": -11, "method": 34, "path": 14},
        **{"mode": 6, "us": -10, "GB/s": -7, "pack": -9, "comm": -9, "unpack": -9},
    }
)


def header() -> str:
    """Return the table's head."""
    return rows.header(_TABLE)


def line(row: DdtRow, selected_us: float | None) -> str:
    """Return a row's line, given the time of what halox selects."""
    cells = [row.place, row.pattern, row.size, f"{row.nbytes:,}", row.name, row.path, row.mode]
    phases = [row.pack_us, row.communicate_us, row.unpack_us]
    shown = ["" if us is None else f"{us:.2f}" for us in phases]
    return rows.line(_TABLE, row, selected_us, cells, [row.speed, *shown])
