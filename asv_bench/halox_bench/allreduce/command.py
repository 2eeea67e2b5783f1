"""``halox bench allreduce``: its options and cases."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from halox.collectives.operations import OPERATIONS
from halox.errors import HaloxError
from halox_bench.allreduce.cases import cases
from halox_bench.allreduce.run import AllreduceBench
from halox_bench.common.options import add_list, add_selection
from halox_bench.ranks import command

ABOUT = "allreduces: every algorithm, what halox selects, and what users write by hand"
DEFAULTS = " Without sizes, dtypes or operations: sums of float32 from 4 bytes to 128 MiB, and single values."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halox bench allreduce``."""
    command.add_arguments(parser, "algorithms")
    add_selection(parser)
    sizes = "bytes of each rank's array, as in 8,64KiB,128MiB; at least one element"
    add_list(parser, "--sizes", sizes)
    add_list(parser, "--dtype", "dtypes; default: f4")
    add_list(parser, "--op", f"out of {', '.join(OPERATIONS)}; default: sum")


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run what the command line asks for; see `command.run_cases`."""
    chosen = cases(args.sizes, args.dtype, args.op, quick=args.quick)

    def prepared(comm: Any, device: str) -> AllreduceBench:
        bench = AllreduceBench(comm, command.options_of(args, comm, device, args.algorithms))
        known = bench.known()
        unknown = [name for name in bench.names() if name not in known]
        if unknown:
            allowed = ", ".join(known)
            raise HaloxError(f"--algorithms {unknown[0]}: on a {device} expected {allowed}")
        return bench

    return command.run_cases(args, words, "allreduce", chosen, prepared)
