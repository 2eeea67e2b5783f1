"""``halox bench exchange``: reads its options, runs on all ranks, prints and writes what was found."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halox.cli.bench import ranks_command as both
from halox.cli.bench import ranks_options as common
from halox.cli.bench.exchange_cases import FACES, ExchangeCase, Wanted, cases
from halox.cli.bench.exchange_rows import ExchangeRow, choices, header, line
from halox.cli.bench.exchange_run import Bench, ExchangeOptions
from halox.cli.bench.gpu_aware import why_not_gpu_aware
from halox.cli.bench.headlines import Figure

NAME = "halox bench exchange"
ABOUT = "halo exchanges: every path, what halox selects, and what users write by hand"


def add_parser(kinds: Any) -> None:
    """Add ``exchange`` to what can be measured."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "exchange",
        help=ABOUT,
        description=f"Measure {ABOUT}. Without sizes, faces, halos, dtypes or numbers of fields: a grid of cases.",
    )
    common.add_arguments(parser)
    parser.add_argument(
        "--sizes",
        type=common.shapes,
        default=(),
        metavar="N,AxB",
        help="cells a rank: N for N^3, or a shape of 1 to 4 axes, the innermost last",
    )
    parser.add_argument(
        "--faces",
        type=common.words,
        default=(),
        metavar="A,B",
        help=f"what is exchanged, out of {', '.join(FACES)} (x is the innermost axis)",
    )
    parser.add_argument(
        "--halo", type=common.numbers, default=(), metavar="A,B", help="halo widths; default: 1"
    )
    parser.add_argument(
        "--dtype", type=common.words, default=(), metavar="A,B", help="dtypes; default: f8"
    )
    parser.add_argument(
        "--fields",
        type=common.numbers,
        default=(),
        metavar="A,B",
        help="fields of one exchange; default: 1",
    )
    both.add_arguments(parser)


def run_command(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run what the command line asks for; see `ranks_command.run_command`."""
    wanted = Wanted(args.sizes, args.faces, args.halo, args.dtype, args.fields)
    chosen = cases(wanted, quick=args.quick)

    def measure(comm: Any, device: str, result: dict[str, Any]) -> list[ExchangeRow]:
        return _measured(args, comm, device, chosen, result)

    return both.run_command(args, words, NAME, chosen, measure, _headlines)


def _measured(
    args: argparse.Namespace,
    comm: Any,
    device: str,
    chosen: list[ExchangeCase],
    result: dict[str, Any],
) -> list[ExchangeRow]:
    options = ExchangeOptions(
        device,
        args.paths,
        () if args.no_baselines else None,
        not args.no_graph,
        common.timing_of(args),
        why_not_gpu_aware(comm, device),
    )
    say = common.say(comm)
    say(f"{comm.size} ranks, {device} arrays; microseconds an exchange, the slowest rank's\n")
    say(header())
    found = both.in_turn(comm, chosen, Bench(comm, options).measure, line, result)
    say("\n".join(choices(found, result)))

    def draw(folder: Path) -> list[Path]:
        from halox.cli.bench import exchange_plots

        return exchange_plots.draw(found, folder)

    both.drawn(args.plot, comm, draw)
    return found


def _headlines(comm: Any, **options: Any) -> list[Figure]:
    from halox.cli.bench import exchange_headlines

    return exchange_headlines.headlines(comm, **options)
