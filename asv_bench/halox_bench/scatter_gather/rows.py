"""Rows of the table of transfers without packing."""

from __future__ import annotations

from dataclasses import dataclass

from halox_bench.common.tables import Table
from halox_bench.pingpong.rows import TripRow
from halox_bench.ranks import rows


@dataclass(frozen=True)
class ScatterGatherRow(TripRow):
    """One method on one case.

    Attributes
    ----------
    size : str
    blocks, block_bytes : int
        Blocks of a message on rank 0, and bytes of each.
    adapter_keys : int
        Keys that a network adapter of the ``mlx5_umr`` engine would take at each end.
    keys : int or None
        Keys of one end of a message, of halox's ``scatter_gather`` path.
    map_us : float or None
        Time in which the slower rank maps them anew; on GPUs with the preparation of the copies.
    """

    size: str
    blocks: int
    block_bytes: int
    adapter_keys: int
    keys: int | None = None
    map_us: float | None = None


_TABLE = Table(
    {
        **{"where": 6, "pattern": 12, "size": 12, "blocks": -6, "of bytes": -8, "adapter": -7},
        **{"method": 34, "path": 26, "keys": -5, "mode": 6, "us": -10, "GB/s": -7, "map us": -8},
    }
)


def header() -> str:
    """Return the table's head."""
    return rows.header(_TABLE)


def line(row: ScatterGatherRow, selected_us: float | None) -> str:
    """Return a row's line, given the time of what halox selects."""
    numbers = [f"{n:,}" for n in (row.blocks, row.block_bytes, row.adapter_keys)]
    cells = [row.place, row.pattern, row.size, *numbers, row.label, row.path]
    cells += ["" if row.keys is None else str(row.keys), row.mode]
    after = [row.speed, "" if row.map_us is None else f"{row.map_us:.1f}"]
    return rows.line(_TABLE, row, selected_us, cells, after)
