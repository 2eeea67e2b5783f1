"""Command-line options, and the settings of a run made from them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import halox

from ..common import add_device, at_least
from .lattice import Device

RESIDUALS = {"double": 1e-18, "single": 1e-10, "mixed": 1e-18}
"""Defaults of ``--residual``."""

DTYPES: dict[str, np.dtype[Any]] = {
    "double": np.dtype("c16"),
    "single": np.dtype("c8"),
    "mixed": np.dtype("c16"),
}
ITERATIONS = 2000
_SEEDS = 1 << 64


@dataclass(frozen=True)
class Settings:
    """Settings of one run."""

    shape: tuple[int, int, int, int]
    """Sites along t, z, y and x."""
    mass: float
    naive: bool
    precision: str
    gauge: str | None
    """"unit", "random", a file, or None if only fat and long links are given."""
    fat: str | None
    long: str | None
    source: str | None
    solution: str | None
    seed: int
    residual: float
    iterations: int
    device: Device
    graph: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of links, source and solution."""
        return DTYPES[self.precision]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--lattice",
        nargs=4,
        type=at_least(2),
        default=(8, 8, 8, 8),
        metavar=("X", "Y", "Z", "T"),
        help="sites along x, y, z and t, even numbers (default 8 8 8 8)",
    )
    parser.add_argument(
        "--mass",
        type=_number(lambda value: value >= 0, "0 or more"),
        default=0.1,
        metavar="M",
        help="mass m of the fermion matrix 2 m + D (default 0.1)",
    )
    parser.add_argument(
        "--naive",
        action="store_true",
        help="the operator of nearest neighbours only, instead of the improved one with long links",
    )
    parser.add_argument(
        "--precision",
        choices=tuple(DTYPES),
        default="double",
        help="default: double; mixed: iterations in single, residual and solution in double",
    )
    parser.add_argument(
        "--gauge",
        metavar="unit|random|FILE",
        help="gauge field: unit matrices, random ones (default), or a SciDAC file; beside --fat and --long, "
        "for the plaquettes only",
    )
    parser.add_argument(
        "--fat",
        metavar="FILE",
        help="SciDAC file of fat links with phases, boundary sign and coefficients",
    )
    parser.add_argument("--long", metavar="FILE", help="likewise, of long links")
    parser.add_argument(
        "--source",
        metavar="FILE",
        help="SciDAC file of the right-hand side (default: a random one)",
    )
    parser.add_argument("--solution", metavar="FILE", help="write the solution to a SciDAC file")
    parser.add_argument(
        "--seed",
        type=at_least(0),
        default=1,
        metavar="N",
        help="of random fields, which are the same on any number of ranks (default 1)",
    )
    parser.add_argument(
        "--residual",
        type=_number(lambda value: 0 < value < 1, "a number between 0 and 1"),
        metavar="R",
        help="stop at |r|^2 / |b|^2 of at most R (default "
        + ", ".join(f"{value:g} in {name}" for name, value in RESIDUALS.items())
        + ")",
    )
    parser.add_argument(
        "--iterations",
        type=at_least(1),
        default=ITERATIONS,
        metavar="N",
        help=f"most iterations for each parity (default {ITERATIONS})",
    )
    parser.add_argument(
        "--graph",
        action="store_true",
        help="on GPUs: capture an iteration in a CUDA graph once, and replay it",
    )
    add_device(parser)


def settings(args: argparse.Namespace) -> Settings:
    """Return the settings of the options.

    Raises
    ------
    halox.errors.HaloxError
        If options exclude one another, or one is missing.
    """
    if (args.fat is None) != (args.long is None):
        given, missing = ("--fat", "--long") if args.long is None else ("--long", "--fat")
        raise halox.errors.HaloxError(
            f"{given} is given without {missing}: the improved operator needs both; give {missing} as well, or leave "
            "out both to have them made from --gauge"
        )
    if args.naive and args.fat is not None:
        raise halox.errors.HaloxError(
            "--naive takes thin links only, and --fat and --long are given; leave out --naive, or give --gauge instead"
        )
    if args.seed >= _SEEDS:
        raise halox.errors.HaloxError(f"--seed {args.seed}: expected a number below 2**64")
    x, y, z, t = args.lattice
    residual = RESIDUALS[args.precision] if args.residual is None else args.residual
    gauge = args.gauge
    if gauge is None and args.fat is None:
        gauge = "random"
    return Settings(
        shape=(t, z, y, x),
        mass=args.mass,
        naive=args.naive,
        precision=args.precision,
        gauge=gauge,
        fat=args.fat,
        long=args.long,
        source=args.source,
        solution=args.solution,
        seed=args.seed,
        residual=residual,
        iterations=args.iterations,
        device=args.device,
        graph=args.graph,
    )


def _number(is_allowed: Callable[[float], bool], allowed: str) -> Callable[[str], float]:
    """Return an `argparse` type that accepts finite numbers for which ``is_allowed`` is true."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not is_allowed(value):
            raise argparse.ArgumentTypeError(f"expected {allowed}, got {text!r}")
        return value

    return parse
