"""``halox bench steps``: stencil steps, a 7-point one beside its exchange, and a 5-point one fused with it.

The 7-point step of float64 computes its interior during the exchange; beside it, the step on one rank alone. The
5-point step of float32 runs in graphs, on GPUs: the stencil alone, after an exchange, and with stores into the halos
from the kernel itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import halox
from halox.errors import PathError
from halox_bench.bench import Bench, WrongResult, rows_of_times
from halox_bench.clock import Call, Clock, Stage, Timing
from halox_bench.kernels import source
from halox_bench.kinds import Kind, Option, numbers, words_of
from halox_bench.rows import Row

SEVEN, FUSED = "7-point", "fused"
ALONE, EXCHANGED, STENCIL = "one rank", "stencil and exchange", "stencil alone"
_FUSED_STEPS = 20
_LONG = Timing(batches=9, batch_s=5e-2)


class StepCase(NamedTuple):
    """A stencil on blocks of ``cells`` along each axis, three of them or two."""

    stencil: str
    cells: int

    @property
    def name(self) -> str:
        return f"{self.stencil} {self.cells}^{3 if self.stencil == SEVEN else 2}"

    @property
    def details(self) -> dict[str, Any]:
        return self._asdict()


def cases(args: argparse.Namespace) -> list[StepCase]:
    usual = (
        {SEVEN: (64,), FUSED: (256,)}
        if args.quick
        else {SEVEN: (512,), FUSED: (256, 512, 1024, 2048)}
    )
    return [StepCase(one, n) for one in args.stencils for n in args.cells or usual[one]]


def measure(bench: Bench, args: argparse.Namespace, case: StepCase) -> list[Row]:
    from mpi4py import MPI

    if not bench.on_gpu:
        return bench.left_out(case, "its kernels are for a GPU")
    if case.stencil == FUSED:
        try:
            times = fused_us(bench, case.cells)
        except PathError as error:
            return bench.left_out(case, str(error))
    else:
        alone = bench.comm.allreduce(
            seven_point_us(MPI.COMM_SELF, bench.stage, case.cells), MPI.MAX
        )
        times = {SEVEN: seven_point_us(bench.comm, bench.stage, case.cells), ALONE: alone}
    bench.free()
    return rows_of_times(case, times, case.stencil)


def seven_point_us(comm: Any, stage: Stage, cells: int) -> float:
    """Return the microseconds of a 7-point step of cells^3 a rank; each of three waves shrinks by its factor."""
    from mpi4py import MPI

    # With the exchange's priority the interior's blocks would run first.
    stage = Stage(stage.device, urgent=False)
    dims = tuple(MPI.Compute_dims(comm.size, 3))
    shape = tuple(cells * n for n in dims)
    with (
        stage.current(),
        halox.Grid(
            shape, halo=1, periodic=True, proc_shape=dims, comm=comm, device="gpu", corners=False
        ) as grid,
    ):
        cos, u, v = stage.xp.cos, grid.zeros("f8"), grid.zeros("f8")
        waves = [
            (cos(2 * np.pi * index / n), (4 + 2 * np.cos(2 * np.pi / n)) / 6)
            for index, n in zip(grid.indices(), shape, strict=True)
        ]
        grid.interior(u)[...] = sum(wave for wave, _ in waves)
        plan, boxes, compute = grid.plan(u), _boxes(cells), _computing(stage, u, v)

        def step() -> None:
            plan.start()
            compute(boxes[0])
            plan.finish()
            for box in boxes[1:]:
                compute(box)

        step()
        wanted = sum(wave * factor for wave, factor in waves)
        right = bool(stage.xp.allclose(grid.interior(v), wanted, rtol=0, atol=1e-12))
        if not all(comm.allgather(right)):
            raise WrongResult("the step's result is wrong")
        return Clock(comm, stage, _LONG).measure({"": step})[""]


Box = tuple[tuple[int, int], ...]


def _boxes(cells: int) -> list[Box]:
    """Return the interior, and the six remaining faces of one cell."""
    all_, inner = (1, cells + 1), (2, cells)
    first, last = (1, 2), (cells, cells + 1)
    return [
        (inner, inner, inner),
        *((side, all_, all_) for side in (first, last)),
        *((inner, side, all_) for side in (first, last)),
        *((inner, inner, side) for side in (first, last)),
    ]


def _computing(stage: Stage, u: Any, v: Any) -> Callable[[Box], None]:
    kernel = stage.xp.RawKernel(source("seven_point"), "seven_point")
    pitches = [np.int32(n) for n in u.shape[1:]]

    def compute(box: Box) -> None:
        (z0, z1), (y0, y1), (x0, x1) = box
        block = (64, 4, 1) if x1 - x0 > 1 else (1, 256, 1)
        blocks = (-(-(x1 - x0) // block[0]), -(-(y1 - y0) // block[1]), min(z1 - z0, 128))
        kernel(blocks, block, (u, v, *pitches, *(np.int32(n) for n in (x0, x1, y0, y1, z0, z1))))

    return compute


def fused_us(bench: Bench, cells: int, threads: tuple[int, int] = (64, 4)) -> dict[str, float]:
    """Return the microseconds of a 5-point step in a graph, by each of three methods, which must agree."""
    cp, stage, comm = bench.stage.xp, bench.stage, bench.comm
    with (
        stage.current(),
        halox.Grid(
            (cells * comm.size, cells), halo=1, periodic=True, comm=comm, device="gpu"
        ) as grid,
    ):
        u, v = grid.zeros("f4"), grid.zeros("f4")
        module = cp.RawModule(code=halox.device_header() + source("fused_step"))
        alone, fused = map(module.get_function, ("alone", "fused"))
        nx, ny = map(cp.int32, grid.rank_shape)
        blocks = (-(-int(ny) // threads[0]), -(-int(nx) // threads[1]))
        exchange, both = grid.plan(u), grid.plan(u, v)
        halo = both.device_handle

        def stencil(old: Any, new: Any) -> None:
            alone(blocks, threads, (old, new, nx, ny))

        def with_exchange(old: Any, new: Any) -> None:
            exchange(old)
            stencil(old, new)

        def in_kernel(old: Any, new: Any) -> None:
            fused(blocks, threads, (halo, cp.int32(new is v), old, nx, ny))

        def two_steps(step: Callable[[Any, Any], None]) -> Call:
            def call() -> None:
                step(u, v)
                step(v, u)

            return call

        methods = {FUSED: in_kernel, EXCHANGED: with_exchange, STENCIL: stencil}
        results = []
        for step in (in_kernel, with_exchange):
            for field in (u, v):
                field[...] = 0
            grid.interior(u)[...] = (sum(grid.indices()) % 7).astype("f4")
            both()
            for _ in range(3):
                two_steps(step)()
            stage.synchronize()
            results.append(grid.interior(u).copy())
        bench.expect(int((abs(results[0] - results[1]) > 1e-5).sum()))
        replays = {
            name: stage.captured(two_steps(step), _FUSED_STEPS // 2)
            for name, step in methods.items()
        }
        times = bench.clock.measure(replays)
        stage.settle()
    return {name: us / _FUSED_STEPS for name, us in times.items()}


STEPS = Kind(
    "steps",
    "stencil steps with their exchanges on GPUs, beside one rank, and fused into one kernel",
    cases,
    measure,
    (
        Option(
            "--stencils", f"{SEVEN}, {FUSED}; default: both", words_of(SEVEN, FUSED), (SEVEN, FUSED)
        ),
        Option("--cells", "cells of a rank's block along each axis", numbers),
    ),
    budget_s=60.0,
)
