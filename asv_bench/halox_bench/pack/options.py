"""Selection of packers, places and directions."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from halox_bench.common.rig import DESTINATIONS

PACKERS = ("auto", "strided", "workunits", "traversal", "copy_engine")
DIRECTIONS = ("pack", "unpack")

REPEATS, QUICK_REPEATS = 11, 5


@dataclass(frozen=True)
class PackOptions:
    """Selection of methods and places.

    Attributes
    ----------
    methods : tuple of str
        Packers on a GPU.
    destinations : tuple of str
        Memory of the packed bytes; absent ones are left out.
    directions : tuple of str
        ``"pack"``, ``"unpack"``.
    max_blocks : int or None
        Most thread blocks of the packers.
    repeats : int
        Samples of a measurement.
    baselines : bool
        Whether to measure hand-written code as well.
    """

    methods: tuple[str, ...] = PACKERS
    destinations: tuple[str, ...] = DESTINATIONS
    directions: tuple[str, ...] = ("pack",)
    max_blocks: int | None = None
    repeats: int = REPEATS
    baselines: bool = True

    @classmethod
    def of(cls, args: argparse.Namespace) -> PackOptions:
        """Return the options that a command line sets."""
        return cls(
            args.methods or PACKERS,
            # A quick run takes the destinations that every GPU has.
            args.destinations or (DESTINATIONS[:2] if args.quick else DESTINATIONS),
            args.direction or ("pack",),
            args.max_blocks,
            args.repeats or (QUICK_REPEATS if args.quick else REPEATS),
            not args.no_baselines,
        )
