"""Figures of MILC with their targets."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from halox_bench.common.rows import Row, right
from halox_bench.common.targets import Figure, Groups, figure, limited
from halox_bench.milc.baselines import PIECES, WHOLE
from halox_bench.milc.cases import (
    IMPROVED,
    LATTICES,
    NAIVE,
    OPERATORS,
    PRECISIONS,
    MilcCase,
    scaled,
)
from halox_bench.milc.run import MilcBench
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import Timing

BUDGET_S = 40.0
TIMING = {"gpu": Timing(batches=5, batch_s=3e-3), "cpu": Timing(batches=15, batch_s=3e-3)}

SHARES = {IMPROVED: 0.70, NAIVE: 0.75}
"""Least shares of a copy's speed that D reaches."""

OF_FLOORS = 1.25
OF_WHOLE_ARRAYS = 1.5

_BESIDE = ("stream_us", "dslash_us", "exchange_us", "dslash_gflops", "cg_gflops", "exchange_share")


def groups(args: argparse.Namespace | None, comm: Any, device: str) -> Groups:
    """Return the groups of figures: with targets on one rank, tables of scaling on several."""
    baselines = () if device == "gpu" else None
    bench = MilcBench(comm, Options(device, baselines=baselines, timing=TIMING[device]))
    return groups_on(bench, LATTICES[device][:2])


def groups_on(bench: MilcBench, lattices: Sequence[tuple[int, int, int, int]]) -> Groups:
    """Return the groups of figures of some lattices."""
    if bench.comm.size > 1:
        case = MilcCase(lattices[0])
        return {case.name: partial(on_several, bench, case)}
    every = (MilcCase(*one) for one in product(lattices, OPERATORS, PRECISIONS))
    return {case.name: partial(on_one, bench, case) for case in every}


def on_one(bench: MilcBench, case: MilcCase) -> Iterator[Figure]:
    """Measure D and an iteration on one rank."""
    row = _measured(bench, case)
    if bench.stage.device is None:
        for name in (WHOLE, PIECES):
            yield limited(
                f"MILC {case.name}, NumPy arrays: an iteration over {name}",
                (row.us or 0.0) / row.beside[name],
                "x its time",
                OF_WHOLE_ARRAYS,
                row.beside[name],
                f"us of {name}",
                **_others(row),
            )
        return
    yield figure(
        f"MILC {case.name}: D's share of the speed of a copy",
        row.share,
        "share",
        SHARES[case.operator],
        row.copy_bytes_per_us / 1e3,
        "GB/s of a device copy in the same run, read and written",
        **_others(row),
    )
    yield limited(
        f"MILC {case.name}: an iteration over its kernels' bytes at the speed of a copy",
        row.over_floor,
        "x the time",
        OF_FLOORS,
        (row.us or 0.0) / row.over_floor,
        "us of the bytes",
        **_others(row),
    )


def on_several(bench: MilcBench, case: MilcCase) -> Iterator[Figure]:
    """Measure strong and weak scaling."""
    for one in scaled(case, bench.comm.size):
        row = _measured(bench, one)
        yield figure(
            f"MILC {one.name}, {one.scaling} scaling, {one.ranks} of {bench.comm.size} ranks",
            row.cg_gflops,
            "GFLOPS",
            None,
            row.details.get("efficiency"),
            "rate of a rank over that of one alone",
            **_others(row),
        )


def _measured(bench: MilcBench, case: MilcCase) -> Row:
    row = right(bench.measure(case))[0]
    if row.us is None:
        raise RuntimeError(row.error)
    return row


def _others(row: Row) -> dict[str, Any]:
    """Return further entries of a figure."""
    found = {name: row.details.get(name) for name in _BESIDE} | {"iteration_us": row.us}
    return {"mode": row.mode, **{name: value and round(value, 3) for name, value in found.items()}}
