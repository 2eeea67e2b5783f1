"""The options of ``halox bench pack``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from halox_bench.common import options as common
from halox_bench.common.options import add_list, add_selection, positive, words_of
from halox_bench.common.rig import DESTINATIONS

PACKERS = ("auto", "strided", "workunits", "traversal", "copy_engine")
DIRECTIONS = {"pack": ("pack",), "unpack": ("unpack",), "both": ("pack", "unpack")}

REPEATS = 11
QUICK_REPEATS = 5


@dataclass(frozen=True)
class Options:
    """Selection of what is measured.

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halox bench pack``."""
    add_selection(parser)
    add_list(parser, "--patterns", "patterns, or pattern/size, with wildcards; default: all")
    add_list(
        parser,
        "--methods",
        f"packers on a GPU, out of {', '.join(PACKERS)}; default: all",
        read=words_of(*PACKERS),
        default=PACKERS,
    )
    add_list(
        parser,
        "--destinations",
        "where packed bytes go: device, host (mapped and pinned), peer; default: all there are",
        read=words_of(*DESTINATIONS),
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
        "--contention",
        action="store_true",
        help="only packing beside a busy GPU and beside copies over the host link",
    )
    common.add_arguments(parser, f"samples a figure; default: {REPEATS}")


def options_of(args: argparse.Namespace) -> Options:
    """Return the options that a command line sets."""
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
