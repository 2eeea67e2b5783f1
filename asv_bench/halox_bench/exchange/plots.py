"""Figures of the halo benchmark: time over bytes for each kind of faces, and the choice of paths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halox_bench.common.plots import Line, figure, grouped, lines, make
from halox_bench.exchange.rows import ExchangeRow
from halox_bench.ranks.rows import chosen_over_best


def draw(rows: Sequence[ExchangeRow], folder: Path) -> list[Path]:
    """Draw every figure for which there are rows; returns and errors the same as for `figure`."""
    make(folder)
    drawn: list[Path] = []
    timed = [row for row in rows if row.us is not None]
    groups = grouped(
        timed, lambda r: (len(r.shape), r.faces, r.dtype, r.components, r.halo, r.fields)
    )
    for (ndim, faces, dtype, components, halo, fields), group in groups.items():
        # One rank sends nothing: there is no size to draw over.
        if len({row.shape for row in group}) < 2 or not group[0].bytes_each_way:
            continue
        what = f"{ndim}d-{faces}-{dtype}{''.join(f'-{n}' for n in components)}-halo{halo}-fields{fields}"
        drawn += figure(
            folder / f"exchange-{what}.png",
            lines(group, lambda r: f"{r.name}, {r.mode}", lambda r: (r.bytes_each_way, r.us)),
            f"Halo exchange, {what.replace('-', ' ')}",
            ("bytes a rank sends", "us"),
        )
    ratios = sorted(one["ratio"] for one in chosen_over_best(timed))
    shares = [(i + 1) / len(ratios) for i in range(len(ratios))]
    choice: Line = ("cases, by how well their path was chosen", shares, ratios)
    return drawn + figure(
        folder / "chosen-over-best.png",
        [choice] if ratios else [],
        "Chosen path over best path",
        ("share of cases", "time of the chosen path / time of the best"),
        level=1.0,
    )
