"""``halox bench exchange``: its options and cases."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from halox_bench.common.options import add_list, add_selection, numbers, shapes
from halox_bench.exchange.cases import FACES, Wanted, cases
from halox_bench.exchange.run import Bench
from halox_bench.exchange.targets_host import measure as on_host
from halox_bench.ranks import command

ABOUT = "halo exchanges: every path, what halox selects, and what users write by hand"
DEFAULTS = " Without sizes, faces, halos, dtypes or numbers of fields: a grid of cases."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halox bench exchange``."""
    command.add_arguments(parser)
    add_selection(parser)
    sizes = "cells a rank: N for N^3, or a shape of 1 to 4 axes, the innermost last"
    add_list(parser, "--sizes", sizes, read=shapes, metavar="N,AxB")
    faces = f"what is exchanged, out of {', '.join(FACES)} (x is the innermost axis)"
    add_list(parser, "--faces", faces)
    add_list(parser, "--halo", "halo widths; default: 1", read=numbers)
    add_list(parser, "--dtype", "dtypes; default: f8")
    add_list(parser, "--fields", "fields of one exchange; default: 1", read=numbers)
    text = "spread ranks over the outermost axes first, not the innermost"
    parser.add_argument("--outer", action="store_true", help=text)


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run what the command line asks for; see `command.run_cases`."""
    wanted = Wanted(args.sizes, args.faces, args.halo, args.dtype, args.fields, args.outer)

    def prepared(comm: Any, device: str) -> Bench:
        return Bench(comm, command.options_of(args, comm, device, args.paths))

    chosen = cases(wanted, quick=args.quick)
    return command.run_cases(args, words, "exchange", chosen, prepared, on_host)
