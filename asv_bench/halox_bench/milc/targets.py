"""Figures of MILC with their targets, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from halox_bench.common.targets import Figure, Progress, figure, limited, measured
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
from halox_bench.milc.rows import MilcRow
from halox_bench.milc.run import MilcBench
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import Timing
from halox_bench.ranks.rows import right

BUDGET_S = 40.0
TIMING = Timing(batches=5, batch_s=3e-3)
HOST_TIMING = Timing(batches=15, batch_s=3e-3)

SHARES = {IMPROVED: 0.70, NAIVE: 0.75}
"""Least shares of the speed of a copy that D reaches."""

OF_FLOORS = 1.25
OF_WHOLE_ARRAYS = 1.5

Groups = dict[str, Callable[[], Iterator[Figure]]]


def measure(
    comm: Any,
    *,
    budget_s: float = BUDGET_S,
    progress: Progress = lambda what, done, total: None,
) -> list[Figure]:
    """Measure all of them on the GPUs of the ranks at hand, collectively; see `measured`.

    Of one rank, those with targets; of several, the tables of strong and weak scaling.
    """
    bench = MilcBench(comm, Options("gpu", baselines=(), timing=TIMING))
    return measured(Targets(bench, LATTICES["gpu"][:2]).groups(), budget_s, progress, comm)


def measure_on_host(
    comm: Any,
    *,
    budget_s: float = BUDGET_S,
    progress: Progress = lambda what, done, total: None,
) -> list[Figure]:
    """Measure those of NumPy arrays; the target is for one rank."""
    bench = MilcBench(comm, Options("cpu", timing=HOST_TIMING))
    return measured(Targets(bench, LATTICES["cpu"]).groups(), budget_s, progress, comm)


class Targets:
    """The groups of figures on one bench.

    Parameters
    ----------
    lattices : tuple
        Sites along x, y, z and t.
    """

    def __init__(self, bench: MilcBench, lattices: Sequence[tuple[int, int, int, int]]) -> None:
        self._bench, self._lattices = bench, lattices

    def groups(self) -> Groups:
        """Return the groups by name, in the order to be measured."""
        if self._bench.comm.size > 1:
            case = MilcCase(self._lattices[0])
            return {case.name: partial(self.on_several, case)}
        every = product(self._lattices, OPERATORS, PRECISIONS)
        return {case.name: partial(self.on_one, case) for case in (MilcCase(*one) for one in every)}

    def on_one(self, case: MilcCase) -> Iterator[Figure]:
        """Measure D and an iteration on one rank."""
        row = self._measured(case)
        if self._bench.stage.device is None:
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
            row.share or 0.0,
            "share",
            SHARES[case.operator],
            row.copy_bytes_per_us and row.copy_bytes_per_us / 1e3,
            "GB/s of a device copy in the same run, read and written",
            **_others(row),
        )
        yield limited(
            f"MILC {case.name}: an iteration over its kernels' bytes at the speed of a copy",
            row.over_floor or 0.0,
            "x the time",
            OF_FLOORS,
            (row.us or 0.0) / (row.over_floor or 1.0),
            "us of the bytes",
            **_others(row),
        )

    def on_several(self, case: MilcCase) -> Iterator[Figure]:
        """Measure strong and weak scaling."""
        for one in scaled(case, self._bench.comm.size):
            row = self._measured(one)
            yield figure(
                f"MILC {one.name}, {one.scaling} scaling, {one.ranks} of {self._bench.comm.size} ranks",
                row.cg_gflops or 0.0,
                "GFLOPS",
                None,
                row.efficiency,
                "rate of a rank over that of one alone",
                **_others(row),
            )

    def _measured(self, case: MilcCase) -> MilcRow:
        row = right(self._bench.measure(case))[0]
        if row.us is None:
            raise RuntimeError(row.error)
        return row


def _others(row: MilcRow) -> dict[str, Any]:
    """Return what stands beside a figure."""
    names = "stream_us", "dslash_us", "exchange_us", "dslash_gflops", "cg_gflops", "exchange_share"
    found = {name: getattr(row, name) for name in names} | {"iteration_us": row.us}
    return {"mode": row.mode, **{name: value and round(value, 3) for name, value in found.items()}}
