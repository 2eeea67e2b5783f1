"""Plots of measured times, drawn at build time from the result files of ``make gpu-check``.

The directive ``{measured} NAME`` inserts one of `PLOTS` as SVG with colours from the theme.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

FOLDER = Path(__file__).resolve().parents[1] / "performance"
WIDTH, HEIGHT = 340, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 8, 40

Point = tuple[float, float]
Runs = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Plot:
    """A drawing with title, legend and caption."""

    title: str
    legend: tuple[str, ...]
    svg: str
    caption: str


def runs(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return the GPU checks on H200s, the newest first."""
    found = [json.loads(path.read_text("utf-8")) for path in folder.glob("gpu-check*.json")]
    h200 = [run for run in found if all("H200" in gpu for gpu in run["machine"]["gpus"])]
    return sorted(h200, key=lambda run: str(run["made"]), reverse=True)


def newest(
    checks: Runs, gpus: int | None, name: str, least: int
) -> tuple[str, list[tuple[re.Match[str], dict[str, Any]]]]:
    """Return date and benchmarks of the newest check in which at least ``least`` benchmarks match ``name``."""
    for run in checks:
        if gpus is not None and len(run["machine"]["gpus"]) != gpus:
            continue
        found = [
            (match, one)
            for one in run["benchmarks"]
            if "failed" not in one and (match := re.fullmatch(name, one["name"]))
        ]
        if len(found) >= least:
            return str(run["made"])[:10], found
    raise LookupError(f"no check in {FOLDER} has {least} benchmarks like {name!r}")


