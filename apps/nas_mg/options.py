"""Command-line options, and the settings of a run made from them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

import halox

from ..common import at_least
from ..nas_benchmark import add_class, add_run_options
from .classes import CLASSES, ProblemClass

CHECKS = ("all", "official", "none")
GATHER = 16
"""Default of ``--gather``: limit of points per direction of a gathered level."""


@dataclass(frozen=True)
class Settings:
    """Settings of one run, checked against the number of ranks."""

    problem: ProblemClass
    proc_shape: tuple[int, int, int]
    """Ranks along z, y and x."""
    gather: int
    """Limit of points per direction of the levels that every rank computes as a whole."""
    passes: int
    graph: bool
    device: Literal["auto", "cpu", "gpu"]
    check: str
    picture: bool
    reproducible: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    sizes = {name: found.points for name, found in CLASSES.items()}
    add_class(parser, sizes, "points per direction")
    parser.add_argument(
        "--gather",
        type=at_least(0),
        default=GATHER,
        metavar="N",
        help="levels of at most N points per direction are gathered on every rank, which then "
        f"computes them as a whole (default {GATHER}); those too small for the ranks always are",
    )
    add_run_options(parser)
    parser.add_argument(
        "--reproducible",
        action="store_true",
        help="compute norms that have the same bits on any number of ranks",
    )
    parser.add_argument(
        "--check",
        choices=CHECKS,
        default="all",
        help="official: the norm after the last iteration; all (default): that, and the norms after the "
        "first iterations if they are known; none leaves the result unverified, which the exit "
        "status shows",
    )


def settings(args: argparse.Namespace, ranks: int) -> Settings:
    """Return the settings of the options on ``ranks`` ranks.

    Raises
    ------
    halox.errors.DecompositionError
        If the number of ranks is not a power of two, or too large for the class.
    """
    problem = CLASSES[args.problem]
    proc_shape = process_grid(ranks)
    if problem.points < 2 * max(proc_shape):
        raise halox.errors.DecompositionError(
            f"class {problem.name} has {problem.points} points per direction, and {ranks} ranks have "
            f"{max(proc_shape)} in a row: each needs 2 points at least; use fewer ranks or a larger "
            "--class"
        )
    return Settings(
        problem=problem,
        proc_shape=proc_shape,
        gather=args.gather,
        passes=args.passes,
        graph=args.graph,
        device=args.device,
        check=args.check,
        picture=getattr(args, "png", None) is not None,
        reproducible=args.reproducible,
    )


def process_grid(ranks: int) -> tuple[int, int, int]:
    """Return the original's process grid, along z, y and x.

    Raises
    ------
    halox.errors.DecompositionError
        If the number of ranks is not a power of two.

    Examples
    --------
    >>> process_grid(1), process_grid(2), process_grid(4), process_grid(16)
    ((1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 2))
    """
    if ranks & (ranks - 1):
        below = 1 << (ranks.bit_length() - 1)
        raise halox.errors.DecompositionError(
            f"NAS MG runs on a power of two of ranks, not on {ranks}; give -n {below} or -n {2 * below}"
        )
    doublings = ranks.bit_length() - 1
    x = 1 << doublings // 3
    y = 1 << (doublings - doublings // 3) // 2
    return ranks // (x * y), y, x
