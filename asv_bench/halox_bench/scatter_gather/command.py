"""``halox bench scatter_gather``: its options, and the two ranks that play."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from halox.cli.progress import TerminalProgress
from halox_bench.common import options
from halox_bench.common.targets import Figure, shown
from halox_bench.pingpong import plots
from halox_bench.pingpong.command import add_patterns, between_two, check_places, played
from halox_bench.ranks import command
from halox_bench.ranks.bench import Options
from halox_bench.scatter_gather import targets
from halox_bench.scatter_gather.cases import ScatterGatherCase, select
from halox_bench.scatter_gather.run import ScatterGatherBench

NAME = "halox bench scatter_gather"
ABOUT = "strided messages between two ranks without packing, with and without key caches, beside every other path"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halox bench scatter_gather``."""
    command.add_arguments(parser)
    parser.add_argument(
        "--targets", action="store_true", help="only the figures that have a target"
    )
    add_patterns(parser)
    parser.add_argument(
        "--busy", action="store_true", help="also with half of each GPU held by another kernel"
    )


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run what the command line asks for; the same as for `halox_bench.command.run`, on two ranks.

    Notes
    -----
    Collective; starts two ranks where none run.
    """
    check_places(args)
    cases = select(args.patterns, quick=args.quick)
    if args.list:
        print("\n".join(case.name for case in cases))
        return 0
    return between_two(args, words, NAME, partial(_play, cases=cases))


def _play(
    args: argparse.Namespace,
    comm: Any,
    places: Sequence[str],
    result: dict[str, Any],
    cases: list[ScatterGatherCase],
) -> bool:
    made: list[ScatterGatherBench] = []

    def make(comm: Any, place: str, chosen: Options) -> ScatterGatherBench:
        made.append(ScatterGatherBench(comm, place, chosen))
        return made[-1]

    if args.targets:
        return _targets(args, comm, places, result)
    found = played(args, comm, places, result, cases, make)
    for bench in made:
        for name, why in bench.left_out.items():
            result["left_out"][f"{bench.place}: {name}"] = why
            command.say(comm, f"{bench.place}: left out: {name}: {why.splitlines()[0]}")
    if comm.rank == 0:
        what = "scatter_gather", "Without packing", plots.OVER_BYTES
        options.draw(args.plot, lambda folder: plots.draw(found, folder, *what))
    return any(row.failed for row in found)


def _targets(
    args: argparse.Namespace, comm: Any, places: Sequence[str], result: dict[str, Any]
) -> bool:
    progress = TerminalProgress(comm.rank)
    found: list[Figure] = []
    for place in places:
        found += targets.measure(comm, place, progress=progress)
    progress.clear()
    result["targets"] = found
    command.say(comm, shown(found))
    return any("failed" in one for one in found)
