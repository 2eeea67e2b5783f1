"""The benchmark: set-up, a warm-up iteration, timed iterations, verification.

The measured time starts with the first residual and ends with the final norm, as in the original.
Afterwards a few iterations from the initial values are timed step by step, for the times of the
parts and the norm after each iteration.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

import halox

from ..capture import captured
from ..common import Progress, Timer
from ..device import run_stream
from ..nas_benchmark import means, settings_shown, time_table
from . import cycle
from .classes import FIRST_NORMS, TOLERANCE, ProblemClass
from .device_kernels import DeviceKernels
from .hierarchy import Hierarchy, finest_grid
from .host_kernels import HostKernels
from .options import Settings
from .random_numbers import charges

_STEPWISE_ITERATIONS = 4


class Solver:
    """The problem on one rank, ready to run.

    Parameters
    ----------
    hierarchy : Hierarchy
    settings : Settings
    stream : cupy.cuda.Stream or None
        The current stream on a GPU.

    Attributes
    ----------
    bytes_sent : int
        Bytes that this rank sends to other ranks in one iteration.

    Notes
    -----
    Collective, as are all methods.
    """

    def __init__(self, hierarchy: Hierarchy, settings: Settings, stream: Any = None) -> None:
        self._hierarchy = hierarchy
        self._grid = grid = hierarchy.finest
        self._stream = stream
        self._scale = math.sqrt(settings.problem.points**3)
        self._reproducible = settings.reproducible
        kernels: Any = HostKernels() if grid.device == "cpu" else DeviceKernels(grid.xp)
        self._residual = cycle.residual(hierarchy, kernels)
        self._iteration = cycle.iteration(hierarchy, kernels, settings.problem.smoother)
        self._iterate: Callable[[], None] = lambda: cycle.run(self._iteration)
        self._charges = charges(settings.problem.points, grid.owned, grid.comm)
        self.bytes_sent = sum(step.bytes_sent for step in self._iteration)

    def start(self) -> None:
        """Set u and v to their initial values."""
        cycle.set_charges(self._hierarchy, *self._charges)

    def first_residual(self) -> None:
        """Compute the residual of the initial values."""
        cycle.run(self._residual)

    def iterate(self) -> None:
        """Run one iteration."""
        self._iterate()

    def capture(self) -> None:
        """Capture the iteration, which must have run before, and replay it from now on."""
        self._iterate = captured(self._iterate, self._stream)

    def iterate_stepwise(self, timer: Timer) -> list[tuple[cycle.Step, float]]:
        """Run one iteration step by step without the graph; return the seconds of each step."""
        marks = [timer.mark()]
        for step in self._iteration:
            step.call()
            marks.append(timer.mark())
        return list(zip(self._iteration, timer.seconds(pairwise(marks)), strict=True))

    def norm(self) -> float:
        """Return the root mean square of the residual."""
        r = self._hierarchy.levels[-1].r
        return float(self._grid.norm(r, reproducible=self._reproducible)) / self._scale

    def largest(self) -> float:
        """Return the residual's largest absolute value."""
        r = self._hierarchy.levels[-1].r
        return float(self._grid.max("abs(r)", r=r))

    @property
    def solution(self) -> Any:
        """The finest level's u."""
        return self._hierarchy.levels[-1].u

    def wait(self) -> None:
        """Wait for the GPU to complete all work; local."""
        if self._stream is not None:
            self._stream.synchronize()


