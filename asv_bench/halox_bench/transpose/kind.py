"""``halox bench transpose``: transposes on one rank and between ranks."""

from __future__ import annotations

from halox_bench.common.options import Option, numbers, option_of, shapes
from halox_bench.common.plots import Plot
from halox_bench.common.rows import CASE, METHOD, MODE, TAKEN, US, Column, Row, Table
from halox_bench.ranks.runner import Kind
from halox_bench.transpose import targets
from halox_bench.transpose.baselines import COPY
from halox_bench.transpose.cases import DIRECTIONS, DIVISIONS, METHODS, axes_of, cases
from halox_bench.transpose.run import TransposeBench


def of_copy(row: Row) -> float | None:
    """Return a row's speed as a share of a plain copy's."""
    return row.beside[COPY] / (row.us or 1.0) if COPY in row.beside else None


TRANSPOSE = Kind(
    "transpose",
    "transposes in any order of the axes, beside copies, cuTENSOR, NCCL and mpi4py",
    Table(
        (
            CASE._replace(width=46),
            Column("bytes sent", -13, "bytes_sent", ","),
            METHOD._replace(width=28),
            TAKEN,
            MODE,
            US,
            Column("% copy", -7, of_copy, "%"),
        )
    ),
    cases,
    lambda args, comm, where, options: TransposeBench(comm, options),
    (
        Option("--sizes", "cells of all ranks together, 2 to 4 axes", shapes, metavar="AxB,AxBxC"),
        Option("--axes", "orders of the axes, as of numpy.transpose; default: all", axes_of),
        Option("--dtype", "dtypes; default: f8"),
        Option("--components", "elements of a cell; default: 1", numbers),
        option_of("--divisions", DIVISIONS, "divisions among the ranks"),
        option_of("--directions", DIRECTIONS, "directions; of a datatype, forward packs"),
        option_of("--methods", METHODS, "halox.Transpose, or packing by a datatype of the matrix"),
    ),
    (
        Plot(
            "transpose",
            "Transpose",
            ("method", "order", "division", "direction", "dtype", "components"),
            "nbytes",
            "bytes of a rank's block",
        ),
    ),
    targets.groups,
    targets.BUDGET_S,
    defaults=" Without sizes, axes, dtypes or components: a grid of cases.",
)
