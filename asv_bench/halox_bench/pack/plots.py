"""The figures of ``halox bench pack``, after figures 4 to 8 of the papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from halox_bench.common.plots import COPY_LABEL, Line, figure, lines, make
from halox_bench.pack.baselines import MEMCPY_2D
from halox_bench.pack.rows import COPY, Row

_BLOCKS = (8, 128, 4096)
"""Blocks of the vectors that are told apart."""


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every figure for which there are rows; returns and errors the same as for `figure`."""
    make(folder)
    usable = [row for row in rows if row.us and row.direction == "pack"]
    drawn = (_bandwidth, _against_memcpy_2d, _destinations, _methods)
    return [path for one in drawn for path in one(usable, folder)]


def _bandwidth(rows: list[Row], folder: Path) -> list[Path]:
    """Bandwidth over payload, a line a pattern: Wu et al. figure 6, Jenkins et al. figure 4."""
    here = [row for row in rows if row.destination in ("device", "memory") and row.cache != "cold"]
    chosen = _of_default_method(here)
    copies = [row for row in here if row.method == COPY]
    shown = [row for row in chosen if row.pattern != "vector" or row.block_bytes in _BLOCKS]
    found = _lines(shown, _pattern_label, "payload_bytes", "gb_per_s")
    found += _lines(copies, lambda _: COPY_LABEL, "payload_bytes", "gb_per_s")
    return figure(
        folder / "bandwidth.png",
        found,
        "Packing, by payload",
        ("payload, bytes", "GB/s of payload"),
    )


def _pattern_label(row: Row) -> str:
    return f"vector, blocks of {row.block_bytes} B" if row.pattern == "vector" else row.pattern


def _against_memcpy_2d(rows: list[Row], folder: Path) -> list[Path]:
    """Time of cudaMemcpy2D over that of packing: Jenkins et al. figure 5, Wu et al. figure 8."""
    vectors = [row for row in rows if row.pattern == "vector" and row.cache != "cold"]
    theirs = {
        (row.size, row.destination): row.us for row in vectors if row.method == MEMCPY_2D and row.us
    }
    found = lines(
        [row for row in vectors if row.method == "auto" and (row.size, row.destination) in theirs],
        lambda row: f"{row.payload_bytes:,} bytes to {row.destination}",
        lambda row: (row.block_bytes, theirs[row.size, row.destination] / (row.us or 1.0)),
    )
    return figure(
        folder / "memcpy2d.png",
        found,
        "cudaMemcpy2D beside packing a vector",
        ("block, bytes", "time of cudaMemcpy2D / time of packing"),
        level=1.0,
    )


def _destinations(rows: list[Row], folder: Path) -> list[Path]:
    """Time over payload by destination: Wu et al. figure 7."""
    kept = ("vector", "lower_triangle", "contiguous")
    wanted = [row for row in rows if row.pattern in kept and row.cache != "cold"]
    wanted = [row for row in wanted if row.pattern != "vector" or row.block_bytes == 128]
    chosen = _of_default_method(wanted)
    if len({row.destination for row in chosen}) < 2:
        return []
    return figure(
        folder / "destinations.png",
        _lines(chosen, lambda row: f"{row.pattern} to {row.destination}", "payload_bytes", "us"),
        "Packing by destination, blocks of 128 bytes",
        ("payload, bytes", "us"),
    )


def _methods(rows: list[Row], folder: Path) -> list[Path]:
    """Share of the sectors' bound over the block length, a line a packer."""
    packers = [
        row
        for row in rows
        if (row.pattern, row.destination, row.cache) == ("vector", "device", "large")
        and row.kind == "packer"
        and row.method != "auto"
    ]
    return figure(
        folder / "methods.png",
        _lines(packers, lambda row: row.method, "block_bytes", "of_bound"),
        "Packing a vector larger than the L2 cache",
        ("block, bytes", "least time for the sectors / time"),
        level=1.0,
    )


def _of_default_method(rows: list[Row]) -> list[Row]:
    """Return the rows of the packer that users get: ``auto`` where it was measured, else the first."""
    packers = [row for row in rows if row.kind == "packer"]
    methods = {row.method: None for row in packers}
    method = "auto" if "auto" in methods else next(iter(methods), "")
    return [row for row in packers if row.method == method]


def _lines(rows: Iterable[Row], label: Callable[[Row], str], x: str, y: str) -> list[Line]:
    """Join rows to lines; of several cases with one payload the best shows what can be reached."""
    best: dict[tuple[str, float], float] = {}
    better = min if y == "us" else max
    for row in rows:
        value = getattr(row, y)
        if value is not None:
            key = label(row), float(getattr(row, x))
            best[key] = better(value, best.get(key, value))
    return lines(best.items(), lambda one: one[0][0], lambda one: (one[0][1], one[1]))
