"""The kinds of ``halox bench`` and their options; ``halox.cli`` forwards to here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from halox_bench.allreduce import command as allreduce
from halox_bench.checkpoint import command as checkpoint
from halox_bench.ddtbench import command as ddtbench
from halox_bench.exchange import command as exchange
from halox_bench.milc import command as milc
from halox_bench.pack import command as pack
from halox_bench.pingpong import command as pingpong
from halox_bench.scatter_gather import command as scatter_gather
from halox_bench.transpose import command as transpose

KINDS = {
    "pack": pack,
    "exchange": exchange,
    "pingpong": pingpong,
    "allreduce": allreduce,
    "transpose": transpose,
    "ddtbench": ddtbench,
    "scatter_gather": scatter_gather,
    "milc": milc,
    "checkpoint": checkpoint,
}
"""Each a module with ``ABOUT``, ``add_arguments(parser)`` and ``run(args, words)``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the kinds of benchmarks, each with its options."""
    kinds = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for name, kind in KINDS.items():
        description = f"Measure {kind.ABOUT}." + getattr(kind, "DEFAULTS", "")
        kind.add_arguments(kinds.add_parser(name, help=kind.ABOUT, description=description))


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
        If an option fits nothing, or a GPU is asked for and there is none.

    Notes
    -----
    Collective where it runs on several ranks.
    """
    status: int = KINDS[args.bench].run(args, words)
    return status
