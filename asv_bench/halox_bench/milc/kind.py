"""``halox bench milc``: MILC's staggered operator and conjugate gradient."""

from __future__ import annotations

from halox_bench.common.options import Option, option_of, shapes
from halox_bench.common.plots import Plot
from halox_bench.common.rows import CASE, METHOD, MODE, US, Column, Table
from halox_bench.milc import targets
from halox_bench.milc.cases import OPERATORS, PRECISIONS, SCALINGS, cases
from halox_bench.milc.run import MilcBench
from halox_bench.ranks.runner import Kind

MILC = Kind(
    "milc",
    "MILC's operator and conjugate gradient, beside the speed of memory; strong and weak scaling",
    Table(
        (
            CASE,
            Column("ranks", -5, "ranks"),
            Column("table", 6, "scaling"),
            METHOD._replace(width=28),
            MODE,
            US._replace(head="CG us"),
            Column("GF/s", -8, "cg_gflops", ".1f"),
            Column("/floor", -6, "over_floor", ".3f"),
            Column("exch %", -6, "exchange_share", "%"),
            Column("D us", -9, "dslash_us", ".1f"),
            Column("D GF/s", -8, "dslash_gflops", ".1f"),
            Column("share", -6, "share", ".3f"),
            Column("effic.", -6, "efficiency", ".2f"),
        ),
        "CG us",
    ),
    cases,
    lambda args, comm, where, options: MilcBench(
        comm, options, args.scaling or SCALINGS, usual=not (args.lattices or args.quick)
    ),
    (
        Option(
            "--lattices",
            "sites along x, y, z and t, even numbers; for one rank where they grow with the ranks",
            shapes,
            metavar="XxYxZxT",
        ),
        option_of("--operators", OPERATORS, "operators"),
        option_of("--precisions", tuple(PRECISIONS), "precisions"),
        option_of("--scaling", SCALINGS, "tables on several ranks"),
    ),
    (
        Plot(
            "milc",
            "MILC, an iteration",
            ("scaling",),
            "ranks",
            "ranks",
            label=lambda row: f"{row.operator} {row.precision}",
            wanted=lambda row: bool(row.scaling) and row.kind == "selected",
        ),
    ),
    targets.groups,
    targets.BUDGET_S,
    named="",
    defaults=(
        " Without lattices: 32^4, 36^3x72 and 18^3x36 on GPUs, as far as memory allows, and 16^4 on CPUs. On several"
        " ranks each case is measured on 1, 2, 4, ... of them."
    ),
)
