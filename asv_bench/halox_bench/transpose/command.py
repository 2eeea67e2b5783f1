"""``halox bench transpose``: its options and cases."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from halox_bench.common.options import add_list, add_selection, numbers, shapes, words_of
from halox_bench.ranks import command
from halox_bench.transpose import targets
from halox_bench.transpose.cases import DIRECTIONS, DIVISIONS, METHODS, Wanted, axes_of, cases
from halox_bench.transpose.run import TransposeBench

ABOUT = "transposes in any order of the axes, beside copies, hand-written kernels, NCCL and mpi4py"
DEFAULTS = " Without sizes, axes, dtypes or components: a grid of cases."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halox bench transpose``."""
    command.add_arguments(parser)
    add_selection(parser)
    sizes = "cells of all ranks together, 2 to 4 axes"
    add_list(parser, "--sizes", sizes, read=shapes, metavar="AxB,AxBxC")
    orders = "orders of the axes, as of numpy.transpose; default: all"
    add_list(parser, "--axes", orders, metavar="10,021")
    add_list(parser, "--dtype", "dtypes; default: f8")
    add_list(parser, "--components", "elements of a cell; default: 1", read=numbers)
    for name, known, text in (
        ("--divisions", DIVISIONS, "divisions among the ranks"),
        ("--directions", DIRECTIONS, "directions; of a datatype, forward packs"),
        ("--methods", METHODS, "halox.Transpose, or packing by a datatype of the matrix"),
    ):
        text = f"{text}, out of {', '.join(known)}; default: all"
        add_list(parser, name, text, read=words_of(*known))


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run what the command line asks for; see `command.run_cases`."""
    wanted = Wanted(
        args.sizes,
        axes_of(args.axes),
        args.dtype,
        args.components,
        args.divisions,
        args.directions,
        args.methods,
    )

    def prepared(comm: Any, device: str) -> TransposeBench:
        return TransposeBench(comm, command.options_of(args, comm, device, args.paths))

    chosen = cases(wanted, quick=args.quick)
    on_host = targets.measure_on_host
    return command.run_cases(args, words, "transpose", chosen, prepared, on_host)
