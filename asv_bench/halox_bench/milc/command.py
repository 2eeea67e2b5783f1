"""``halox bench milc``: its options and cases."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from halox_bench.common.options import add_list, add_selection, shapes, words_of
from halox_bench.milc import targets
from halox_bench.milc.cases import (
    LATTICES,
    OPERATORS,
    PRECISIONS,
    QUICK_LATTICES,
    SCALINGS,
    cases,
)
from halox_bench.milc.run import MilcBench
from halox_bench.ranks import command

ABOUT = (
    "MILC's operator and conjugate gradient, beside the speed of memory; strong and weak scaling"
)
DEFAULTS = (
    " Without lattices: 32^4, 36^3x72 and 18^3x36 on GPUs, as far as memory allows, and 16^4 on CPUs. On several ranks"
    " each case is measured on 1, 2, 4, ... of them."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halox bench milc``."""
    command.add_arguments(parser, None)
    add_selection(parser)
    sites = "sites along x, y, z and t, even numbers; for one rank where they grow with the ranks"
    add_list(parser, "--lattices", sites, read=shapes, metavar="XxYxZxT")
    for name, known, text in (
        ("--operators", OPERATORS, "operators"),
        ("--precisions", tuple(PRECISIONS), "precisions"),
        ("--scaling", SCALINGS, "tables on several ranks"),
    ):
        text = f"{text}, out of {', '.join(known)}; default: all"
        add_list(parser, name, text, read=words_of(*known))


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run what the command line asks for; see `command.run_cases`."""

    usual = not (args.lattices or args.quick)
    lattices = args.lattices or (QUICK_LATTICES if args.quick else sum(LATTICES.values(), ()))

    def prepared(comm: Any, device: str) -> MilcBench:
        options = command.options_of(args, comm, device, None)
        return MilcBench(comm, options, args.scaling or SCALINGS, usual=usual)

    chosen = cases(lattices, args.operators, args.precisions)
    on_host = targets.measure_on_host
    return command.run_cases(args, words, "milc", chosen, prepared, on_host)
