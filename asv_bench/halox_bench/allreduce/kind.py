"""``halox bench allreduce``: allreduces of all ranks."""

from __future__ import annotations

from typing import Any

from halox.collectives.operations import OPERATIONS
from halox_bench.allreduce import targets
from halox_bench.allreduce.baselines import HOST_STAGED, MPI
from halox_bench.allreduce.cases import cases
from halox_bench.allreduce.run import AllreduceBench
from halox_bench.common.options import Option
from halox_bench.common.plots import Plot
from halox_bench.common.rows import BASELINE, CASE, METHOD, MODE, TAKEN, US, Column, Row, Table
from halox_bench.ranks.runner import Kind


def pays_after(row: Row) -> Any:
    """Return the calls that amortise a row's set-up, against MPI or staging through the host."""
    if row.kind == BASELINE or row.details.get("setup_us") is None:
        return None
    calls = next((row.pays_after[one] for one in (MPI, HOST_STAGED) if one in row.pays_after), None)
    return "never" if calls is None else f"{calls} calls"


ALLREDUCE = Kind(
    "allreduce",
    "allreduces: every algorithm, halox's own choice, and hand-written allreduces",
    Table(
        (
            CASE._replace(width=20),
            Column("bytes", -11, "nbytes", ","),
            METHOD._replace(width=26),
            TAKEN._replace(head="algorithm", width=26),
            MODE,
            US,
            Column("set-up us", -10, "setup_us", ".0f"),
            Column("pays after", 10, pays_after),
        )
    ),
    cases,
    lambda args, comm, where, options: AllreduceBench(comm, options),
    (
        Option("--sizes", "bytes of each rank's array, as in 8,64KiB,128MiB; at least one element"),
        Option("--dtype", "dtypes; default: f4"),
        Option("--op", f"out of {', '.join(OPERATIONS)}; default: sum"),
    ),
    (Plot("allreduce", "Allreduce", ("dtype", "op"), "nbytes", "bytes of a rank's array"),),
    targets.groups,
    targets.BUDGET_S,
    named="algorithms",
    defaults=" Without sizes, dtypes or operations: sums of float32 from 4 bytes to 128 MiB, and single values.",
)
