"""The kinds of ``halox bench`` and their options; ``halox.cli`` calls this module."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from halox_bench.allreduce.kind import ALLREDUCE
from halox_bench.checkpoint.kind import CHECKPOINT
from halox_bench.exchange.kind import EXCHANGE
from halox_bench.milc.kind import MILC
from halox_bench.pack.kind import CONTENTION, PACK
from halox_bench.transpose.kind import TRANSPOSE
from halox_bench.trips.kinds import DDTBENCH, PINGPONG, SCATTER_GATHER

KINDS = {
    kind.name: kind
    for kind in (
        *(PACK, CONTENTION, EXCHANGE, PINGPONG, ALLREDUCE, TRANSPOSE),
        *(DDTBENCH, SCATTER_GATHER, MILC, CHECKPOINT),
    )
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of benchmarks, each with its options."""
    kinds = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for name, kind in KINDS.items():
        description = f"Measure {kind.about}.{kind.defaults}"
        kind.add_arguments(kinds.add_parser(name, help=kind.about, description=description))


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the kind of benchmark that the command line names.

    Parameters
    ----------
    args : argparse.Namespace
        The parsed command line.
    words : sequence of str
        The command line itself, for the ranks that are started.

    Returns
    -------
    int
        0; 1 if a method failed or gave a wrong result.

    Raises
    ------
    HaloxError
        If an option has an invalid value, or this machine has no GPU and the command asks for one.

    Notes
    -----
    Collective on several ranks; becomes the launcher if it has to start them.
    """
    return KINDS[args.bench].run(args, words)
