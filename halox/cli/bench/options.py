"""The options of ``halox bench pack``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

PACKERS = ("auto", "strided", "workunits", "traversal", "copy_engine")
DIRECTIONS = {"pack": ("pack",), "unpack": ("unpack",), "both": ("pack", "unpack")}
DESTINATIONS = ("device", "host", "peer")

REPEATS = 11
QUICK_REPEATS = 5


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes
    ----------
    patterns : tuple of str
        Shell patterns of names; none means all.
    methods : tuple of str
        Packers on a GPU.
    destinations : tuple of str
        Where the packed bytes are to be; those that are not there are left out.
    directions : tuple of str
        ``"pack"``, ``"unpack"``.
    max_blocks : int or None
        Most thread blocks of the packers.
    quick : bool
        Few sizes, few samples.
    repeats : int
        Samples of a measurement.
    baselines : bool
        Whether to measure what users write by hand as well.
    """

    patterns: tuple[str, ...] = ()
    methods: tuple[str, ...] = PACKERS
    destinations: tuple[str, ...] = DESTINATIONS
    directions: tuple[str, ...] = ("pack",)
    max_blocks: int | None = None
    quick: bool = False
    repeats: int = REPEATS
    baselines: bool = True


def _list_of(*allowed: str) -> type[tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word for word in text.split(",") if word)
        wrong = [word for word in words if allowed and word not in allowed]
        if wrong or not words:
            raise argparse.ArgumentTypeError(
                f"expected names out of {', '.join(allowed)}, with commas between; got {text!r}"
            )
        return words

    return parse  # type: ignore[return-value]


def positive(text: str) -> int:
    """Read a whole number of at least 1, for an option."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halox bench pack``."""
    parser.add_argument("--list", action="store_true", help="list patterns and sizes and end")
    parser.add_argument(
        "--patterns",
        type=lambda text: tuple(word for word in text.split(",") if word),
        default=(),
        metavar="A,B",
        help="patterns, or pattern/size, with wildcards; default: all",
    )
    parser.add_argument(
        "--methods",
        type=_list_of(*PACKERS),
        default=PACKERS,
        metavar="A,B",
        help=f"packers on a GPU, out of {', '.join(PACKERS)}; default: all",
    )
    parser.add_argument(
        "--destinations",
        type=_list_of(*DESTINATIONS),
        default=None,
        metavar="A,B",
        help="where packed bytes go: device, host (mapped and pinned), peer; default: all there are",
    )
    parser.add_argument(
        "--direction", choices=tuple(DIRECTIONS), default="pack", help="default: pack"
    )
    parser.add_argument(
        "--max-blocks",
        type=positive,
        metavar="N",
        help="most thread blocks of a packer's launch; default: as many as there is work for",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: a GPU if usable"
    )
    parser.add_argument("--quick", action="store_true", help="few sizes, few samples")
    parser.add_argument(
        "--repeats", type=positive, metavar="N", help=f"samples a figure; default: {REPEATS}"
    )
    parser.add_argument(
        "--no-baselines", action="store_true", help="leave out what users write by hand"
    )
    parser.add_argument(
        "--headlines", action="store_true", help="only the figures that halox is measured by"
    )
    parser.add_argument(
        "--contention",
        action="store_true",
        help="only packing beside a busy GPU and beside copies over the host link",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the figures as PNG files")


def options_of(args: argparse.Namespace) -> Options:
    """Return the settings that a command line comes to."""
    return Options(
        patterns=args.patterns,
        methods=args.methods,
        # Of the destinations, a quick run takes the one that everybody has.
        destinations=args.destinations or (("device", "host") if args.quick else DESTINATIONS),
        directions=DIRECTIONS[args.direction],
        max_blocks=args.max_blocks,
        quick=args.quick,
        repeats=args.repeats or (QUICK_REPEATS if args.quick else REPEATS),
        baselines=not args.no_baselines,
    )
