"""Heat equation with the halo exchange inside the kernel of the step, where that is faster.

The fused kernel also stores the cells at the rim of its block into the neighbours' halos, so that a step is one launch.
The other way is an exchange and a kernel. Both are captured in CUDA graphs of two steps, since two fields alternate,
and the ranks take the faster one. Without a GPU, or where GPUs cannot map one another's memory, only the exchange is
possible. The result is compared with the exact solution of the scheme.

Alone: ``python examples/fused.py``; on four ranks, with a picture:
``halox run examples/fused.py -n 4 --png fused.png``. On two GPUs:
``mpiexec -n 2 python -m mpi4py examples/fused.py --cells 512 256``; ``--mode fused`` and ``--mode exchange`` choose.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import halox

WAVES = (3, 2)
RATE = 0.2  # diffusivity * time step / cell size squared; stable up to 0.25
THREADS = (32, 8)

# Cell [x, y] of an array with a halo of one cell; the fastest axis is y.
SOURCE = r"""
__device__ double updated(const double* u, int x, int y, int row)
{
    const double* at = u + (long long)x * row + y;
    return at[0] + 0.2 * (at[-row] + at[row] + at[-1] + at[1] - 4 * at[0]);
}

extern "C" __global__ void alone(const double* u, double* next, int nx, int ny)
{
    const int y = 1 + blockIdx.x * blockDim.x + threadIdx.x;
    const int x = 1 + blockIdx.y * blockDim.y + threadIdx.y;
    if (x <= nx && y <= ny)
        next[(long long)x * (ny + 2) + y] = updated(u, x, y, ny + 2);
}