def number(value: float) -> str:
    """Format a time or a speed with two or three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def time(decade: int) -> str:
    """Format a power of ten of microseconds."""
    return f"{10 ** (decade % 3)} {('us', 'ms', 's')[decade // 3]}"


def _text(x: float, y: float, text: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<line class="rule" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'


def _svg(label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def lines(
    label: str,
    series: dict[str, list[Point]],
    ticks: dict[float, str],
    axis: str,
) -> str:
    """Draw times in microseconds against sizes, on logarithmic scales."""
    every_x = [x for points in series.values() for x, _ in points]
    every_y = [y for points in series.values() for _, y in points]
    low, high = math.log10(min(every_x)), math.log10(max(every_x))
    bottom, top = math.floor(math.log10(min(every_y))), math.ceil(math.log10(max(every_y)))

    def across(x: float) -> float:
        return LEFT + 14 + (math.log10(x) - low) / (high - low) * (WIDTH - LEFT - RIGHT - 32)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(y) - bottom) / (top - bottom) * (HEIGHT - BOTTOM - TOP)

    parts = []
    for decade in range(bottom, top + 1):
        y = up(10.0**decade)
        parts += [_line(LEFT, y, WIDTH - RIGHT, y), _text(LEFT - 6, y + 4, time(decade), "end")]
    parts += [_text(across(x), HEIGHT - BOTTOM + 16, tick) for x, tick in ticks.items()]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, axis))
    for number_of, (name, points) in reversed(list(enumerate(series.items()))):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        parts.append(f'<polyline class="series s{number_of}" points="{path}"/>')
        parts += [
            f'<circle class="mark s{number_of}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5">'
            f"<title>{escape(name)}: {number(y)} us</title></circle>"
            for x, y in points
        ]
    return _svg(label, parts)


def bars(label: str, groups: dict[str, list[float]], axis: str) -> str:
    """Draw a horizontal bar for each value of each group, followed by the value."""
    largest = max(value for values in groups.values() for value in values)
    step = (HEIGHT - TOP - 24) / len(groups)
    left, thick = 84, 19
    parts = []
    for row, (name, values) in enumerate(groups.items()):
        y = TOP + row * step + (step - thick * len(values)) / 2
        parts.append(_text(left - 8, y + thick * len(values) / 2 + 4, name, "end"))
        for place, value in enumerate(values):
            width = value / largest * (WIDTH - left - RIGHT - 42)
            parts.append(
                f'<rect class="bar s{place}" x="{left}" y="{y + place * thick:.1f}" '
                f'width="{width:.1f}" height="{thick - 3}" rx="2"/>'
            )
            parts.append(_text(left + width + 5, y + place * thick + 13, number(value), "start"))
    parts.append(_line(left, TOP, left, HEIGHT - 24))
    parts.append(_text((left + WIDTH - RIGHT) / 2, HEIGHT - 5, axis))
    return _svg(label, parts)


_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20}
_TICKS = {8.0: "8 B", 2.0**13: "8 KiB", 2.0**20: "1 MiB", 2.0**27: "128 MiB"}
_BY_HAND = {"NCCL by hand": "pack + NCCL + unpack", "mpi4py by hand": "zero-copy + mpi4py"}
_FACES = r"both x-faces of (\d+)()\^3 float64, 2 ranks, in a "
_SUMS = r"allreduce of (?:one|(\d+)(B|KiB|MiB)) float64, 2 ranks, in a "


@dataclass(frozen=True)
class Times:
    """A plot of times over sizes, from benchmarks of a GPU check.

    The groups of ``pattern``, which matches their names, are the size and its unit. ``methods`` has the methods
    beside halox, by their labels; ``at`` is the size that the caption and the README state.
    """

    title: str
    gpus: int
    pattern: str
    methods: dict[str, str]
    what: str
    at: float
    axis: str = "cells per GPU"


TIMES = {
    "exchange": Times(
        "Halo exchange, two GPUs",
        2,
        f"{_FACES}stream",
        _BY_HAND,
        "Both x-faces of N³ float64 cells per GPU, blocks of 8 bytes",
        512,
    ),
    "exchange-graph": Times(
        "Halo exchange in a CUDA graph, two GPUs",
        2,
        f"{_FACES}graph",
        {"NCCL by hand": "pack + NCCL + unpack"},
        "Both x-faces of N³ float64 cells per GPU, blocks of 8 bytes",
        64,
    ),
    "exchange-four": Times(
        "Halo exchange, four GPUs",
        4,
        r"six faces of (\d+)()\^3 float64, 4 ranks, in a stream",
        _BY_HAND,
        "All six faces of N³ float64 cells per GPU",
        512,
    ),
    "exchange-shared": Times(
        "Halo exchange, two ranks on one GPU",
        1,
        f"{_FACES}stream",
        {"mpi4py by hand": "zero-copy + mpi4py"},
        "Both x-faces of N³ float64 cells per rank, blocks of 8 bytes",
        256,
        "cells per rank",
    ),
    "allreduce": Times(
        "Allreduce, two GPUs",
        2,
        rf"{_SUMS}stream: over D2H \+ .*",
        {"NCCL": "NCCL", "copies and MPI": "D2H + MPI_Allreduce + H2D"},
        "Sum of float64 arrays in GPU memory",
        2**20,
        "bytes per GPU",
    ),
    "allreduce-graph": Times(
        "Allreduce in a CUDA graph, two GPUs",
        2,
        rf"{_SUMS}graph(?:: over NCCL)?",
        {"NCCL": "NCCL"},
        "Sum of float64 arrays in GPU memory",
        8,
        "bytes per GPU",
    ),
}


def times(checks: Runs, spec: Times) -> Plot:
    """Return a plot of times on GPUs."""
    date, found = newest(checks, spec.gpus, spec.pattern, least=3)
    sizes = {float(match[1] or 8) * _UNITS[match[2] or ""]: one["others"] for match, one in found}
    series = {
        label: [(size, sizes[size][method]) for size in sorted(sizes)]
        for label, method in {"halox": "selected", **spec.methods}.items()
    }
    count = {1: "One", 2: "Two", 4: "Four"}[spec.gpus]
    return _plot(spec.title, spec.what, series, spec.axis, spec.at, f"{count} H200, {date}")


def on_cores(axis: str, page: Path = FOLDER / "host.md") -> Plot:
    """Return the plot of two ranks on CPU cores, from the first table of the page."""
    table = page.read_text("utf-8").partition("| --- ")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()[1:]]
    column = {"x": 3, "z": 7}[axis]
    found = {float(row[1]): row[column].split(" / ") for row in rows if row[2] == "2"}
    series = {
        label: [(size, float(pair[place])) for size, pair in found.items()]
        for place, label in enumerate(("halox", "mpi4py by hand"))
    }
    return _plot(
        f"Halo exchange, two ranks on CPU cores, {axis}-faces",
        f"Both {axis}-faces of N³ float64 cells per rank",
        series,
        "cells per rank",
        max(found),
        "Two cores of an AMD EPYC virtual machine",
    )


def _plot(
    title: str, what: str, series: dict[str, list[Point]], axis: str, at: float, where: str
) -> Plot:
    """Return a plot whose caption states the times at one of its sizes."""
    in_bytes = axis.startswith("bytes")
    ticks = _TICKS if in_bytes else {x: f"{x:.0f}³" for x, _ in series["halox"]}
    values = ", ".join(f"{label} {number(dict(points)[at])}" for label, points in series.items())
    size = _TICKS[at] if in_bytes else f"N = {at:.0f}"
    caption = f"{what}; microseconds. At {size}: {values}. {where}."
    return Plot(title, tuple(series), lines(f"{title}. {caption}", series, ticks, axis), caption)


def packing(checks: Runs) -> Plot:
    """Return the plot of packing on one GPU."""
    payload = 64 * 2**20
    date, found = newest(
        checks,
        None,
        r"vector, blocks of (\d+) B, 64 MiB to device: times as fast as cudaMemcpy2D",
        least=3,
    )
    found.sort(key=lambda one: int(one[0][1]))
    groups = {
        f"{match[1]} bytes": [
            payload / one["baseline"] * one["value"] / 1e3,
            payload / one["baseline"] / 1e3,
        ]
        for match, one in found
    }
    ratios = [values[0] / values[1] for values in groups.values()]
    lengths = ", ".join(match[1] for match, _ in found)
    caption = (
        f"64 MiB in blocks of {lengths} bytes, a block apart; GB of payload a second. "
        f"halox.pack is {min(ratios):.1f} to {max(ratios):.0f} times as fast as cudaMemcpy2D. "
        f"One H200, {date}."
    )
    svg = bars(f"Packing on a GPU. {caption}", groups, "GB/s, by length of the blocks")
    return Plot("Packing, one GPU", ("halox.pack", "cudaMemcpy2D"), svg, caption)


PLOTS: dict[str, Callable[[Runs], Plot]] = {
    **{name: partial(times, spec=spec) for name, spec in TIMES.items()},
    "packing": packing,
    "cores-x": lambda _: on_cores("x"),
    "cores-z": lambda _: on_cores("z"),
}


def html(name: str) -> str:
    """Return a plot with its title, legend and caption."""
    plot = PLOTS[name](runs())
    keys = "".join(
        f'<li><span class="key s{place}"></span>{escape(label)}</li>'
        for place, label in enumerate(plot.legend)
    )
    return (
        f'<figure class="measured"><p class="measured-title">{escape(plot.title)}</p>'
        f"<ul>{keys}</ul>{plot.svg}<figcaption>{escape(plot.caption)}</figcaption></figure>"
    )


class Measured(Directive):
    """The directive ``{measured}``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the plot as HTML."""
        for path in [Path(__file__), FOLDER / "host.md", *FOLDER.glob("gpu-check*.json")]:
            self.state.document.settings.env.note_dependency(str(path))
        return [nodes.raw("", html(self.arguments[0]), format="html")]


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("measured", Measured)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
