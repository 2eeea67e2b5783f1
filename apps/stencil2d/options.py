"""Command-line options, and the settings of a run made from them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Literal

import halox

from ..common import add_device, at_least

SIZE_CLASSES = {1: 512, 2: 1024, 3: 2048, 4: 4096}
PRECISIONS = {"single": ("f4",), "double": ("f8",), "both": ("f4", "f8")}
CHECKS = ("auto", "sine", "one-rank", "all", "none")


@dataclass(frozen=True)
class Settings:
    """Settings of one run, checked against each other and against the number of ranks."""

    tile: tuple[int, int]
    """Rows and columns: of each rank's tile for weak scaling, of the whole plane for strong scaling."""
    proc_shape: tuple[int, int]
    strong: bool
    halo: int
    """Halo width, and the number of steps between exchanges."""
    steps: int
    passes: int
    warmup_passes: int
    dtypes: tuple[str, ...]
    exact_weights: bool
    device: Literal["auto", "cpu", "gpu"]
    check: str


def _pair(text: str) -> tuple[int, int]:
    try:
        rows, cols = (int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ROWS,COLS, got {text!r}") from None
    if rows < 1 or cols < 1:
        raise argparse.ArgumentTypeError(f"expected positive numbers, got {text!r}")
    return rows, cols


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options; the defaults are the original's."""
    sizes = ", ".join(f"{key}: {n}" for key, n in SIZE_CLASSES.items())
    parser.add_argument(
        "-s",
        "--size",
        type=int,
        choices=tuple(SIZE_CLASSES),
        default=1,
        help=f"size class ({sizes} rows and columns; default 1)",
    )
    parser.add_argument(
        "--custom-size", type=_pair, metavar="ROWS,COLS", help="size; overrides --size"
    )
    parser.add_argument(
        "--scaling",
        choices=("weak", "strong"),
        default="weak",
        help="weak: the size is each rank's, as in the original (default); strong: it is the whole",
    )
    parser.add_argument(
        "--msize",
        type=_pair,
        metavar="ROWS,COLS",
        help="process grid (default 2,RANKS/2; for an odd number of ranks 1,RANKS)",
    )
    parser.add_argument(
        "--num-iters",
        type=at_least(1),
        default=1000,
        metavar="N",
        help="steps a pass (default 1000)",
    )
    parser.add_argument(
        "--passes", type=at_least(1), default=10, metavar="N", help="timed passes (default 10)"
    )
    parser.add_argument(
        "--warmup-passes",
        type=at_least(0),
        default=1,
        metavar="N",
        help="untimed passes before them (default 1)",
    )
    parser.add_argument(
        "--iters-per-exchange",
        type=at_least(1),
        default=1,
        metavar="N",
        help="steps from one exchange to the next, which is also the halo width (default 1)",
    )
    parser.add_argument(
        "--precision", choices=tuple(PRECISIONS), default="both", help="default: both"
    )
    parser.add_argument(
        "--exact-weights",
        action="store_true",
        help="weights 0.15 and 0.05 in full precision, not rounded to float32 as in the original",
    )
    add_device(parser)
    parser.add_argument(
        "--check",
        choices=CHECKS,
        default="auto",
        help="check against the sine-transform solution, a one-rank run, all of them, or none; "
        "auto (default): all, without the one-rank run if that would take long; none leaves the "
        "result unverified, which the exit status shows",
    )


def settings(args: argparse.Namespace, ranks: int) -> Settings:
    """Return the settings of the options on ``ranks`` ranks.

    Raises
    ------
    halox.errors.DecompositionError
        If the size of the requested process grid is not the number of ranks.
    """
    proc_shape = args.msize or ((2, ranks // 2) if ranks % 2 == 0 else (1, ranks))
    if proc_shape[0] * proc_shape[1] != ranks:
        raise halox.errors.DecompositionError(
            f"--msize {proc_shape[0]},{proc_shape[1]} has {proc_shape[0] * proc_shape[1]} places, "
            f"but this run has {ranks} ranks; give -n {proc_shape[0] * proc_shape[1]} or another "
            "--msize"
        )
    side = SIZE_CLASSES[args.size]
    return Settings(
        tile=args.custom_size or (side, side),
        proc_shape=proc_shape,
        strong=args.scaling == "strong",
        halo=args.iters_per_exchange,
        steps=args.num_iters,
        passes=args.passes,
        warmup_passes=args.warmup_passes,
        dtypes=PRECISIONS[args.precision],
        exact_weights=args.exact_weights,
        device=args.device,
        check=args.check,
    )
