"""``halox bench checkpoint``: saves and loads of a field by all ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from halox_bench.checkpoint.run import CheckpointBench, CheckpointCase
from halox_bench.common.options import Option, shapes
from halox_bench.common.rows import METHOD, Column, Table
from halox_bench.ranks.bench import Bench, Options
from halox_bench.ranks.runner import Kind

_CELLS, _QUICK_CELLS = ((512, 512, 512),), ((64, 64, 64),)


def _cases(args: argparse.Namespace) -> list[CheckpointCase]:
    cells = args.cells or (_QUICK_CELLS if args.quick else _CELLS)
    return [CheckpointCase(shape, args.codecs, args.onto) for shape in cells]


def _bench(args: argparse.Namespace, comm: Any, device: str, options: Options) -> Bench:
    return CheckpointBench(comm, args.folder, device, args.repeats or (2 if args.quick else 5))


CHECKPOINT = Kind(
    "checkpoint",
    "saves and loads of a field by all ranks, beside plain writes and reads of the same bytes",
    Table(
        (
            Column("case", 16, "case"),
            METHOD._replace(width=20),
            Column("ranks", -5, "ranks"),
            Column("MiB", -7, lambda row: row.nbytes / 2**20, ".0f"),
            Column("s", -8, "seconds", ".3f"),
            Column("GB/s", -6, "gb_per_s", ".2f"),
            Column("x plain", -7, "ratio", ".2f"),
            Column(
                "extra MiB",
                -9,
                lambda row: "?" if row.extra_mib is None else f"{row.extra_mib:.0f}",
            ),
            Column("targets", 24, "verdict"),
        ),
        "s",
        compares=False,
    ),
    _cases,
    _bench,
    (
        Option("--cells", "grids of float64; default: 512x512x512", shapes, metavar="N,MxL"),
        Option(
            "--onto", "process grids on which the field is loaded as well, such as 1x1x4", shapes
        ),
        Option("--codecs", "codecs of Zarr, each measured as well, such as zstd"),
        Option(
            "--folder", "where to write; default: a temporary folder", Path, None, metavar="DIR"
        ),
    ),
    named="",
)
