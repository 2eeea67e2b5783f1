"""The benchmark: set-up and a warm-up, then timed passes, then verification.

As in the original, the measured time includes the initial values, the factors of the evolution,
the forward transform, all iterations and the comparison of the checksums. Afterwards a few
iterations from the initial values are timed part by part.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import numpy as np

import halox

from ..common import Progress, Timer
from ..device import run_stream
from ..nas_benchmark import means, settings_shown, time_table
from .classes import ProblemClass
from .memory import check_memory
from .options import Settings
from .solver import PARTS, Solver

_STEPWISE_ITERATIONS = 4


def run_benchmark(settings: Settings, comm: Any, progress: Progress) -> dict[str, Any] | None:
    """Run one class; returns the figures on rank 0 and None elsewhere."""
    problem = settings.problem
    with ExitStack() as stack:
        grid = stack.enter_context(problem_grid(settings, comm))
        stream = run_stream(grid, stack, graph=settings.graph)
        memory = check_memory(problem.name, grid)
        progress(f"class {problem.name}: setting up", 0, 1)
        solver = stack.enter_context(Solver(grid, problem, stream))

        # The warm-up includes an iteration, which compiles its kernels and builds its plans.
        solver.start()
        solver.forward()
        solver.iterate()
        solver.checksums()
        if settings.graph:
            solver.capture()
            solver.start()
            solver.iterate()  # the first launch of a graph also uploads it to the GPU
            solver.wait()

        times, found = [], []
        for number in range(settings.passes):
            progress(f"class {problem.name}: pass", number + 1, settings.passes)
            seconds, checksums = _timed(solver, grid, problem)
            times.append(seconds)
            found.append(checksums)
        progress(f"class {problem.name}: timing the parts", settings.passes, settings.passes)
        stepwise = _stepwise(solver, grid, min(_STEPWISE_ITERATIONS, problem.iterations))
        if grid.rank != 0:
            return None
        # Report the pass with the largest error.
        worst = max(found, key=lambda checksums: max(problem.errors(checksums)))
        errors = problem.errors(worst)
        seconds = median(times)
        return {
            **settings_shown("nas_ft", settings, grid),
            "memory_gib": memory / 2**30,
            "time_s": seconds,
            "mops": problem.operations / seconds / 1e6,
            "relative_error": max(errors),
            "checksums": [
                {"iteration": number, "re": value.real, "im": value.imag, "relative_error": error}
                for number, (value, error) in enumerate(
                    zip(worst.tolist(), errors, strict=True), start=1
                )
            ],
            **stepwise,
            "reading_the_table": [
                "means over ranks, of iterations timed part by part, never as a graph",
                "transforms: with the transposes, and the wait for slower ranks",
            ],
            "verified": problem.is_verified(worst),
        }


def problem_grid(settings: Settings, comm: Any) -> halox.Grid:
    """Return the grid of the class, with the ranks in order; see `Solver`."""
    return halox.Grid(
        settings.problem.shape,
        halo=0,
        proc_shape=settings.proc_shape,
        comm=comm,
        device=settings.device,
        placement=False,
    )


def _timed(solver: Solver, grid: halox.Grid, problem: ProblemClass) -> tuple[float, np.ndarray]:
    """Run the whole problem once; return the slowest rank's seconds and the checksums."""
    solver.wait()
    grid.comm.Barrier()
    begin = time.perf_counter()
    solver.start()
    solver.forward()
    for _ in range(problem.iterations):
        solver.iterate()
    checksums = solver.checksums()  # waits for the GPU
    problem.is_verified(checksums)
    return max(grid.comm.allgather(time.perf_counter() - begin)), checksums


def _stepwise(solver: Solver, grid: halox.Grid, iterations: int) -> dict[str, Any]:
    """Time the set-up and iterations part by part; return the times of the parts."""
    timer = Timer(grid.xp)
    once: dict[str, float] = {}
    for name, call in (("set-up (once)", solver.start), ("forward FFT (once)", solver.forward)):
        solver.wait()
        grid.comm.Barrier()
        begin = timer.mark()
        call()
        (once[name],) = timer.seconds([(begin, timer.mark())])
    parts = dict.fromkeys(PARTS, 0.0)
    for _ in range(iterations):
        grid.comm.Barrier()
        for part, seconds in solver.iterate_stepwise(timer).items():
            parts[part] += seconds / iterations
    return {"rows": time_table(means(grid.comm, parts | once), PARTS)}
