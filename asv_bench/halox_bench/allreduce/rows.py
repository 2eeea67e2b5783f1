"""Rows of the allreduce benchmark's table, and how many calls pay for making an allreduce."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from halox_bench.common.tables import Table
from halox_bench.ranks import rows
from halox_bench.ranks.rows import BASELINE, MethodRow

ALGORITHM = "algorithm"

VALUE = "value"
"""Mode: a single value, each call waited for until the host has read the result."""


@dataclass(frozen=True)
class AllreduceRow(MethodRow):
    """One method on one case's allreduce; in JSON its ``path`` is called ``algorithm``.

    Attributes
    ----------
    elements, nbytes : int
        Of each rank's array.
    first_setup_us, setup_us : float or None
        Making the allreduce, with its first call, on the slowest rank: the first time in this run, with what is
        compiled and mapped only once, and the second time; halox only.
    pays_after : dict
        For each baseline the number of calls after which the second of these is made up for, None where never.
    """

    elements: int
    nbytes: int
    dtype: str
    op: str
    first_setup_us: float | None = None
    setup_us: float | None = None
    pays_after: dict[str, int | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = super().as_dict()
        return {ALGORITHM if key == "path" else key: value for key, value in found.items()}


def calls_to_pay(setup_us: float, us: float, baseline_us: float) -> int | None:
    """Return how many calls make up for a set-up, None if a call is not faster than the baseline's.

    Examples
    --------
    >>> calls_to_pay(100.0, 5.0, 10.0), calls_to_pay(1.0, 5.0, 100.0), calls_to_pay(100.0, 5.0, 5.0)
    (20, 1, None)
    """
    if us >= baseline_us:
        return None
    return max(1, math.ceil(setup_us / (baseline_us - us)))


def paid(found: Iterable[AllreduceRow]) -> list[AllreduceRow]:
    """Put the numbers of calls that pay for the set-up into the rows that have one, after figure 3 of Faraji 2014."""
    return [
        row
        if row.setup_us is None or row.us is None
        else replace(
            row,
            pays_after={
                name: calls_to_pay(row.setup_us, row.us, us) for name, us in row.beside.items()
            },
        )
        for row in found
    ]


_TABLE = Table(
    {
        **{"case": 20, "bytes": -11, "method": 26, "algorithm": 26, "mode": 6, "us": -10},
        **{"set-up us": -10, "pays after": 10},
    }
)


def header() -> str:
    """Return the table's head."""
    return rows.header(_TABLE)


def line(row: AllreduceRow, selected_us: float | None, against: str = "") -> str:
    """Return a row's line.

    Parameters
    ----------
    selected_us : float or None
        Time of what halox selects, in the same mode.
    against : str
        The baseline that the set-up is held against.

    Examples
    --------
    >>> row = AllreduceRow(1, 8, "f8", "sum", setup_us=90.0, pays_after={"by hand": 15}, case="8B f8 sum",
    ...     kind="algorithm", name="oneshot", path="oneshot", us=4.0)
    >>> line(row, 4.0, "by hand").split()
    ['8B', 'f8', 'sum', '8', 'oneshot', 'oneshot', 'stream', '4.00', '90', '15', 'calls', '1.00', 'x']
    """
    cells = [row.case, f"{row.nbytes:,}", row.name, row.path, row.mode]
    after = ["", ""]
    if row.kind != BASELINE and row.setup_us is not None:
        calls = row.pays_after.get(against)
        after = [f"{row.setup_us:.0f}", "never" if calls is None else f"{calls} calls"]
    return rows.line(_TABLE, row, selected_us, cells, after)
