"""Jacobi's method of a periodic grid of 256 x 256 cells to a tolerance, as a loop that the GPU repeats.

``benchmarks()`` returns the figures; as a script, on any number of ranks, this module writes them as JSON to a file. A
step makes two sweeps, each of which exchanges the halo and computes the next values, and compares the norm of their
change with the tolerance. The baseline of a loop that looks at the flag after k steps is, in the same run, a CUDA graph
of k steps, replayed without any look. All times are wall times of a fixed number of steps, medians of several rounds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from mpi4py import MPI

import halox
from apps.capture import captured

CELLS = (256, 256)
STEPS = 80_000
REPEATS = 2
MOST_RATIO, MOST_MORE_US, MOST_CPU = 1.10, 3.0, 0.01
"""Targets: every=10 over ten steps a graph; every=1 over one step a graph, in microseconds; share of a host's core."""

RELAX = r"""
extern "C" __global__ void relax(const double* u, double* v, double* change, int row, int cells)
{
    const int j = blockIdx.x * blockDim.x + threadIdx.x + 1, i = blockIdx.y + 1;
    if (j > cells)
        return;
    const int at = i * row + j;
    v[at] = 0.25 * (u[at - row] + u[at + row] + u[at - 1] + u[at + 1]);
    change[at] = v[at] - u[at];
}
"""


class Jacobi:
    """Two sweeps, so that the fields are where they were; ``until`` is set below the tolerance."""

    def __init__(self, grid: halox.Grid, tolerance: float) -> None:
        self._xp = xp = grid.xp
        self._grid, self._tolerance = grid, tolerance
        self.u, self.v, self.change = (grid.zeros("f8") for _ in range(3))
        self.norm, self.until = xp.zeros(()), xp.zeros((), bool)
        self._plans = [grid.plan(field, corners=False) for field in (self.u, self.v)]
        self._relax = xp.RawKernel(RELAX, "relax")
        self.begin()

    def begin(self) -> None:
        """Set the initial values."""
        self.u[...] = 0
        self._grid.interior(self.u)[::2, ::3] = 1

    def step(self) -> None:
        """Make two sweeps."""
        fields = (self.u, self.v)
        for plan, old, new in zip(self._plans, fields, fields[::-1], strict=True):
            plan()
            rows, columns = self._grid.rank_shape
            self._relax(
                (-(-columns // 128), rows),
                (128,),
                (old, new, self.change, self._xp.int32(old.shape[1]), self._xp.int32(columns)),
            )
        self._grid.norm(self.change, out=self.norm)
        self._xp.less(self.norm, self._tolerance, out=self.until)


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the wall time and the CPU time of a call that waits for the GPU, medians in seconds."""
    walls, cpus = [], []
    for _ in range(REPEATS + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return median(walls[1:]), median(cpus[1:])


def of_steps(grid: halox.Grid, every: int, stream: Any) -> dict[str, float]:
    """Return microseconds a step of a loop and of its baseline, and the CPU time of the loop's host as a share."""
    jacobi = Jacobi(grid, 0.0)
    loop = grid.loop(jacobi.step, until=jacobi.until, most=STEPS, every=every)
    assert loop() == STEPS and not loop.why_host, loop

    def steps() -> None:
        for _ in range(every):
            jacobi.step()

    replay = captured(steps, stream)

    def baseline() -> None:
        for _ in range(STEPS // every):
            replay()
        stream.synchronize()

    def looks() -> None:
        for _ in range(STEPS // 10 // every):
            replay()
            if jacobi.until:
                break

    wall, cpu = timed(loop)
    bare, _ = timed(baseline)
    by_host, _ = timed(looks)
    return {
        "us": wall / STEPS * 1e6,
        "baseline": bare / STEPS * 1e6,
        "cpu": cpu / wall,
        "by host": by_host / (STEPS // 10) * 1e6,
    }


def benchmarks() -> list[dict[str, Any]]:
    """Return the figures as dicts of name, value, unit, baseline and target."""
    import cupy as cp

    with (
        halox.Grid(CELLS, halo=1, periodic=True, device="gpu") as grid,
        cp.cuda.Stream(non_blocking=True) as stream,
    ):
        tens, ones = (of_steps(grid, every, stream) for every in (10, 1))
        jacobi = Jacobi(grid, 1e-3)
        steps = grid.loop(jacobi.step, until=jacobi.until, most=STEPS, every=10)()
        assert steps < STEPS and float(jacobi.norm) < 1e-3, (steps, jacobi.norm)
    more = ones["us"] - ones["baseline"]
    ratio = tens["us"] / tens["baseline"]
    return [
        _figure("a look after ten steps", ratio, "x its time", MOST_RATIO, tens),
        _figure("a look after each step", more, "us more", MOST_MORE_US, ones),
        _figure("CPU time of the host", tens["cpu"], "of a core", MOST_CPU, tens),
    ]


def _figure(
    name: str, value: float, unit: str, most: float, times: dict[str, float]
) -> dict[str, Any]:
    return {
        "name": f"Jacobi loop on {MPI.COMM_WORLD.size} GPU(s), {name}",
        "value": round(value, 4),
        "unit": unit,
        "baseline": round(times["baseline"], 3),
        "baseline_name": "us: a step in a CUDA graph without looks",
        "us": round(times["us"], 3),
        "others": {"replays, with looks of the host": round(times["by host"], 2)},
        "target": most,
        "at_most": True,
        "met": value <= most,
    }


if __name__ == "__main__":
    found = benchmarks()
    if MPI.COMM_WORLD.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
