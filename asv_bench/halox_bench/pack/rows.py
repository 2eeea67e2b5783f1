"""Rows of ``halox bench pack``: one method on one case, and its line in the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from halox_bench.common.tables import Table
from halox_bench.common.timing import Timed
from halox_bench.pack.patterns import Case


@dataclass(frozen=True)
class Row:
    """One method on one case.

    Attributes
    ----------
    pattern, size : str
        The case.
    payload_bytes, block_bytes : int
        Bytes packed; length of the runs if they are alike, else 0.
    sector_bytes : int
        Bytes of the 32-byte sectors that the array's side touches.
    direction : str
        ``"pack"`` or ``"unpack"``.
    destination : str
        Where the packed bytes are: ``"device"``, ``"host"`` (mapped and pinned), ``"peer"``,
        ``"memory"`` for NumPy arrays.
    cache : str
        ``"warm"``: the same memory each time; ``"cold"``: in turns over several copies of it, more
        than the L2 holds; ``"large"``: a single one is more than it holds.
    method, kind : str
        Name; ``"packer"`` or ``"baseline"``.
    us, graph_us, host_us : float or None
        As in `Timed`.
    gb_per_s : float or None
        Payload, 1e9 bytes a second.
    of_copy : float or None
        Time of a copy of the same bytes to the same place, over this time.
    of_bound : float or None
        Least time for the sectors and the payload at the measured speed, over this time.
    speedup : float or None
        Time of the fastest baseline (the plain copy aside), over this time.
    note, error : str
        Remarks; why there is no figure.
    failed : bool
        Whether the error is one that should not be.
    """

    pattern: str
    size: str
    payload_bytes: int
    block_bytes: int
    sector_bytes: int
    direction: str
    destination: str
    cache: str
    method: str
    kind: str
    us: float | None = None
    graph_us: float | None = None
    host_us: float | None = None
    gb_per_s: float | None = None
    of_copy: float | None = None
    of_bound: float | None = None
    speedup: float | None = None
    note: str = ""
    error: str = ""
    failed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


COPY = "copy"
"""Name of the baseline that moves the same bytes from one contiguous place to another."""

TABLE = Table(
    {
        **{"pattern": 16, "size": 14, "payload": 11, "dir": 6, "to": 6, "cache": 5, "method": 22},
        **{"us": -9, "graph us": -9, "host us": -8, "GB/s": -8},
        **{"% copy": -7, "% bound": -7, "x best": -7},
    }
)


def common(
    case: Case, sector_bytes: int, direction: str, destination: str, cache: str
) -> dict[str, Any]:
    """Return the fields of `Row` that all methods side by side have alike."""
    return {
        "pattern": case.pattern,
        "size": case.size,
        "payload_bytes": case.payload,
        "block_bytes": case.block_bytes,
        "sector_bytes": sector_bytes,
        "direction": direction,
        "destination": destination,
        "cache": cache,
    }


def rows_of(
    alike: dict[str, Any],
    measured: Iterable[tuple[str, str, Timed | str, bool]],
    bound_us: float | None,
) -> list[Row]:
    """Make the rows of methods that were measured side by side.

    Parameters
    ----------
    alike : dict
        The result of `common`.
    measured : iterable of (method, kind, result, failed)
        A text instead of a result is the error.
    bound_us : float or None
        Least time.
    """
    found = list(measured)
    times = {(m, k): t.us for m, k, t, _ in found if isinstance(t, Timed)}
    copy_us = times.get((COPY, "baseline"))
    best = min((us for (m, k), us in times.items() if k == "baseline" and m != COPY), default=None)
    rows = []
    for method, kind, result, failed in found:
        row = Row(**alike, method=method, kind=kind, failed=failed)
        if isinstance(result, str):
            rows.append(replace(row, error=result))
            continue
        us = result.us
        rows.append(
            replace(
                row,
                **vars(result),
                gb_per_s=alike["payload_bytes"] / us / 1e3,
                of_copy=copy_us / us if copy_us else None,
                of_bound=bound_us / us if bound_us else None,
                speedup=best / us if best else None,
            )
        )
    return rows


def line(row: Row) -> str:
    """Return a row's line.

    Examples
    --------
    >>> row = Row("vector", "8B", 1024, 8, 2048, "pack", "host", "warm", "strided", "packer",
    ...           us=12.345, gb_per_s=0.0829, of_copy=0.5)
    >>> line(row).split()
    ['vector', '8B', '1,024', 'pack', 'host', 'warm', 'strided', '12.35', '-', '-', '0.0829', '50.0', '-', '-']
    """
    cells = [row.pattern, row.size, f"{row.payload_bytes:,}", row.direction, row.destination]
    cells += [row.cache, row.method]
    if row.error:
        return TABLE.line(cells, row.error, failed=row.failed)
    cells += map(_number, (row.us, row.graph_us, row.host_us, row.gb_per_s))
    cells += [_percent(row.of_copy), _percent(row.of_bound), _number(row.speedup)]
    return TABLE.line(cells) + (f"  ({row.note})" if row.note else "")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if 1 <= value < 10_000 else f"{value:.4g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
