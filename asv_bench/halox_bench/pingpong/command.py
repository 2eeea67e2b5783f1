"""``halox bench pingpong``: its options, and the two ranks that play."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from halox.cli import launcher
from halox.cli import run as running
from halox.errors import DeviceError, HaloxError, PathError
from halox_bench.common import machine, options
from halox_bench.common.options import add_list, numbers
from halox_bench.pingpong import plots, rows
from halox_bench.pingpong.cases import PATTERNS, QUICK_SIZES, SIZES, PingPong, select
from halox_bench.pingpong.rows import PingPongRow
from halox_bench.pingpong.run import PLACES, PingPongBench
from halox_bench.ranks import command
from halox_bench.ranks.command import say

NAME = "halox bench pingpong"
ABOUT = "messages with different datatypes on both sides, there and back between two ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halox bench pingpong``."""
    command.add_arguments(parser)
    add_list(parser, "--patterns", f"out of {', '.join(PATTERNS)}; default: all")
    add_list(parser, "--sizes", "orders of the float64 matrices", read=numbers, metavar="N,M")
    where = f"where the arrays are, out of {', '.join(PLACES)}; default: all there are"
    add_list(parser, "--where", where)
    parser.add_argument(
        "--busy", action="store_true", help="also with shares of both GPUs held by other work"
    )


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run what the command line asks for; the same as for `halox_bench.command.run`, on two ranks.

    Notes
    -----
    Collective; starts two ranks where none run.
    """
    unknown = [place for place in args.where if place not in PLACES]
    if unknown:
        raise HaloxError(f"--where {unknown[0]}: expected one of {', '.join(PLACES)}")
    cases = select(args.patterns, args.sizes or (QUICK_SIZES if args.quick else SIZES))
    asked = args.ranks
    if asked is None and launcher.running_ranks() is None:
        asked = 2
    comm = running.ranks(asked, [*words, "-n", "2"] if args.ranks is None else words, NAME)
    return running.together(comm, lambda: _run_here(args, comm, cases), NAME)


def _run_here(args: argparse.Namespace, comm: Any, cases: list[PingPong]) -> int:
    if comm.size < 2:
        raise HaloxError("a ping-pong needs two ranks; give -n 2, or start it with mpiexec -n 2")
    # Of more ranks the first two play; the others hear only how it went.
    players = comm.Split(0 if comm.rank < 2 else 1, comm.rank)
    why = next(filter(None, comm.allgather(machine.why_no_gpu())), None)
    places = args.where or (PLACES if why is None else ("host",))
    if why is not None and places != ("host",):
        raise DeviceError(f"--where {','.join(places)}: no GPU can be used: {why}")
    device = "cpu" if why is not None else "gpu"
    result: dict[str, Any] = {"machine": machine.machines(comm, device)}
    with command.written(args, comm, result):
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
    device = "cpu" if places == ("host",) else "gpu"
    chosen = command.options_of(args, comm, device, args.paths)
    say(comm, "microseconds of half a round trip, the slower rank's; GB/s of payload\n")
    say(comm, rows.header())
    found: list[PingPongRow] = []
    result["rows"], result["left_out"] = [], {}
    for place in places:
        try:
            bench = PingPongBench(comm, place, chosen)
        except PathError as error:
            result["left_out"][place] = str(error)
            say(comm, f"left out: {error}")
            continue
        found += command.measured(bench, cases, result, place)
    if comm.rank == 0:
        options.draw(args.plot, partial(plots.draw, found))
    return any(row.failed for row in found)
