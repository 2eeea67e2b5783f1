"""Options and figures common to the NAS Parallel Benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import halox

from .common import add_device, at_least


def add_class(parser: argparse.ArgumentParser, sizes: Mapping[str, object], meaning: str) -> None:
    """Add ``--class``, stored as ``problem``.

    Parameters
    ----------
    sizes : mapping
        Size of each class by its name, as the help text shows it; the first class is the default.
    meaning : str
        Meaning of a size, as in "points per direction".
    """
    names = tuple(sizes)
    shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
    parser.add_argument(
        "--class",
        dest="problem",
        choices=names,
        default=names[0],
        help=f"class, by its {meaning}: {shown} (default {names[0]})",
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--passes``, ``--graph`` and ``--device``."""
    parser.add_argument(
        "--passes",
        type=at_least(1),
        default=1,
        metavar="N",
        help="timed runs of all iterations; the median is reported (default 1, as in the original)",
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="on GPUs: capture an iteration in a CUDA graph once, and replay it",
    )
    add_device(parser)


def settings_shown(app: str, settings: Any, grid: halox.Grid) -> dict[str, Any]:
    """Return the figures that follow from the settings alone, in the order of printing."""
    return {
        "app": app,
        "class": settings.problem.name,
        "ranks": grid.size,
        "process_grid": list(grid.proc_shape),
        "device": grid.device,
        "graph": settings.graph,
        "points": list(grid.grid_shape),
        "iterations": settings.problem.iterations,
        "passes": settings.passes,
    }


def means(comm: Any, values: Mapping[str, float]) -> dict[str, float]:
    """Return the mean over ranks of each value; collective."""
    of_ranks = comm.allgather(dict(values))
    return {name: sum(found[name] for found in of_ranks) / len(of_ranks) for name in of_ranks[0]}


def time_table(seconds: Mapping[str, float], parts: Sequence[str]) -> list[dict[str, Any]]:
    """Return table rows of times and their share of an iteration, whose time is the sum of ``parts``.

    Examples
    --------
    >>> time_table({"a": 3e-3, "b": 1e-3, "once": 2e-3}, ("a", "b"))[2]
    {'part': 'once', 'ms_an_iteration': 2.0, 'share': 0.5}
    """
    total = sum(seconds[part] for part in parts)
    return [
        {"part": part, "ms_an_iteration": s * 1e3, "share": s / total}
        for part, s in seconds.items()
    ]