def run_benchmark(settings: Settings, comm: Any, progress: Progress) -> dict[str, Any] | None:
    """Run one class; returns the figures on rank 0 and None elsewhere."""
    problem = settings.problem
    with ExitStack() as stack:
        grid = stack.enter_context(
            finest_grid(problem.points, settings.proc_shape, comm, settings.device)
        )
        stream = run_stream(grid, stack, graph=settings.graph)
        progress(f"class {problem.name}: setting up", 0, 1)
        hierarchy = stack.enter_context(Hierarchy(grid, settings.gather))
        solver = Solver(hierarchy, settings, stream)

        solver.start()
        solver.first_residual()
        solver.norm()
        solver.iterate()
        solver.wait()
        if settings.graph:
            solver.capture()
            solver.iterate()  # the first launch of a graph also uploads it to the GPU
            solver.wait()

        times, norm = [], 0.0
        for number in range(settings.passes):
            progress(f"class {problem.name}: pass", number + 1, settings.passes)
            seconds, norm = _timed(solver, grid, problem.iterations)
            times.append(seconds)
        largest = solver.largest()
        shown = {"picture": _picture(solver, grid, problem)} if settings.picture else {}
        progress(f"class {problem.name}: timing the steps", settings.passes, settings.passes)
        stepwise = _stepwise(solver, grid, min(_STEPWISE_ITERATIONS, problem.iterations))
        bytes_sent = sum(grid.comm.allgather(solver.bytes_sent))
        if grid.rank != 0:
            return None
        checks = _checks(settings, norm, stepwise["norms"])
        seconds = median(times)
        return {
            **settings_shown("nas_mg", settings, grid),
            "gathered_levels": [level.number for level in hierarchy.levels if level.is_whole],
            "time_s": seconds,
            "mops": problem.operations / seconds / 1e6,
            "norm": norm,
            "official_norm": problem.norm,
            "relative_error": problem.error(norm),
            "largest_residual": largest,
            "exchanged_bytes_an_iteration": bytes_sent,
            **stepwise,
            "checks": checks,
            "reading_the_table": [
                "means over ranks, of iterations timed step by step, never as a graph",
                "exchange and gather: with the wait for slower ranks; the norm is computed at the end",
            ],
            **shown,
            "verified": bool(checks.pop("verified")),
        }


def _picture(solver: Solver, grid: halox.Grid, problem: ProblemClass) -> dict[str, Any] | None:
    """Return the solution in the middle plane along z, on rank 0; collective."""
    middle = problem.points // 2
    whole = grid.gather(solver.solution)
    blocks = grid.comm.allgather((grid.proc_coords, grid.rank, grid.owned))
    if whole is None:
        return None
    there = {(i, j): r for (_, j, i), r, (z, *_) in blocks if z.start <= middle < z.stop}
    sizes = [{at[axis]: cut[axis] for at, _, cut in blocks} for axis in (2, 1)]
    return {
        "values": whole[middle].T,
        "what": f"u at z = {middle}",
        "where": f"NAS MG, class {problem.name}, {grid.size} rank(s)",
        "dims": ("x", "y"),
        "blocks": [[cut.stop - cut.start for _, cut in sorted(cuts.items())] for cuts in sizes],
        "ranks": there,
    }


def _timed(solver: Solver, grid: halox.Grid, iterations: int) -> tuple[float, float]:
    """Run all iterations; return the slowest rank's seconds and the final norm."""
    solver.start()
    solver.wait()
    grid.comm.Barrier()
    begin = time.perf_counter()
    solver.first_residual()
    solver.norm()
    for _ in range(iterations):
        solver.iterate()
    norm = solver.norm()  # waits for the GPU
    return max(grid.comm.allgather(time.perf_counter() - begin)), norm


def _stepwise(solver: Solver, grid: halox.Grid, iterations: int) -> dict[str, Any]:
    """Time iterations from the initial values step by step; return norms and times of the parts."""
    solver.start()
    solver.first_residual()
    solver.wait()
    timer = Timer(grid.xp)
    norms, norm_s = [], 0.0
    parts = dict.fromkeys(cycle.PARTS, 0.0)
    levels: dict[str, float] = {}
    for _ in range(iterations):
        grid.comm.Barrier()
        for step, seconds in solver.iterate_stepwise(timer):
            parts[step.part] += seconds / iterations
            levels[str(step.level)] = levels.get(str(step.level), 0.0) + seconds / iterations
        grid.comm.Barrier()
        begin = time.perf_counter()
        norms.append(solver.norm())
        norm_s += time.perf_counter() - begin
    rows = time_table(means(grid.comm, parts | {"norm (once)": norm_s / iterations}), cycle.PARTS)
    shares = {row["part"]: row["share"] for row in rows}
    levels = means(grid.comm, levels)
    return {
        "norms": norms,
        "exchange_share": shares["exchange"] + shares["gather"],
        "ms_by_level": {level: levels[level] * 1e3 for level in sorted(levels, key=int)},
        "rows": rows,
    }


def _checks(settings: Settings, norm: float, norms: list[float]) -> dict[str, Any]:
    """Compare the norms with the known norms; None for a check not requested or not possible."""
    problem = settings.problem
    official = problem.is_verified(norm) if settings.check != "none" else None
    first = None
    known = FIRST_NORMS.get(problem.name)
    if settings.check == "all" and known is not None:
        first = bool(np.allclose(norms, known[: len(norms)], rtol=TOLERANCE, atol=0))
    passed = [found for found in (official, first) if found is not None]
    return {
        "official_norm": official,
        "norms_of_first_iterations": first,
        "verified": bool(passed) and all(passed),
    }
