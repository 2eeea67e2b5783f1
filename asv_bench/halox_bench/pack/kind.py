"""``halox bench pack`` and ``contention``: packing of many layouts on one process."""

from __future__ import annotations

import argparse
from typing import Any

from halox.errors import DeviceError
from halox_bench.common.machine import why_no_gpu
from halox_bench.common.options import Option, positive, words_of
from halox_bench.common.plots import Plot
from halox_bench.common.rig import DESTINATIONS
from halox_bench.common.rows import METHOD, Column, Row, Table
from halox_bench.common.targets import Groups
from halox_bench.pack import contention, targets
from halox_bench.pack.cases import select
from halox_bench.pack.on_device import DeviceBench
from halox_bench.pack.on_host import HostBench
from halox_bench.pack.options import DIRECTIONS, PACKERS, PackOptions
from halox_bench.pack.rows import COPY
from halox_bench.ranks.bench import Bench, Options
from halox_bench.ranks.runner import ALONE, Kind


def _bench(args: argparse.Namespace, comm: Any, device: str, options: Options) -> Bench:
    kind = HostBench if device == "cpu" else DeviceBench
    return kind(PackOptions.of(args))


def _targets(args: argparse.Namespace | None, comm: Any, device: str) -> Groups | None:
    return None if device == "cpu" else targets.groups()


def _contention(args: argparse.Namespace, comm: Any, device: str, options: Options) -> Bench:
    if device == "cpu":
        raise DeviceError(f"contention needs a GPU: {why_no_gpu() or 'not with --device cpu'}")
    return contention.ContentionBench()


def number(name: str) -> Any:
    """Return a function that gives a row's number as text, or a dash."""

    def text(row: Row) -> str:
        value = getattr(row, name)
        if value is None:
            return "-"
        return f"{value:.2f}" if 1 <= value < 10_000 else f"{value:.4g}"

    return text


_US = Column("us", -9, number("us"))

PACK = Kind(
    "pack",
    "packing of many layouts, beside CUDA's copies and hand-written kernels",
    Table(
        (
            Column("pattern", 16, "pattern"),
            Column("size", 14, "size"),
            Column("payload", -11, "payload_bytes", ","),
            Column("dir", 6, "direction"),
            Column("to", 6, "destination"),
            Column("cache", 5, "cache"),
            METHOD._replace(width=22),
            _US,
            Column("graph us", -9, number("graph_us")),
            Column("host us", -8, number("host_us")),
            Column("GB/s", -8, number("gb_per_s")),
            Column("% copy", -7, "of_copy", "%"),
            Column("% bound", -7, "of_bound", "%"),
            Column("x best", -7, number("speedup")),
            Column("", 1, "note"),
        ),
        compares=False,
    ),
    lambda args: select(args.patterns, quick=args.quick),
    _bench,
    (
        Option("--patterns", "patterns, or pattern/size, with wildcards; default: all"),
        Option("--methods", f"packers on a GPU, out of {', '.join(PACKERS)}", words_of(*PACKERS)),
        Option(
            "--destinations",
            "memory of the packed bytes: device, host (mapped and pinned), peer; default: all",
            words_of(*DESTINATIONS),
        ),
        Option("--direction", "pack, unpack; default: pack", words_of(*DIRECTIONS)),
        Option("--max-blocks", "most thread blocks of a launch", positive, None, "N"),
    ),
    (
        Plot(
            "bandwidth",
            "Packing",
            ("direction", "destination"),
            "payload_bytes",
            "payload, bytes",
            "gb_per_s",
            "GB/s of payload",
            lambda row: row.name if row.name == COPY else f"{row.pattern}, {row.name}",
            lambda row: row.cache != "cold" and row.name in ("auto", "host", COPY),
        ),
        Plot(
            "methods",
            "Packing a vector",
            ("direction", "destination"),
            "block_bytes",
            "block, bytes",
            label=lambda row: f"{row.name}, {row.payload_bytes:,} bytes",
            wanted=lambda row: row.pattern == "vector" and row.cache != "cold",
        ),
    ),
    _targets,
    60.0,
    named="",
    ranks=ALONE,
)

CONTENTION = Kind(
    "contention",
    "packing while other work holds multiprocessors or copies over the host link",
    Table(
        (
            Column("case", 18, "case"),
            Column("to", 6, "destination"),
            METHOD._replace(width=12),
            Column("blocks", -6, "max_blocks"),
            Column("neighbour", 22, "neighbour"),
            Column("alone us", -9, number("alone_us")),
            _US,
            Column("slow-down", -9, "slowdown", ".3f"),
            Column("", 1, "note"),
        ),
        compares=False,
    ),
    contention.cases,
    _contention,
    named="",
    ranks=ALONE,
)
