"""An iteration of NAS FT on one GPU compared with a bare cuFFT transform plus a copy of the spectrum.

``benchmarks()`` returns the figures; as a script, this module writes them as JSON to a file. Times are medians of
CUDA-event times of all iterations of a class, divided by the number of iterations. The baseline, measured in the same
run, is an out-of-place 3D plan of cuFFT plus a copy between its arrays, which moves as many bytes as the evolution
step must move.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from mpi4py import MPI

from apps.nas_ft.benchmark import problem_grid
from apps.nas_ft.classes import CLASSES
from apps.nas_ft.options import Settings
from apps.nas_ft.solver import Solver

REPEATS = 9
MOST = 1.2
"""Target: the largest ratio of an iteration to the baseline."""


def event_us(
    call: Callable[[], Any], number: int, before: Callable[[], Any] = lambda: None
) -> float:
    """Median time of a call in microseconds; a round times ``number`` calls after ``before()``."""
    import cupy as cp

    start, stop = cp.cuda.Event(), cp.cuda.Event()
    times = []
    for _ in range(REPEATS + 2):
        before()
        start.record()
        for _ in range(number):
            call()
        stop.record()
        stop.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, stop) * 1e3 / number)
    return float(median(times[2:]))


def benchmarks(names: tuple[str, ...] = ("B", "C")) -> list[dict[str, Any]]:
    """Return the figures as dicts of name, value, unit, baseline and target; the first has the times of the parts."""
    return [one for name in names for one in of_class(name)]


def of_class(name: str) -> list[dict[str, Any]]:
    """Figures of one class, with single launches and as a graph."""
    import cupy as cp

    problem = CLASSES[name]
    with (
        problem_grid(Settings(problem, (1, 1, 1), 1, False, "gpu"), MPI.COMM_SELF) as grid,
        cp.cuda.Stream(non_blocking=True) as stream,
        Solver(grid, problem, stream) as solver,
    ):
        u, spectrum = solver.u, solver.spectrum
        solver.start()
        solver.forward()
        solver.iterate()
        transform = transform_us(spectrum, u, problem.iterations)
        copy = event_us(lambda: cp.copyto(spectrum, u), problem.iterations)
        found: list[dict[str, Any]] = []
        for how in ("in a stream", "as a graph"):
            if how == "as a graph":
                solver.capture()
            iteration = event_us(solver.iterate, problem.iterations, solver.start)
            baseline = transform + copy
            found.append(
                {
                    "name": f"NAS FT class {name}, an iteration {how}",
                    "value": round(iteration / baseline, 4),
                    "unit": "x its time",
                    "baseline": round(baseline, 2),
                    "baseline_name": "us: cuFFT's transform and a copy",
                    "us": round(iteration, 2),
                    "others": {"cuFFT": round(transform, 2), "copy": round(copy, 2)},
                    "target": MOST,
                    "at_most": True,
                    "met": iteration <= MOST * baseline,
                }
            )
        times = parts(solver, problem.iterations)
        found[0]["others"] |= {part: round(us, 2) for part, us in times.items()}
        return found


def transform_us(source: Any, target: Any, number: int) -> float:
    """Time of a cuFFT 3D plan from one array to another, without halox."""
    import cupy as cp
    from cupyx.scipy.fftpack import get_fft_plan

    plan = get_fft_plan(source, axes=(0, 1, 2))
    return event_us(lambda: plan.fft(source, target, cp.cuda.cufft.CUFFT_INVERSE), number)


def parts(solver: Solver, iterations: int) -> dict[str, float]:
    """Median times of the parts of an iteration, in microseconds."""
    import cupy as cp

    from apps.common import Timer

    solver.start()
    timer = Timer(cp)
    found = [solver.iterate_stepwise(timer) for _ in range(iterations)]
    return {part: median(one[part] for one in found) * 1e6 for part in found[0]}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(benchmarks()), encoding="utf-8")
