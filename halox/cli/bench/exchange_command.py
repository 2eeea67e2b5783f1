"""``halox bench exchange``: reads its options, runs on all ranks, prints and writes what was found."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from halox.cli import report, run
from halox.cli.bench import ranks_options as common
from halox.cli.bench.exchange_cases import FACES, ExchangeCase, Wanted, cases
from halox.cli.bench.exchange_rows import (
    CLOSE,
    SELECTED,
    ExchangeRow,
    chosen_over_best,
    header,
    line,
    share_close,
    summary,
)
from halox.cli.bench.exchange_run import Bench, ExchangeOptions, device_of
from halox.cli.bench.gpu_aware import why_not_gpu_aware
from halox.cli.bench.surroundings import machines
from halox.cli.progress import TerminalProgress
from halox.errors import DeviceError

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
    parser.add_argument("--list", action="store_true", help="list the cases and end")
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
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: GPUs if usable"
    )
    parser.add_argument(
        "--headlines", action="store_true", help="only the figures that halox is measured by"
    )


def run_command(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run what the command line asks for and return the exit status.

    Returns
    -------
    int
        0; 1 if a result was wrong or a way failed.

    Raises
    ------
    HaloxError
        If an option fits nothing, or a GPU is asked for and there is none.

    Notes
    -----
    Collective; becomes the launcher where ranks are to be started.
    """
    wanted = Wanted(args.sizes, args.faces, args.halo, args.dtype, args.fields)
    chosen = cases(wanted, quick=args.quick)
    if args.list:
        print("\n".join(case.name for case in chosen))
        return 0
    comm = run.ranks(args.ranks, words, NAME)
    return run.together(comm, lambda: _run_here(args, comm, chosen), NAME)


def _run_here(args: argparse.Namespace, comm: Any, chosen: list[ExchangeCase]) -> int:
    device = device_of(args.device, comm)
    if args.headlines and device == "cpu":
        raise DeviceError("--headlines needs a GPU on every rank")
    result: dict[str, Any] = {"machine": machines(comm, device)}
    with common.written(args, comm, result):
        if args.headlines:
            return _headlines(args, comm, result)
        return _cases(args, comm, device, chosen, result)


def _cases(
    args: argparse.Namespace,
    comm: Any,
    device: str,
    chosen: list[ExchangeCase],
    result: dict[str, Any],
) -> int:
    options = ExchangeOptions(
        device,
        args.paths,
        () if args.no_baselines else None,
        not args.no_graph,
        common.timing_of(args),
        why_not_gpu_aware(comm, device),
    )
    say, progress = common.say(comm), TerminalProgress(comm.rank)
    say(f"{comm.size} ranks, {device} arrays; microseconds an exchange, the slowest rank's\n")
    say(header())
    found: list[ExchangeRow] = []
    result["rows"] = []
    bench = Bench(comm, options)
    for number, case in enumerate(chosen):
        progress(case.name, number, len(chosen))
        rows = bench.measure(case)
        progress.clear()
        found += rows
        result["rows"] += [row.as_dict() for row in rows]
        selected = {row.mode: row.us for row in rows if row.kind == SELECTED}
        for row in rows:
            say(line(row, selected.get(row.mode)))
    compared = chosen_over_best(found)
    result["chosen_over_best"] = {
        "limit": CLOSE,
        "share_within": share_close(compared),
        "cases": compared,
    }
    say("\n".join(summary(compared)))
    if args.plot and comm.rank == 0:
        from halox.cli.bench import exchange_plots

        for path in exchange_plots.draw(found, args.plot):
            print(f"wrote {path}")
    return int(any(row.failed for row in found))


def _headlines(args: argparse.Namespace, comm: Any, result: dict[str, Any]) -> int:
    from halox.cli.bench import exchange_headlines

    progress = TerminalProgress(comm.rank)
    found = exchange_headlines.headlines(
        comm, progress=progress, no_gpu_aware=why_not_gpu_aware(comm, "gpu")
    )
    progress.clear()
    result["headlines"] = found
    shown = [
        {
            "figure": one["name"],
            "value": one["value"],
            "unit": one["unit"],
            "target": "-" if one["target"] is None else f"<= {one['target']}",
            "met": "-" if one["met"] is None else one["met"],
            "beside": one.get("failed") or f"{one['baseline']} {one['baseline_name']}",
        }
        for one in found
    ]
    common.say(comm)("\n".join(report.table(shown)))
    return int(any("failed" in one for one in found))