extern "C" __global__ void fused(const halox::Halo<2> halo, int field, const double* u, int nx, int ny)
{
    const int y = 1 + blockIdx.x * blockDim.x + threadIdx.x;
    const int x = 1 + blockIdx.y * blockDim.y + threadIdx.y;
    if (x <= nx && y <= ny) {
        halo.wait({x, y});
        halo.store(field, {x, y}, updated(u, x, y, ny + 2));
    }
}
"""

TwoSteps = Callable[[], object]


def on_host(grid: halox.Grid, u: Any, v: Any) -> TwoSteps:
    """Return a function that makes two steps with NumPy."""

    def step(old: Any, new: Any) -> None:
        grid.exchange(old)
        around = old[:-2, 1:-1] + old[2:, 1:-1] + old[1:-1, :-2] + old[1:-1, 2:]
        new[1:-1, 1:-1] = old[1:-1, 1:-1] + RATE * (around - 4 * old[1:-1, 1:-1])

    def two_steps() -> None:
        step(u, v)
        step(v, u)

    return two_steps


def on_gpu(
    grid: halox.Grid, u: Any, v: Any, both: halox.Plan, stream: Any, mode: str
) -> dict[str, TwoSteps]:
    """Return functions that make two steps, by name: each replays a CUDA graph."""
    cupy = grid.xp
    nx, ny = grid.rank_shape
    blocks = (-(-ny // THREADS[0]), -(-nx // THREADS[1]))
    extents = cupy.int32(nx), cupy.int32(ny)
    module = cupy.RawModule(code=halox.device_header() + SOURCE)
    alone, fused = map(module.get_function, ("alone", "fused"))
    exchange = grid.plan(u)

    def with_exchange() -> None:
        for old, new in ((u, v), (v, u)):
            exchange(old)
            alone(blocks, THREADS, (old, new, *extents))

    found = {"exchange": with_exchange}
    try:
        halo = both.device_handle
    except halox.HaloxError as reason:  # the same on all ranks, for example if ranks share a GPU
        if grid.rank == 0:
            print(f"cannot be fused: {reason}")
    else:

        def fused_steps() -> None:
            for field, old in ((1, u), (0, v)):
                fused(blocks, THREADS, (halo, cupy.int32(field), old, *extents))

        found["fused"] = fused_steps
    return {name: captured(work, stream) for name, work in found.items() if mode in ("auto", name)}


def captured(work: Callable[[], None], stream: Any) -> TwoSteps:
    """Capture the launches of ``work`` on a stream; return a function that replays them by one launch."""
    work()  # compiles kernels and builds plans, which is impossible in a capture
    stream.begin_capture()
    try:
        work()
    except halox.errors.StateError:  # the path of the exchange needs the host
        stream.end_capture()
        return work
    graph = stream.end_capture()
    return lambda: graph.launch(stream)


def us_per_step(grid: halox.Grid, two_steps: TwoSteps) -> float:
    """Return the microseconds of a step on the slowest rank, the same number on all ranks."""
    times, repeats = [], 50 if grid.device == "gpu" else 5
    for _ in range(5):
        grid.allreduce(0.0)  # all ranks begin together
        begin = time.perf_counter()
        for _ in range(repeats):
            two_steps()
        if grid.device == "gpu":
            grid.xp.cuda.get_current_stream().synchronize()
        times.append(float(grid.allreduce(time.perf_counter() - begin, "max")))
    return sorted(times)[2] / (2 * repeats) * 1e6


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the largest error."""
    options = parse(arguments)
    with ExitStack() as stack:
        grid = stack.enter_context(
            halox.Grid(options.cells, halo=1, periodic=True, device=options.device)
        )
        u, v = grid.zeros("f8"), grid.zeros("f8")
        both = grid.plan(u, v)
        if grid.device == "gpu":  # CUDA cannot capture the default stream
            stream = stack.enter_context(grid.xp.cuda.Stream(non_blocking=True))
            ways = on_gpu(grid, u, v, both, stream, options.mode)
        else:
            ways = {"exchange": on_host(grid, u, v)}
        if options.mode not in ("auto", *ways):
            raise SystemExit("no fused steps here")
        times = {name: us_per_step(grid, way) for name, way in ways.items()}
        name = min(times, key=times.__getitem__)
        advance = ways[name]

        angles = [
            2 * math.pi * waves / cells * index
            for waves, cells, index in zip(WAVES, options.cells, grid.indices(), strict=True)
        ]
        wave = grid.xp.cos(angles[0]) * grid.xp.cos(angles[1])
        grid.interior(u)[...] = wave
        both()  # fused steps begin with filled halos
        for _ in range(options.steps // 2):
            advance()

        # A wave keeps its shape under the scheme; each step damps it by the same factor.
        damping = 1 - 4 * RATE * sum(
            math.sin(math.pi * waves / cells) ** 2
            for waves, cells in zip(WAVES, options.cells, strict=True)
        )
        whole = grid.gather(u) if options.png else None
        difference = grid.interior(u) - damping**options.steps * wave
        grid.interior(v)[...] = abs(difference)
        error = float(grid.max(v))
        if grid.rank == 0:
            us = ", ".join(f"{way} {us:.1f} us a step" for way, us in times.items())
            print(
                f"{grid.size} rank(s), {grid.device}: {us}\n{options.steps} steps, {name}: largest error {error:.1e}"
            )
    if whole is not None:
        draw(options.png, whole)
    if not error <= 1e-12:
        raise SystemExit("the result is wrong")
    return error


def draw(path: Path, whole: Any) -> None:
    """Draw the temperature of all cells."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    figure.colorbar(axes.contourf(whole.T, levels=24, cmap="inferno"), ax=axes)
    axes.set(title="temperature", xlabel="x", ylabel="y")
    figure.savefig(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs=2, default=(192, 128), metavar="N")
    parser.add_argument("--steps", type=int, default=500, help="an even number")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--mode", choices=("auto", "fused", "exchange"), default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    options = parser.parse_args(arguments)
    if options.steps < 2 or options.steps % 2:
        parser.error("--steps: an even number, since two fields alternate")
    return options


if __name__ == "__main__":
    main(sys.argv[1:])
