"""``halox bench checkpoint``: its options and its table."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from halox.cli import run as running
from halox.errors import HaloxError
from halox_bench.checkpoint.run import CPU_TARGET, GPU_TARGET, TARGET_MIB, measure
from halox_bench.common.machine import device_of, machines
from halox_bench.common.options import add_list, positive, shapes
from halox_bench.common.tables import Table
from halox_bench.ranks.command import say, written

NAME = "halox bench checkpoint"
ABOUT = "saves and loads of a field by all ranks, beside plain writes and reads of the same bytes"

_CELLS, _QUICK_CELLS = ((512, 512, 512),), ((64, 64, 64),)
_TABLE = Table(
    {
        "method": 20,
        "ranks": -5,
        "MiB": -7,
        "s": -8,
        "GB/s": -6,
        "x plain": -7,
        "extra MiB": -9,
        "targets": 24,
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``halox bench checkpoint``."""
    parser.add_argument(
        "-n",
        "--ranks",
        type=positive,
        metavar="RANKS",
        help="ranks to start on this machine (default: those of a surrounding mpiexec)",
    )
    add_list(
        parser, "--cells", "grids of float64; default: 512x512x512", read=shapes, metavar="N,MxL"
    )
    add_list(
        parser,
        "--onto",
        "process grids on which the field is loaded as well, such as 1x1x4",
        read=shapes,
        metavar="PxQ,...",
    )
    add_list(parser, "--codecs", "codecs of Zarr, each measured as well, such as zstd")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where to write; default: a temporary folder"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--repeats", type=positive, metavar="N", help="rounds; default: 5")
    parser.add_argument("--quick", action="store_true", help="64^3 cells, 2 rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.set_defaults(plot=None)


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run what the command line asks for; the same as for `halox_bench.command.run`.

    Notes
    -----
    Collective; becomes the launcher where ranks are to be started.
    """
    comm = running.ranks(args.ranks, words, NAME)
    return running.together(comm, lambda: _measure(args, comm), NAME)


def _measure(args: argparse.Namespace, comm: Any) -> int:
    device = device_of(args.device, comm)
    result: dict[str, Any] = {"machine": machines(comm, device), "rows": []}
    rounds = args.repeats or (2 if args.quick else 5)
    with written(args, comm, result):
        parent = args.folder
        if comm.bcast(parent is not None and not parent.is_dir()):
            raise HaloxError(f"--folder {parent}: there is no such folder")
        own = tempfile.mkdtemp(prefix="halox-bench-", dir=parent) if comm.rank == 0 else None
        folder = Path(comm.bcast(own))
        say(comm, "medians of the slowest rank; files are written through, and read from the disk")
        say(
            comm,
            f"targets, from 1 GiB on: {CPU_TARGET} x plain calls, and {TARGET_MIB} MiB a rank;",
        )
        say(
            comm,
            f"for saves from a GPU {GPU_TARGET} x the longer of plain write and copy to the host\n",
        )
        say(comm, _TABLE.header())
        try:
            for shape in args.cells or (_QUICK_CELLS if args.quick else _CELLS):
                for row in measure(comm, shape, folder, device, args.codecs, args.onto, rounds):
                    result["rows"].append(row.as_dict())
                    cells = [row.name, str(row.ranks), f"{row.nbytes / 2**20:.0f}"]
                    cells += [f"{row.seconds:.3f}", f"{row.gb_per_s:.2f}", f"{row.ratio:.2f}"]
                    cells += ["?" if row.extra_mib is None else f"{row.extra_mib:.0f}", row.verdict]
                    say(comm, _TABLE.line(cells))
        finally:
            if comm.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
    return 0
