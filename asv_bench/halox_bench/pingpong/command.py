"""``halox bench pingpong``: its options, and the two ranks that play."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from halox.cli import launcher
from halox.cli import run as running
from halox.errors import DeviceError, HaloxError, PathError
from halox_bench.common import machine, options
from halox_bench.common.options import add_list, numbers
from halox_bench.pingpong import plots
from halox_bench.pingpong.cases import PATTERNS, QUICK_SIZES, SIZES, PingPong, select
from halox_bench.pingpong.run import PLACES, PingPongBench
from halox_bench.ranks import command
from halox_bench.ranks.bench import Options, RanksBench
from halox_bench.ranks.command import say

NAME = "halox bench pingpong"
ABOUT = "messages with different datatypes on both sides, there and back between two ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halox bench pingpong``."""
    command.add_arguments(parser)
    add_list(parser, "--patterns", f"out of {', '.join(PATTERNS)}; default: all")
    add_list(parser, "--sizes", "orders of the float64 matrices", read=numbers, metavar="N,M")
    add_where(parser)
    parser.add_argument(
        "--busy", action="store_true", help="also with shares of both GPUs held by other work"
    )


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run what the command line asks for; the same as for `halox_bench.command.run`, on two ranks.

    Notes
    -----
    Collective; starts two ranks where none run.
    """
    check_places(args)
    cases = select(args.patterns, args.sizes or (QUICK_SIZES if args.quick else SIZES))
    return between_two(args, words, NAME, partial(_play, cases=cases))


def add_where(parser: argparse.ArgumentParser) -> None:
    """Add the option of the places of arrays, which `check_places` checks."""
    where = f"where the arrays are, out of {', '.join(PLACES)}; default: all there are"
    add_list(parser, "--where", where)


def add_patterns(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose and list cases by pattern and size, and that of places."""
    parser.add_argument("--list", action="store_true", help="list the cases and end")
    add_list(parser, "--patterns", "patterns, or pattern/size, with wildcards; default: all")
    add_where(parser)


def check_places(args: argparse.Namespace) -> None:
    """Raise `HaloxError` unless ``--where`` names places."""
    unknown = [place for place in args.where if place not in PLACES]
    if unknown:
        raise HaloxError(f"--where {unknown[0]}: expected one of {', '.join(PLACES)}")


Play = Callable[[argparse.Namespace, Any, Sequence[str], dict[str, Any]], bool]
"""Measures in some places between two ranks, puts rows into a result, and returns whether any failed."""


def between_two(args: argparse.Namespace, words: Sequence[str], name: str, play: Play) -> int:
    """Let two ranks play, which are started where none run; returns the exit status.

    Raises
    ------
    HaloxError
        On all ranks, if there are fewer than two, or GPUs are asked for and there are none.

    Notes
    -----
    Collective.
    """
    asked = args.ranks
    if asked is None and launcher.running_ranks() is None:
        asked = 2
    comm = running.ranks(asked, [*words, "-n", "2"] if args.ranks is None else words, name)
    return running.together(comm, lambda: _run_here(args, comm, play), name)


def _run_here(args: argparse.Namespace, comm: Any, play: Play) -> int:
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
            failed = play(args, players, places, result)
        failed = bool(comm.bcast(failed))
        players.Free()
    return int(failed)


def _play(
    args: argparse.Namespace,
    comm: Any,
    places: Sequence[str],
    result: dict[str, Any],
    cases: list[PingPong],
) -> bool:
    found = played(args, comm, places, result, cases, PingPongBench)
    if comm.rank == 0:
        options.draw(args.plot, partial(plots.draw, found))
    return any(row.failed for row in found)


def played(
    args: argparse.Namespace,
    comm: Any,
    places: Sequence[str],
    result: dict[str, Any],
    cases: Sequence[Any],
    make: Callable[[Any, str, Options], RanksBench[Any]],
) -> list[Any]:
    """Measure cases in some places, print and keep the rows; a place that is not there is left out; collective."""
    device = "cpu" if places == ("host",) else "gpu"
    chosen = command.options_of(args, comm, device, args.paths)
    found: list[Any] = []
    result["rows"], result["left_out"] = [], {}
    is_first = True
    for place in places:
        try:
            bench = make(comm, place, chosen)
        except PathError as error:
            result["left_out"][place] = str(error)
            say(comm, f"left out: {error}")
            continue
        if is_first:
            say(comm, f"{bench.heading()}\n\n{bench.header()}")
            is_first = False
        found += command.measured(bench, cases, result, place)
    return found
