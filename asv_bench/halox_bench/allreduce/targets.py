"""Figures of reductions on GPUs with their targets, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import isclose, prod, sqrt
from typing import Any

from halox.grid import Grid
from halox_bench.allreduce.baselines import HOST_STAGED, NCCL
from halox_bench.allreduce.cases import AllreduceCase
from halox_bench.allreduce.jacobi import AS_GRAPH, ONE_BY_ONE, READ_EACH, steps_us
from halox_bench.allreduce.rows import VALUE, AllreduceRow
from halox_bench.allreduce.run import AllreduceBench, make_reduction, not_measured
from halox_bench.common.sizes import KIB, MIB, size_label
from halox_bench.common.targets import (
    BARE_LAUNCH,
    Figure,
    Progress,
    bare_launch,
    limited,
    measured,
    over,
)
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import RanksClock, Timing
from halox_bench.ranks.rows import (
    GRAPH,
    SELECTED,
    STREAM,
    chosen_over_best,
    others,
    right,
    us_of,
)

BUDGET_S = 50.0
TIMING = Timing(batches=7, batch_s=3e-3)
LARGE_TIMING = Timing(batches=3, batch_s=3e-3)

ONE_VALUE_US = {2: (5.0, 2.0), 8: (6.0, 2.5)}
"""One float64, by the number of GPUs: at most so many microseconds in a stream, in a graph."""

MEDIUM = (8 * KIB, 64 * KIB, 256 * KIB, MIB)
LARGE = (16 * MIB, 64 * MIB, 128 * MIB)
OTHERS = (64, KIB, 4 * MIB)
CHOICES = (8, 8 * KIB, 128 * KIB, MIB, 16 * MIB)

OF_NCCL_MEDIUM = 0.67
OF_NCCL_LARGE = 1.1
OF_HOST = 0.5
OF_HOST_SHARED = 1.0
SHARED_BYTES = 64 * KIB

CONVENIENT_BYTES = 8 * KIB
OF_PERSISTENT = 1.3

NORM_CELLS = 512
OF_READING = 1.15
JACOBI_CELLS = 256
OF_ONE_BY_ONE = 0.8


def measure(
    comm: Any,
    *,
    budget_s: float = BUDGET_S,
    progress: Progress = lambda what, done, total: None,
) -> list[Figure]:
    """Measure all of them on the GPUs of the ranks at hand, collectively; see `measured`."""
    return measured(Targets(comm).groups(), budget_s, progress, comm)


class Targets:
    """The groups of figures, on the ranks' GPUs."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        baselines = (NCCL, HOST_STAGED)
        self._bench = AllreduceBench(comm, Options("gpu", (), baselines, timing=TIMING))
        self._rows: dict[int, list[AllreduceRow]] = {}

    def groups(self) -> dict[str, Callable[[], Iterator[Figure]]]:
        """Return the groups by name, in the order to be measured."""
        found: dict[str, Callable[[], Iterator[Figure]]] = {"one float64": self.one_value}
        if not self._bench.shared_gpu:
            found["one float64 over a launch"] = self.over_launch
            found["Grid.allreduce over halox.Allreduce"] = self.over_persistent
            found["medium arrays over NCCL"] = partial(self.over_nccl, MEDIUM, OF_NCCL_MEDIUM)
            found["Jacobi step"] = self.jacobi
        found["norm of a field"] = self.norm
        if not self._bench.shared_gpu:
            found["large arrays over NCCL"] = partial(self.over_nccl, LARGE, OF_NCCL_LARGE)
        found["over the host"] = self.over_host
        found["choice of algorithms"] = self.choice
        return found

    def one_value(self) -> Iterator[Figure]:
        rows = self._measured(8)
        size, shared = self._comm.size, self._bench.shared_gpu
        targets = ONE_VALUE_US.get(size) if not shared else None
        other = HOST_STAGED if shared else NCCL
        for place, (mode, what) in enumerate(
            [
                (STREAM, "in a stream"),
                (GRAPH, "in a graph"),
                (VALUE, "each read by the host"),
            ]
        ):
            if mode == GRAPH and shared:
                # Ranks that share a GPU have no algorithm that a graph can hold.
                continue
            us = us_of(rows, SELECTED, mode)
            if us is None:
                raise not_measured(rows, SELECTED, mode)
            beside = us_of(rows, other, mode) or us_of(rows, other, STREAM)
            yield limited(
                f"allreduce of one float64, {size} ranks, {what}",
                us,
                "us",
                None if targets is None or mode == VALUE else targets[place],
                beside,
                f"us of {other}",
                **_others(rows, mode),
            )

    def over_launch(self) -> Iterator[Figure]:
        """Measure one float64 beside a kernel that does nothing, in turns: the host takes longer than the GPU."""
        stage = self._bench.stage
        with make_reduction(self._comm, _case(8), None, "gpu") as reduce, stage.current():
            value, total = (stage.xp.zeros(1, "f8") for _ in range(2))
            calls = {"reduce": lambda: reduce(value, out=total), "launch": bare_launch(stage.xp)}
            times = self._bench.clock.measure(calls)
            stage.settle()
        what = (
            f"allreduce of one float64, {self._comm.size} ranks, in a stream: over a launch alone"
        )
        yield over(what, times["reduce"], times["launch"], None, f"us of a {BARE_LAUNCH}")

    def over_persistent(self) -> Iterator[Figure]:
        """Measure `Grid.allreduce` beside `halox.Allreduce`, each in place and with new results, in turns."""
        stage, size, case = self._bench.stage, self._comm.size, _case(CONVENIENT_BYTES)
        with (
            stage.current(),
            Grid((size,), comm=self._comm, device="gpu") as grid,
            make_reduction(self._comm, case, None, "gpu") as reduce,
        ):
            one, other = (stage.xp.ones(case.elements, case.dtype) for _ in range(2))
            calls: dict[str, Callable[[], Any]] = {
                "grid": lambda: grid.allreduce(one, out=one),
                "reduce": lambda: reduce(other, out=other),
                "grid, new": lambda: grid.allreduce(one),
                "reduce, new": lambda: reduce(other),
            }
            for name, call in calls.items():
                # Twice, since the second call may be another one than the first.
                for array in (one, other):
                    array[...] = 1
                found = call(), call()
                stage.synchronize()
                wanted = size if "new" in name else size**2
                if any(float(result.sum()) != wanted * case.elements for result in found):
                    raise RuntimeError(f"allreduce of {case.name} ones, {name}: wrong result")
            for array in (one, other):
                array[...] = 0  # so that no sum of sums grows beyond what floats hold
            stage.settle()
            times = self._bench.clock.measure(calls)
            stage.settle()
        for how, kind, most in (("in place", "", OF_PERSISTENT), ("without out", ", new", None)):
            ours, theirs = times[f"grid{kind}"], times[f"reduce{kind}"]
            what = f"grid.allreduce of {size_label(case.nbytes)} float64 {how}, {size} ranks"
            what = f"{what}, in a stream: over halox.Allreduce"
            yield over(what, ours, theirs, most, "us of halox.Allreduce")

    def over_nccl(self, sizes: tuple[int, ...], most: float) -> Iterator[Figure]:
        for nbytes in sizes:
            yield from self._over(nbytes, NCCL, most)

    def over_host(self) -> Iterator[Figure]:
        shared = self._bench.shared_gpu
        for nbytes in sorted({8, *OTHERS, *MEDIUM, *LARGE}):
            most: float | None = OF_HOST
            if shared:
                most = OF_HOST_SHARED if nbytes >= SHARED_BYTES else None
            yield from self._over(nbytes, HOST_STAGED, most)

    def _over(self, nbytes: int, baseline: str, most: float | None) -> Iterator[Figure]:
        rows = self._measured(nbytes)
        for mode in (STREAM, GRAPH):
            us = us_of(rows, SELECTED, mode)
            theirs = us_of(rows, baseline, mode)
            if mode == GRAPH and (us is None or theirs is None):
                continue
            if us is None or theirs is None:
                raise not_measured(rows, SELECTED if us is None else baseline, mode)
            size = self._comm.size
            what = f"allreduce of {size_label(nbytes)} float64, {size} ranks, in a {mode}: over {baseline}"
            limit = most if mode == STREAM and size > 1 else None
            yield over(what, us, theirs, limit, f"us of {baseline}", **_others(rows, mode))

    def norm(self) -> Iterator[Figure]:
        size, stage = self._comm.size, self._bench.stage
        xp = stage.xp
        shape = (NORM_CELLS * size, NORM_CELLS, NORM_CELLS)
        with (
            stage.current(),
            Grid(shape, proc_shape=(size, 1, 1), comm=self._comm, device="gpu") as grid,
        ):
            # The halo would be seen in the result.
            field = grid.full(7.0)
            grid.interior(field)[...] = 1.0
            value = xp.zeros((), "f8")
            grid.norm(field, out=value)
            if not isclose(float(value), sqrt(prod(shape)), rel_tol=1e-14):
                raise RuntimeError(f"norm of {prod(shape)} ones: {float(value)!r}")
            source, target = (xp.zeros(NORM_CELLS**3, "f8") for _ in range(2))
            nbytes = source.nbytes
            copy, kind = xp.cuda.runtime.memcpyAsync, xp.cuda.runtime.memcpyDeviceToDevice
            ends = int(target.data.ptr), int(source.data.ptr)
            stage.settle()
            times = self._bench.clock.measure(
                {
                    "norm": lambda: grid.norm(field, out=value),
                    "copy": lambda: copy(*ends, nbytes, kind, stage.stream.ptr),
                    "CuPy sum": source.sum,
                }
            )
            stage.settle()
        # A copy reads and writes.
        reading_us = times["copy"] / 2
        yield limited(
            f"norm of a field of {NORM_CELLS}^3 float64 a rank, {size} ranks: over reading it once",
            times["norm"] / reading_us,
            "x the time",
            OF_READING if not self._bench.shared_gpu else None,
            reading_us,
            "us: its bytes at the speed of a large copy in the same run, read and written",
            us=round(times["norm"], 2),
            copy_gb_per_s=round(2 * nbytes / times["copy"] / 1e3, 1),
            cupy_sum_us=round(times["CuPy sum"], 2),
        )
        self._bench.free()

    def jacobi(self) -> Iterator[Figure]:
        times = steps_us(self._comm, self._bench.stage, JACOBI_CELLS)
        what = f"Jacobi step of {JACOBI_CELLS}^3, {self._comm.size} ranks, with exchange and residual, as a graph"
        rounded = {name: round(us, 2) for name, us in times.items()}
        for other, most in ((ONE_BY_ONE, OF_ONE_BY_ONE), (READ_EACH, None)):
            name, limit = f"{what}: over the same {other}", most if self._comm.size > 1 else None
            us, theirs = times[AS_GRAPH], times[other]
            yield over(name, us, theirs, limit, f"us {other}", others=rounded)
        self._bench.free()

    def choice(self) -> Iterator[Figure]:
        bench = AllreduceBench(self._comm, Options("gpu", None, (), timing=TIMING))
        rows = [row for nbytes in CHOICES for row in right(bench.measure(_case(nbytes)))]
        for one in chosen_over_best(rows):
            timed = [row for row in rows if (row.case, row.mode) == (one["case"], one["mode"])]
            yield limited(
                f"allreduce of {one['case']}, {self._comm.size} ranks, in a {one['mode']}: chosen over best algorithm",
                one["ratio"],
                "x its time",
                None,
                one["best_us"],
                f"us of {one['best']}",
                chosen=one["chosen"],
                others=others(timed, one["mode"]),
                refused={row.name: row.error for row in timed if not row.us},
                setup_us={row.name: round(row.setup_us) for row in timed if row.setup_us},
            )

    def _measured(self, nbytes: int) -> list[AllreduceRow]:
        if nbytes not in self._rows:
            timing = LARGE_TIMING if nbytes > MIB else TIMING
            self._bench.clock = RanksClock(self._comm, self._bench.stage, timing)
            self._rows[nbytes] = right(self._bench.measure(_case(nbytes)))
        return self._rows[nbytes]


def _case(nbytes: int) -> AllreduceCase:
    return AllreduceCase(nbytes // 8, "f8", "sum")


def _others(rows: list[AllreduceRow], mode: str) -> dict[str, Any]:
    """Return what stands beside a figure: the algorithm, the set-up, all times of the mode."""
    ours = next(row for row in rows if row.name == SELECTED and row.mode == mode)
    return {
        "algorithm": ours.path,
        "setup_us": ours.setup_us,
        "pays_after": ours.pays_after,
        "others": others(rows, mode),
    }
