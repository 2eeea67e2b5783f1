"""Figures of reductions on GPUs with their targets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from math import isclose, prod, sqrt
from typing import Any

from halox.grid import Grid
from halox_bench.allreduce.baselines import HOST_STAGED, NCCL
from halox_bench.allreduce.cases import AllreduceCase
from halox_bench.allreduce.run import VALUE, AllreduceBench, make_reduction
from halox_bench.common.options import KIB, MIB, size_label
from halox_bench.common.rows import GRAPH, STREAM, Row, right
from halox_bench.common.targets import (
    OVER,
    Figure,
    Groups,
    Target,
    limited,
    over,
)
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import RanksClock, Timing

BUDGET_S = 50.0
TIMING = Timing(batches=7, batch_s=3e-3)
LARGE_TIMING = Timing(batches=3, batch_s=3e-3)

ONE_VALUE_US = {2: (5.0, 2.0), 8: (6.0, 2.5)}
"""One float64, by the number of GPUs: most microseconds in a stream, in a graph."""

MEDIUM = (8 * KIB, 64 * KIB, 256 * KIB, MIB)
LARGE = (16 * MIB, 64 * MIB, 128 * MIB)
OVER_HOST = (8, 64, KIB, *MEDIUM, 4 * MIB, *LARGE)

OF_NCCL = dict.fromkeys(MEDIUM, 0.67) | dict.fromkeys(LARGE, 1.1)
OF_HOST, OF_HOST_SHARED, SHARED_BYTES = 0.5, 1.0, 64 * KIB
"""Time over staging through the host: between GPUs; within one GPU, from so many bytes on."""

CONVENIENT_BYTES = 8 * KIB
OF_PERSISTENT = 1.3

NORM_CELLS = 512
OF_READING, OF_READING_TWO, OF_ONE = 1.15, 1.10, 1.05  # of one field, two fields, one result


def groups(args: argparse.Namespace | None, comm: Any, device: str) -> Groups | None:
    """Return the groups of figures on the GPUs of the ranks at hand."""
    return Targets(comm).groups() if device == "gpu" else None


class Targets:
    """The groups of figures, on the ranks' GPUs."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._ranks = comm, f"{comm.size} ranks"
        baselines = (NCCL, HOST_STAGED)
        self._bench = AllreduceBench(comm, Options("gpu", (), baselines, timing=TIMING))
        self._rows: dict[int, list[Row]] = {}

    def groups(self) -> Groups:
        found: dict[str, Callable[[], Iterator[Figure]]] = {"one float64": self.one_value}
        if not self._bench.shared_gpu:
            found["Grid.allreduce over halox.Allreduce"] = self.over_persistent
            found["medium arrays over NCCL"] = partial(self.beside, NCCL, MEDIUM)
        found["norm of a field"] = self.norm
        if not self._bench.shared_gpu:
            found["large arrays over NCCL"] = partial(self.beside, NCCL, LARGE)
        found["over the host"] = partial(self.beside, HOST_STAGED, OVER_HOST)
        return found

    def one_value(self) -> Iterator[Figure]:
        """Measure one float64, in a stream, in a graph, and read by the host."""
        rows, shared = self._measured(8), self._bench.shared_gpu
        limits = (None, None) if shared else ONE_VALUE_US.get(self._comm.size, (None, None))
        theirs = (HOST_STAGED if shared else NCCL,)
        # No algorithm within a GPU can be captured.
        modes = (STREAM,) if shared else (STREAM, GRAPH)
        what = f"allreduce of one float64, {self._ranks}"
        in_modes = dict(zip(modes, limits, strict=False))
        yield from Target(f"{what}, in a {{mode}}", in_modes, theirs).figures(rows)
        yield from Target(f"{what}, each read by the host", {VALUE: None}, theirs).figures(rows)

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
                for array in (one, other):
                    array[...] = 1
                # The second call may take a cached plan.
                found = call(), call()
                stage.synchronize()
                wanted = size if "new" in name else size**2
                if any(float(result.sum()) != wanted * case.elements for result in found):
                    raise RuntimeError(f"allreduce of {case.name} ones, {name}: wrong result")
            for array in (one, other):
                array[...] = 0  # repeated sums must stay finite
            stage.settle()
            times = self._bench.clock.measure(calls)
            stage.settle()
        for how, kind, most in (("in place", "", OF_PERSISTENT), ("without out", ", new", None)):
            ours, theirs = times[f"grid{kind}"], times[f"reduce{kind}"]
            what = f"grid.allreduce of {size_label(case.nbytes)} float64 {how}, {self._ranks}"
            what = f"{what}, in a stream: over halox.Allreduce"
            yield over(what, ours, theirs, most, "us of halox.Allreduce")

    def beside(self, baseline: str, sizes: tuple[int, ...]) -> Iterator[Figure]:
        """Measure arrays of several sizes over a baseline; only streams of several ranks have a target."""
        for nbytes in sizes:
            most = OF_NCCL.get(nbytes) if baseline == NCCL else self._of_host(nbytes)
            limits = {STREAM: most if self._comm.size > 1 else None, GRAPH: None}
            what = f"allreduce of {size_label(nbytes)} float64, {self._ranks}, in a {{mode}}"
            target = Target(f"{what}: over {baseline}", limits, (baseline,), OVER)
            yield from target.figures(self._measured(nbytes))

    def _of_host(self, nbytes: int) -> float | None:
        if not self._bench.shared_gpu:
            return OF_HOST
        return OF_HOST_SHARED if nbytes >= SHARED_BYTES else None

    def norm(self) -> Iterator[Figure]:
        """Measure the norm of a field over the time to read it once."""
        size, stage = self._comm.size, self._bench.stage
        xp = stage.xp
        shape = (NORM_CELLS * size, NORM_CELLS, NORM_CELLS)
        with (
            stage.current(),
            Grid(shape, proc_shape=(size, 1, 1), comm=self._comm, device="gpu") as grid,
        ):
            # Other values in the halo: including them would change the result.
            field = grid.full(7.0)
            grid.interior(field)[...] = 1.0
            value = xp.zeros((), "f8")
            grid.norm(field, out=value)
            if not isclose(float(value), sqrt(prod(shape)), rel_tol=1e-14):
                raise RuntimeError(f"norm of {prod(shape)} ones: {float(value)!r}")
            other, both = grid.full(2.0), {"rr": value, "most": xp.zeros((), "f8")}
            texts, ops = {"rr": "r * r", "most": "abs(r)"}, {"rr": "sum", "most": "max"}
            if float(grid.sum("(a - b) ** 2", a=field, b=other)) != prod(shape):
                raise RuntimeError("sum of squares of differences of 1: wrong result")
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
                    "difference": lambda: grid.sum("(a - b) ** 2", value, a=field, b=other),
                    "one": lambda: grid.sum("r * r", value, r=field),
                    "two": lambda: grid.reduce(texts, ops, both, r=field),
                }
            )
            stage.settle()
        # A copy reads and writes.
        reading_us = times["copy"] / 2
        yield limited(
            f"norm of a field of {NORM_CELLS}^3 float64 a rank, {self._ranks}: over reading it once",
            times["norm"] / reading_us,
            "x the time",
            OF_READING if not self._bench.shared_gpu else None,
            reading_us,
            "us: its bytes at the speed of a large copy in the same run, read and written",
            us=round(times["norm"], 2),
            copy_gb_per_s=round(2 * nbytes / times["copy"] / 1e3, 1),
            cupy_sum_us=round(times["CuPy sum"], 2),
        )
        yield limited(
            f"sum of (a - b)**2 of {NORM_CELLS}^3 float64 a rank, {self._ranks}: over reading both fields once",
            times["difference"] / times["copy"],
            "x the time",
            OF_READING_TWO if not self._bench.shared_gpu else None,
            times["copy"],
            "us: the bytes of both at the speed of a large copy in the same run",
            us=round(times["difference"], 2),
        )
        what = f"two reductions of a field of {NORM_CELLS}^3 float64 a rank in one launch, {self._ranks}"
        most = OF_ONE if not self._bench.shared_gpu else None
        yield over(f"{what}: over one", times["two"], times["one"], most, "us of one")
        self._bench.free()

    def _measured(self, nbytes: int) -> list[Row]:
        if nbytes not in self._rows:
            timing = LARGE_TIMING if nbytes > MIB else TIMING
            self._bench.clock = RanksClock(self._comm, self._bench.stage, timing)
            self._rows[nbytes] = right(self._bench.measure(_case(nbytes)))
        return self._rows[nbytes]


def _case(nbytes: int) -> AllreduceCase:
    return AllreduceCase(nbytes // 8, "f8", "sum")
