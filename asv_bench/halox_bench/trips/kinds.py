"""Declarations of ``halox bench pingpong``, ``ddtbench`` and ``scatter_gather``."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from halox.paths.messages import Message, Part
from halox.paths.scatter_gather.mlx5_umr import key_limits
from halox.paths.scatter_gather.windows import MessageBlocks, agreed_chunk, propose
from halox_bench.common.options import Option, numbers
from halox_bench.common.plots import Plot
from halox_bench.common.rows import METHOD, MODE, TAKEN, US, Column, Row, Table
from halox_bench.ranks.bench import Options
from halox_bench.ranks.runner import TWO, Kind
from halox_bench.trips import targets
from halox_bench.trips.cases import PINGPONGS, TripCase, ddtbench, pingpongs, scatter_gather
from halox_bench.trips.run import TripBench

_MOST_MESSAGE_BYTES = 1 << 30


def label(row: Row) -> str:
    """Return the name of a row's method, with the share of the GPU that other work holds."""
    return f"{row.name}, {row.held:.0%} held" if row.held else row.name


def adapter_keys(case: TripCase) -> int:
    """Return how many keys a network adapter of the ``mlx5_umr`` engine takes at each end; no adapter is asked."""
    limits = key_limits(_MOST_MESSAGE_BYTES)
    there = case.directions(0)[0].sends[1], case.directions(1)[0].receives[0]
    first, second = (
        propose(MessageBlocks.of(Message(1, "send", (Part(0, datatype),))), limits)
        for datatype in there
    )
    chunk = agreed_chunk(first, second, case.nbytes)
    assert chunk is not None
    return -(-case.nbytes // chunk)


class ScatterGatherBench(TripBench):
    """Two ranks with slabs that each other's rank can map; rows tell the keys of a network adapter."""

    def __init__(self, comm: Any, place: str, options: Options) -> None:
        super().__init__(comm, place, options, mapped=True)

    def blank(self, case: Any, kind: str, name: str, **details: Any) -> Row:
        return super().blank(case, kind, name, **details, adapter_keys=adapter_keys(case))


_CASE = (
    Column("where", 6, "place"),
    Column("pattern", 18, "pattern"),
    Column("size", 12, "size"),
    Column("bytes", -12, "nbytes", ","),
)
_METHOD = (METHOD._replace(of=label), TAKEN, MODE, US, Column("GB/s", -8, "gb_per_s", ".2f"))
_PHASES = tuple(
    Column(head, -9, f"{phase}_us", ".2f")
    for head, phase in (("pack", "pack"), ("comm", "communicate"), ("unpack", "unpack"))
)


def _plot(name: str, title: str) -> tuple[Plot, ...]:
    """Return the figures of a kind: a line for each method, over the bytes, by pattern and place."""

    def of_row(row: Row) -> str:
        return f"{label(row)}, {row.mode}"

    label_y = "us of half a round trip"
    return (Plot(name, title, ("pattern", "place"), "nbytes", "bytes", "us", label_y, of_row),)


_BUSY = Option("--busy", "also with shares of each GPU held by another kernel", None)
_PATTERNS = Option("--patterns", "patterns, or pattern/size, with wildcards; default: all")


def _bench(args: argparse.Namespace, comm: Any, place: str, options: Options) -> TripBench:
    return TripBench(comm, place, options)


_two = partial(Kind, ranks=TWO)

PINGPONG = _two(
    "pingpong",
    "messages with different datatypes on both sides, there and back between two ranks",
    Table((*_CASE, *_METHOD)),
    pingpongs,
    _bench,
    (
        Option("--patterns", f"out of {', '.join(PINGPONGS)}; default: all"),
        Option("--sizes", "orders of the float64 matrices", numbers, metavar="N,M"),
        _BUSY,
    ),
    _plot("pingpong", "Ping-pong"),
)

DDTBENCH = _two(
    "ddtbench",
    "all patterns of DDTBench between two ranks, phase by phase, beside MPI's types and packing by hand",
    Table((*_CASE, *_METHOD, *_PHASES)),
    ddtbench,
    _bench,
    (_PATTERNS,),
    _plot("ddtbench", "DDTBench"),
    targets.of_host_packing,
    90.0,
)

SCATTER_GATHER = _two(
    "scatter_gather",
    "strided messages between two ranks without packing, with and without key caches, beside every other path",
    Table(
        (
            *_CASE[:3],
            Column("blocks", -6, "blocks", ","),
            Column("of bytes", -8, "block_bytes", ","),
            Column("adapter", -7, "adapter_keys"),
            Column("keys", -5, "keys"),
            *_METHOD,
            Column("map us", -8, "map_us", ".1f"),
        )
    ),
    scatter_gather,
    lambda args, comm, place, options: ScatterGatherBench(comm, place, options),
    (_PATTERNS, _BUSY),
    _plot("scatter_gather", "Without packing"),
    targets.without_packing,
    40.0,
)
