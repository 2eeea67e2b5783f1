"""Command-line options, and the settings of a run made from them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

import halox

from ..nas_benchmark import add_class, add_run_options
from .classes import CLASSES, ProblemClass

DECOMPOSITIONS = ("auto", "1d", "2d")


@dataclass(frozen=True)
class Settings:
    """Settings of one run, checked against the number of ranks."""

    problem: ProblemClass
    proc_shape: tuple[int, int, int]
    """Ranks along z, y and x."""
    passes: int
    graph: bool
    device: Literal["auto", "cpu", "gpu"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    sizes = {name: "x".join(map(str, found.shape[::-1])) for name, found in CLASSES.items()}
    add_class(parser, sizes, "points along x, y and z")
    parser.add_argument(
        "--decomposition",
        choices=DECOMPOSITIONS,
        default="auto",
        help="1d: slabs, divided along z; 2d: pencils, divided along z and y; auto (default): slabs, "
        "or pencils if there are more ranks than slabs",
    )
    add_run_options(parser)


def settings(args: argparse.Namespace, ranks: int) -> Settings:
    """Return the settings of the options on ``ranks`` ranks.

    Raises
    ------
    halox.errors.DecompositionError
        If the class cannot be divided among so many ranks.
    """
    problem = CLASSES[args.problem]
    return Settings(
        problem=problem,
        proc_shape=process_grid(problem, ranks, args.decomposition),
        passes=args.passes,
        graph=args.graph,
        device=args.device,
    )


def process_grid(problem: ProblemClass, ranks: int, decomposition: str) -> tuple[int, int, int]:
    """Return the process grid along z, y and x.

    Pencils use the most even factorization of the number of ranks, with at least as many parts along y as along z.

    Raises
    ------
    halox.errors.DecompositionError
        If there are more ranks than the decomposition allows.

    Examples
    --------
    >>> [process_grid(CLASSES["S"], ranks, "2d") for ranks in (1, 2, 4, 6, 8)]
    [(1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 3, 1), (2, 4, 1)]
    >>> process_grid(CLASSES["W"], 6, "auto"), process_grid(CLASSES["W"], 64, "auto")
    ((6, 1, 1), (8, 8, 1))
    """
    nz, ny, nx = problem.shape
    # Slabs divide z before the transforms and y after them. Pencils also divide x in between.
    slabs, rows = min(nz, ny), min(ny, nx)
    if decomposition == "1d" or (decomposition == "auto" and ranks <= slabs):
        if ranks > slabs:
            raise halox.errors.DecompositionError(
                f"--decomposition 1d: class {problem.name} has {slabs} slabs at most, and {ranks} ranks "
                "need one each; use pencils (--decomposition 2d), fewer ranks or a larger --class"
            )
        return ranks, 1, 1
    pairs = [
        (low, ranks // low)
        for low in range(1, slabs + 1)
        if ranks % low == 0 and ranks // low <= rows
    ]
    if not pairs:
        raise halox.errors.DecompositionError(
            f"class {problem.name} cannot be divided in pencils among {ranks} ranks: no product of at "
            f"most {slabs} parts along z and {rows} along y is {ranks}; use another number of ranks or "
            "a larger --class"
        )
    low, high = min(pairs, key=lambda pair: (max(pair), pair))
    return low, high, 1
