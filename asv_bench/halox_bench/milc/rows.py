"""Rows of the MILC benchmark's tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from halox_bench.common.tables import Table
from halox_bench.milc.cases import STRONG, WEAK
from halox_bench.ranks import rows
from halox_bench.ranks.rows import SELECTED, MethodRow


@dataclass(frozen=True)
class MilcRow(MethodRow):
    """One case on some ranks; ``us`` is the time of an iteration of the conjugate gradient.

    Attributes
    ----------
    lattice : tuple of int
        Sites along x, y, z and t.
    operator, precision, ranks, scaling
        The same as in `MilcCase`.
    process_grid : tuple of int
        Ranks along t, z, y and x.
    stream_us : float or None
        Time of an iteration launched step by step, where ``us`` is that of a graph.
    dslash_us, exchange_us : float or None
        Time of D alone, and of both exchanges of an iteration.
    copy_bytes_per_us : float or None
        Bytes read and written in a microsecond by a large copy of this memory, at the same time on all ranks.
    dslash_gflops, cg_gflops, share, over_floor, exchange_share, efficiency : float or None
        Rates of all ranks together by MILC's counts; D's bytes at the speed of the copy over its time; the time of an
        iteration over that of its kernels' bytes likewise; both exchanges over the iteration; and in tables of several
        ranks, the rate of a rank over that of one rank alone.
    """

    lattice: tuple[int, ...]
    operator: str
    precision: str
    ranks: int
    scaling: str = ""
    process_grid: tuple[int, ...] = ()
    stream_us: float | None = None
    dslash_us: float | None = None
    exchange_us: float | None = None
    copy_bytes_per_us: float | None = None
    dslash_gflops: float | None = None
    cg_gflops: float | None = None
    share: float | None = None
    over_floor: float | None = None
    exchange_share: float | None = None
    efficiency: float | None = None


def with_efficiency(found: Iterable[MilcRow], row: MilcRow) -> MilcRow:
    """Return a row with its efficiency beside the row of one rank among those found.

    Examples
    --------
    >>> one = MilcRow((8, 8, 8, 8), "naive", "double", 1, "strong", case="", kind="selected", name="", us=8.0)
    >>> [with_efficiency([one], replace(one, ranks=4, scaling=kind, us=4.0)).efficiency for kind in ("strong", "weak")]
    [0.5, 2.0]
    """
    alone = [
        one
        for one in found
        if one.us
        and one.kind == SELECTED
        and one.ranks == 1
        and (one.operator, one.precision) == (row.operator, row.precision)
    ]
    if not alone or row.us is None or row.kind != SELECTED:
        return row
    parts = {STRONG: row.ranks, WEAK: 1}.get(row.scaling, 1)
    return replace(row, efficiency=(alone[-1].us or 0.0) / (parts * row.us))


_TABLE = Table(
    {
        **{"case": 30, "ranks": -5, "table": 6, "method": 28, "mode": 6, "CG us": -10, "GF/s": -8},
        **{"/floor": -6, "exch %": -6, "D us": -9, "D GF/s": -8, "share": -6, "effic.": -6},
    }
)


def header() -> str:
    """Return the table's head."""
    return rows.header(_TABLE)


def line(row: MilcRow, selected_us: float | None) -> str:
    """Return a row's line."""
    cells = [row.case, str(row.ranks), row.scaling, row.name, row.mode]
    exchange = None if row.exchange_share is None else 100 * row.exchange_share
    numbers = [
        (row.cg_gflops, 1),
        (row.over_floor, 3),
        (exchange, 1),
        (row.dslash_us, 1),
        (row.dslash_gflops, 1),
        (row.share, 3),
        (row.efficiency, 2),
    ]
    after = ["" if value is None else f"{value:.{digits}f}" for value, digits in numbers]
    return rows.line(_TABLE, row, selected_us, cells, after)
