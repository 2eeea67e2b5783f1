"""``halox bench allreduce``: reads its options, runs on all ranks, prints and writes what was found."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from halox.cli.bench import ranks_command as both
from halox.cli.bench import ranks_options as common
from halox.cli.bench.allreduce_cases import AllreduceCase, cases
from halox.cli.bench.allreduce_rows import AllreduceRow, header, line
from halox.cli.bench.allreduce_run import AllreduceBench, AllreduceOptions, known_algorithms
from halox.cli.bench.exchange_rows import choices
from halox.cli.bench.gpu_aware import why_not_gpu_aware
from halox.cli.bench.headlines import Figure
from halox.collectives.operations import OPERATIONS
from halox.errors import HaloxError

NAME = "halox bench allreduce"
ABOUT = "allreduces: every algorithm, what halox selects, and what users write by hand"


def add_parser(kinds: Any) -> None:
    """Add ``allreduce`` to what can be measured."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "allreduce",
        help=ABOUT,
        description=f"Measure {ABOUT}. Without sizes, dtypes or operations: sums of float32 from 4 bytes to 128 MiB, "
        "and single values.",
    )
    common.add_arguments(parser, "algorithms")
    parser.add_argument(
        "--sizes",
        type=common.words,
        default=(),
        metavar="A,B",
        help="bytes of each rank's array, as in 8,64KiB,128MiB; at least one element",
    )
    parser.add_argument(
        "--dtype", type=common.words, default=(), metavar="A,B", help="dtypes; default: f4"
    )
    parser.add_argument(
        "--op",
        type=common.words,
        default=(),
        metavar="A,B",
        help=f"out of {', '.join(OPERATIONS)}; default: sum",
    )
    both.add_arguments(parser)


def run_command(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run what the command line asks for; see `ranks_command.run_command`."""
    chosen = cases(args.sizes, args.dtype, args.op, quick=args.quick)

    def measure(comm: Any, device: str, result: dict[str, Any]) -> list[AllreduceRow]:
        options = AllreduceOptions(
            device,
            _named(args.algorithms, device),
            () if args.no_baselines else None,
            not args.no_graph,
            common.timing_of(args),
            why_not_gpu_aware(comm, device),
        )
        return _measured(AllreduceBench(comm, options), chosen, args.plot, result)

    return both.run_command(args, words, NAME, chosen, measure, _headlines)


def _named(asked: tuple[str, ...] | None, device: str) -> tuple[str, ...]:
    known = known_algorithms(device)
    unknown = [name for name in asked or () if name not in known]
    if unknown:
        raise HaloxError(f"--algorithms {unknown[0]}: on a {device} expected {', '.join(known)}")
    return known if asked is None else asked


def _measured(
    bench: AllreduceBench,
    chosen: list[AllreduceCase],
    plots: Path | None,
    result: dict[str, Any],
) -> list[AllreduceRow]:
    comm, against = bench.comm, bench.baseline()
    say = common.say(comm)
    say(
        f"{comm.size} ranks, {bench.options.device} arrays; microseconds an allreduce, the slowest rank's\n"
        f"set-up: made and called once; pays after so many calls, against {against}\n"
    )
    say(header())
    found = both.in_turn(comm, chosen, bench.measure, partial(line, against=against), result)
    say("\n".join(choices(found, result, "algorithm")))

    def draw(folder: Path) -> list[Path]:
        from halox.cli.bench import allreduce_plots

        return allreduce_plots.draw(found, folder, against)

    both.drawn(plots, comm, draw)
    return found


def _headlines(comm: Any, **options: Any) -> list[Figure]:
    from halox.cli.bench import allreduce_headlines

    return allreduce_headlines.headlines(comm, **options)
