"""``halox bench reductions``: norms and sums of fields beside a copy, and `Grid.allreduce` beside `halox.Allreduce`."""

from __future__ import annotations

import argparse
from math import isclose, prod, sqrt
from typing import Any, NamedTuple

import halox
from halox_bench.bench import KIB, Bench, WrongResult, rows_of_times
from halox_bench.clock import Call
from halox_bench.kinds import Kind, Option, numbers, words_of
from halox_bench.rows import Row

NORM, DIFFERENCE, TWO = "norm", "sum of (a - b)**2", "two reductions"
COPY, ONE = "copy of the field", "one reduction"
READ = "reading at the speed of the copy"
GRID, PERSISTENT = "grid.allreduce", "halox.Allreduce"
GRID_NEW, PERSISTENT_NEW = "grid.allreduce without out", "halox.Allreduce without out"
FIELDS, ARRAYS = "fields", "arrays"
ARRAY_BYTES = 8 * KIB


class ReductionCase(NamedTuple):
    """Reductions of a field of ``cells``^3 float64 cells a rank, or of small arrays."""

    what: str
    cells: int

    @property
    def name(self) -> str:
        return f"{self.cells}^3 f8" if self.what == FIELDS else "8KiB f8"

    @property
    def details(self) -> dict[str, Any]:
        return self._asdict()


def cases(args: argparse.Namespace) -> list[ReductionCase]:
    cells = args.cells or ((64,) if args.quick else (512,))
    found = [ReductionCase(FIELDS, n) for n in cells if FIELDS in args.of]
    return found + [ReductionCase(ARRAYS, 0)] * (ARRAYS in args.of)


def measure(bench: Bench, args: argparse.Namespace, case: ReductionCase) -> list[Row]:
    """Measure one case; its results are compared with closed forms."""
    times = _of_fields(bench, case.cells) if case.what == FIELDS else _of_arrays(bench)
    bench.free()
    selected = NORM if case.what == FIELDS else GRID
    return rows_of_times(case, times, selected)


def _of_fields(bench: Bench, n: int) -> dict[str, float]:
    size, stage = bench.comm.size, bench.stage
    xp, shape = stage.xp, (n * size, n, n)
    with (
        stage.current(),
        halox.Grid(shape, proc_shape=(size, 1, 1), comm=bench.comm, device=bench.device) as grid,
    ):
        # Other values in the halo: including them would change the results.
        field, other = grid.full(7.0), grid.full(2.0)
        grid.interior(field)[...] = 1.0
        value = xp.zeros((), "f8")
        both = {"rr": value, "most": xp.zeros((), "f8")}
        texts, ops = {"rr": "r * r", "most": "abs(r)"}, {"rr": "sum", "most": "max"}
        right = isclose(float(grid.norm(field, out=value)), sqrt(prod(shape)), rel_tol=1e-14)
        right &= float(grid.sum("(a - b) ** 2", a=field, b=other)) == prod(shape)
        grid.reduce(texts, ops, both, r=field)
        right &= float(value) == prod(shape) and float(both["most"]) == 1
        if not right:
            raise WrongResult(f"a reduction of {prod(shape)} ones is wrong")
        source, target = (xp.ones(n**3, "f8") for _ in range(2))

        def copy() -> None:
            target[...] = source

        times = bench.clock.measure(
            {
                NORM: lambda: grid.norm(field, out=value),
                DIFFERENCE: lambda: grid.sum("(a - b) ** 2", value, a=field, b=other),
                TWO: lambda: grid.reduce(texts, ops, both, r=field),
                ONE: lambda: grid.sum("r * r", value, r=field),
                COPY: copy,
            }
        )
        stage.settle()
    # A copy reads and writes.
    return times | {READ: times[COPY] / 2}


def _of_arrays(bench: Bench) -> dict[str, float]:
    """Measure allreduces of 8 KiB, in place and with new results."""
    stage, size, n = bench.stage, bench.comm.size, ARRAY_BYTES // 8
    with (
        stage.current(),
        halox.Grid((size,), comm=bench.comm, device=bench.device) as grid,
        halox.Allreduce(bench.comm, n, "f8", "sum", device=bench.device) as reduce,
    ):
        one, other = (stage.xp.ones(n) for _ in range(2))
        calls: dict[str, Call] = {
            GRID: lambda: grid.allreduce(one, out=one),
            PERSISTENT: lambda: reduce(other, out=other),
            GRID_NEW: lambda: grid.allreduce(one),
            PERSISTENT_NEW: lambda: reduce(other),
        }
        for name, call in calls.items():
            for array in (one, other):
                array[...] = 1
            found = call(), call()  # the second call may take a cached plan
            stage.synchronize()
            wanted = size if "without" in name else size**2
            wrong = sum(float(result.sum()) != wanted * n for result in found)
            bench.expect(wrong, f"sums of ones by {name}")
        for array in (one, other):
            array[...] = 0  # repeated sums must stay finite
        stage.settle()
        times = bench.clock.measure(calls)
        stage.settle()
    return times


REDUCTIONS = Kind(
    "reductions",
    "norms and sums of fields beside a copy, and Grid.allreduce beside halox.Allreduce",
    cases,
    measure,
    (
        Option("--cells", "cells of a rank's field along each axis; default: 512", numbers),
        Option(
            "--of", f"{FIELDS}, {ARRAYS}; default: both", words_of(FIELDS, ARRAYS), (FIELDS, ARRAYS)
        ),
    ),
    budget_s=30.0,
)
