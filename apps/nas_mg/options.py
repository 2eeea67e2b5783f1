"""The command-line options, and the settings of a run that they come to."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

import halox

from .classes import CLASSES, ProblemClass

CHECKS = ("all", "official", "none")
GATHER = 16
"""Points per direction up to which levels are gathered, if nothing is said."""


@dataclass(frozen=True)
class Settings:
    """What one run does, checked against the number of ranks."""

    problem: ProblemClass
    proc_shape: tuple[int, int, int]
    """Ranks along z, y and x."""
    gather: int
    """Levels of at most so many points per direction are worked on whole by every rank."""
    passes: int
    graph: bool
    device: Literal["auto", "cpu", "gpu"]
    check: str


def _at_least(least: int) -> type[int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
        return value

    return parse  # type: ignore[return-value]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    sizes = ", ".join(f"{found.name} {found.points}" for found in CLASSES.values())
    parser.add_argument(
        "--class",
        dest="problem",
        choices=tuple(CLASSES),
        default="S",
        help=f"class, by its points per direction: {sizes} (default S)",
    )
    parser.add_argument(
        "--gather",
        type=_at_least(0),
        default=GATHER,
        metavar="N",
        help="levels of at most N points per direction are gathered on every rank, which then works "
        f"on them whole (default {GATHER}); those too small for the ranks always are",
    )
    parser.add_argument(
        "--passes",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="timed runs of all iterations; the median counts (default 1, as in the original)",
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="on GPUs: capture an iteration in a CUDA graph once, and replay it",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: auto"
    )
    parser.add_argument(
        "--check",
        choices=CHECKS,
        default="all",
        help="official: the norm after the last iteration; all (default): that, and the norms after the "
        "first iterations where they are known; none leaves the result unverified, which the exit "
        "status says",
    )


def settings(args: argparse.Namespace, ranks: int) -> Settings:
    """Return the settings that the options come to on ``ranks`` ranks.

    Raises
    ------
    halox.errors.DecompositionError
        If the number of ranks is not a power of two, or too large for the class.
    """
    problem = CLASSES[args.problem]
    proc_shape = process_grid(ranks)
    if problem.points < 2 * max(proc_shape):
        raise halox.errors.DecompositionError(
            f"class {problem.name} has {problem.points} points per direction, and {ranks} ranks stand "
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
