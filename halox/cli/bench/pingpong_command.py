"""``halox bench pingpong``: reads its options, runs on two ranks, prints and writes what was found."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halox.cli import launcher, run
from halox.cli.bench import ranks_options as common
from halox.cli.bench.gpu_aware import why_not_gpu_aware
from halox.cli.bench.pingpong_cases import PATTERNS, QUICK_SIZES, SIZES, PingPong, select
from halox.cli.bench.pingpong_run import (
    PLACES,
    PingPongBench,
    PingPongOptions,
    PingPongRow,
    header,
    line,
)
from halox.cli.bench.ranks_command import drawn
from halox.cli.bench.surroundings import machines
from halox.cli.progress import TerminalProgress
from halox.errors import DeviceError, HaloxError, PathError
from halox.runtime.gpu.cuda import why_no_gpu

NAME = "halox bench pingpong"
ABOUT = "messages with different datatypes on both sides, there and back between two ranks"


def add_parser(kinds: Any) -> None:
    """Add ``pingpong`` to what can be measured."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "pingpong", help=ABOUT, description=f"Measure {ABOUT}."
    )
    common.add_arguments(parser)
    parser.add_argument(
        "--patterns",
        type=common.words,
        default=(),
        metavar="A,B",
        help=f"out of {', '.join(PATTERNS)}; default: all",
    )
    parser.add_argument(
        "--sizes",
        type=common.numbers,
        default=(),
        metavar="N,M",
        help="orders of the float64 matrices",
    )
    parser.add_argument(
        "--where",
        type=common.words,
        default=(),
        metavar="A,B",
        help=f"where the arrays are, out of {', '.join(PLACES)}; default: all there are",
    )
    parser.add_argument(
        "--busy", action="store_true", help="also with shares of both GPUs held by other work"
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
        If an option fits nothing, or there are not two ranks.

    Notes
    -----
    Collective; starts two ranks where none run.
    """
    unknown = [place for place in args.where if place not in PLACES]
    if unknown:
        raise HaloxError(f"--where {unknown[0]}: expected one of {', '.join(PLACES)}")
    sizes = args.sizes or (QUICK_SIZES if args.quick else SIZES)
    cases = select(args.patterns, sizes)
    asked = args.ranks
    if asked is None and launcher.running_ranks() is None:
        asked = 2
    comm = run.ranks(asked, [*words, "-n", "2"] if args.ranks is None else words, NAME)
    return run.together(comm, lambda: _run_here(args, comm, cases), NAME)


def _run_here(args: argparse.Namespace, comm: Any, cases: list[PingPong]) -> int:
    if comm.size < 2:
        raise HaloxError("a ping-pong needs two ranks; give -n 2, or start it with mpiexec -n 2")
    # Of more ranks the first two play; the others hear only how it went.
    players = comm.Split(0 if comm.rank < 2 else 1, comm.rank)
    why = next(filter(None, comm.allgather(why_no_gpu())), None)
    places = args.where or (PLACES if why is None else ("host",))
    if why is not None and places != ("host",):
        raise DeviceError(f"--where {','.join(places)}: no GPU can be used: {why}")
    device = "cpu" if why is not None else "gpu"
    result: dict[str, Any] = {"machine": machines(comm, device)}
    with common.written(args, comm, result):
        failed = False
        if comm.rank < 2:
            failed = _play(args, players, places, cases, result)
        failed = bool(comm.bcast(failed))
        players.Free()
    return int(failed)


def _play(
    args: argparse.Namespace,
    comm: Any,
    places: Sequence[str],
    cases: list[PingPong],
    result: dict[str, Any],
) -> bool:
    say, progress = common.say(comm), TerminalProgress(comm.rank)
    device = "cpu" if places == ("host",) else "gpu"
    options = PingPongOptions(
        args.paths,
        not args.no_baselines,
        not args.no_graph,
        args.busy,
        common.timing_of(args),
        why_not_gpu_aware(comm, device),
    )
    say("microseconds of half a round trip, the slower rank's; GB/s of payload\n")
    say(header())
    found: list[PingPongRow] = []
    result["rows"], result["left_out"] = [], {}
    for place in places:
        try:
            bench = PingPongBench(comm, place, options)
        except PathError as error:
            result["left_out"][place] = str(error)
            say(f"left out: {error}")
            continue
        for number, rows in enumerate(bench.run(cases)):
            progress.clear()
            found += rows
            result["rows"] += [row.as_dict() for row in rows]
            for row in rows:
                say(line(row))
            progress(place, number + 1, len(cases))
        progress.clear()

    def draw(folder: Path) -> Sequence[Path]:
        from halox.cli.bench import exchange_plots

        return exchange_plots.draw_pingpong(found, folder)

    drawn(args.plot, comm, draw)
    return any(row.failed for row in found)
