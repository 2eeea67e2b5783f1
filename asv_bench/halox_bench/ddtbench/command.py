"""``halox bench ddtbench``: its options, and the two ranks that play."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from halox.cli.progress import TerminalProgress
from halox_bench.common import options
from halox_bench.common.targets import shown
from halox_bench.ddtbench import targets
from halox_bench.ddtbench.cases import PATTERNS, DdtCase, select
from halox_bench.ddtbench.run import DdtBench
from halox_bench.pingpong import plots
from halox_bench.pingpong.command import add_patterns, between_two, check_places, played
from halox_bench.ranks import command

NAME = "halox bench ddtbench"
ABOUT = "all patterns of DDTBench between two ranks, phase by phase, beside MPI's types and packing by hand"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halox bench ddtbench``."""
    command.add_arguments(parser)
    parser.add_argument(
        "--targets",
        action="store_true",
        help="only host packing and unpacking beside MPI_Pack, which have a target",
    )
    add_patterns(parser)


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run what the command line asks for; the same as for `halox_bench.command.run`, on two ranks.

    Notes
    -----
    Collective; starts two ranks where none run.
    """
    check_places(args)
    cases = [*select(args.patterns, quick=args.quick)]
    if args.list:
        for pattern in PATTERNS:
            sizes = [case.size for case in cases if case.pattern == pattern]
            if sizes:
                print(f"{pattern}: {' '.join(sizes)}")
        return 0
    return between_two(args, words, NAME, partial(_play, cases=cases))


def _play(
    args: argparse.Namespace,
    comm: Any,
    places: Sequence[str],
    result: dict[str, Any],
    cases: list[DdtCase],
) -> bool:
    if args.targets:
        progress = TerminalProgress(comm.rank)
        figures = result["targets"] = targets.measure(comm, cases, progress=progress)
        progress.clear()
        command.say(comm, shown(figures))
        return any("failed" in one for one in figures)
    found = played(args, comm, places, result, cases, DdtBench)
    if comm.rank == 0:
        drawn = partial(
            plots.draw, found, kind="ddtbench", title="DDTBench", along=plots.OVER_BYTES
        )
        options.draw(args.plot, drawn)
    return any(row.failed for row in found)
