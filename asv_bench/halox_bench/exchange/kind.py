"""``halox bench exchange``: halo exchanges of all ranks."""

from __future__ import annotations

from halox_bench.common.options import Option, numbers, shapes
from halox_bench.common.plots import Plot
from halox_bench.common.rows import CASE, METHOD, MODE, TAKEN, US, Column, Table
from halox_bench.exchange import targets
from halox_bench.exchange.cases import FACES, cases
from halox_bench.exchange.run import ExchangeBench
from halox_bench.ranks.runner import Kind

EXCHANGE = Kind(
    "exchange",
    "halo exchanges: every path, halox's own choice, and hand-written exchanges",
    Table((CASE, Column("bytes", -12, "bytes_each_way", ","), METHOD, TAKEN, MODE, US)),
    cases,
    lambda args, comm, where, options: ExchangeBench(comm, options),
    (
        Option(
            "--sizes",
            "cells a rank: N for N^3, or a shape of 1 to 4 axes, the innermost last",
            shapes,
        ),
        Option("--faces", f"faces to exchange, out of {', '.join(FACES)}; x is the innermost axis"),
        Option("--halo", "halo widths; default: 1", numbers),
        Option("--dtype", "dtypes; default: f8"),
        Option("--fields", "fields of one exchange; default: 1", numbers),
        Option("--outer", "spread ranks over the outermost axes first, not the innermost", None),
    ),
    (
        Plot(
            "exchange",
            "Halo exchange",
            ("axes", "faces", "dtype", "components", "halo", "fields"),
            "bytes_each_way",
            "bytes a rank sends",
        ),
    ),
    targets.groups,
    targets.BUDGET_S,
    defaults=" Without sizes, faces, halos, dtypes or numbers of fields: a grid of cases.",
)
