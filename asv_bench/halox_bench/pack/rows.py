"""Rows of packing: methods that were measured side by side, with their ratios."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from halox_bench.common.rows import BASELINE, Row
from halox_bench.common.timing import Timed
from halox_bench.pack.patterns import Case

COPY = "copy"
"""Name of the baseline that copies as many contiguous bytes."""

PACKER = "packer"
"""Kind of halox's methods."""

Measured = tuple[str, str, Timed | str, bool]
"""Name, kind, the times or the error, and whether that is a failure."""


def rows_of(
    case: Case, alike: dict[str, Any], found: Iterable[Measured], bound_us: float | None
) -> list[Row]:
    """Return the rows of methods that were measured side by side.

    Their details are the fields of `Timed`, and ``gb_per_s`` (1e9 bytes of payload a second), ``of_copy`` (time of a
    copy of the same bytes to the same place, over this time), ``of_bound`` (least time over this time) and ``speedup``
    (time of the fastest baseline, the copy aside, over this time).

    Parameters
    ----------
    alike : dict
        Details of all rows: ``direction``, ``destination``, ``cache``, ``sector_bytes``.
    bound_us : float or None
        Least time for the sectors and the payload at the measured speeds.
    """
    found = list(found)
    times = {(name, kind): t.us for name, kind, t, _ in found if isinstance(t, Timed)}
    copy_us = times.get((COPY, BASELINE))
    best = min((us for (m, k), us in times.items() if k == BASELINE and m != COPY), default=None)
    rows = []
    for name, kind, result, failed in found:
        row = Row(case.name, kind, name, failed=failed, details={**case.details, **alike})
        if isinstance(result, str):
            rows.append(row.with_(error=result))
            continue
        us = result.us
        rows.append(
            row.with_(
                **vars(result),
                checked=True,
                gb_per_s=case.payload / us / 1e3,
                of_copy=copy_us / us if copy_us else None,
                of_bound=bound_us / us if bound_us else None,
                speedup=best / us if best else None,
            )
        )
    return rows
