"""Figures of exchanges of NumPy arrays with their targets: beside what users write by hand, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from halox_bench.common.targets import Figure, Progress, figure, measured
from halox_bench.exchange.baselines import BY_HAND
from halox_bench.exchange.cases import ExchangeCase
from halox_bench.exchange.run import Bench, Prepared
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import Timing
from halox_bench.ranks.rows import SELECTED

BUDGET_S = 60.0
TIMING = Timing(batches=41, batch_s=1.5e-3)

SHAPES = ((64, 64), (512, 512), (2048, 2048), (32, 32, 32), (128, 128, 128))
"""Cells a rank."""

OF_BY_HAND = {1: 1.0, 2: 1.5, 4: 1.0}
"""The speed of exchanges by hand, at least, by the number of ranks; others are there to be seen."""

_CONVENIENT = "grid.exchange"


def measure(
    comm: Any,
    *,
    budget_s: float = BUDGET_S,
    progress: Progress = lambda what, done, total: None,
) -> list[Figure]:
    """Measure them on the ranks at hand, collectively; see `measured`."""
    bench = Bench(comm, Options("cpu", (), (BY_HAND,), timing=TIMING))
    groups = {case.name: partial(_figures, bench, case) for case in cases(comm.size)}
    return measured(groups, budget_s, progress, comm)


def cases(ranks: int) -> list[ExchangeCase]:
    """Return exchanges with all neighbours: ranks along the outermost axes first, and along the innermost."""
    found = [ExchangeCase(shape, "all", outer=outer) for shape in SHAPES for outer in (True, False)]
    seen = {(case.shape, case.proc_shape(ranks)): case for case in reversed(found)}
    return list(reversed(seen.values()))


def _figures(bench: Bench, case: ExchangeCase) -> Iterator[Figure]:
    ranks = bench.comm.size
    with Prepared(bench, case) as prepared:
        calls: dict[str, Callable[[], Any]] = {one.name: one.call for one in prepared.made}
        for row in prepared.refused:
            raise RuntimeError(f"{row.name}: {row.error}")
        us = bench.clock.measure({**calls, _CONVENIENT: prepared.exchange})
    divided = "x".join(map(str, case.proc_shape(ranks)))
    yield figure(
        f"{case.size} float64 a rank, all neighbours, {divided} ranks",
        us[BY_HAND] / us[SELECTED],
        "x the speed by hand",
        OF_BY_HAND.get(ranks),
        us[BY_HAND],
        f"us {BY_HAND}",
        us=round(us[SELECTED], 2),
        convenient_us=round(us[_CONVENIENT], 2),
    )
    yield figure(
        f"the same by {_CONVENIENT}",
        us[BY_HAND] / us[_CONVENIENT],
        "x the speed by hand",
        None,
        us[BY_HAND],
        f"us {BY_HAND}",
    )
