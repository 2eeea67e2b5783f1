"""Poisson's equation in a box by Jacobi's method; a GPU repeats the steps without the host until the residual is small.

In every cell ``6 u - (sum of the six neighbours) = f``; around the box u is 0. The solution is a sum of sines, and each
step damps the error of each sine by a known factor. The values and the residual are therefore known after any number of
steps, and the result is compared with them.

A step exchanges the halo, and computes the next values. Two steps, since two fields alternate, reduce the residual, six
times their change, to its norm. `Grid.loop` repeats them, and looks at the norm once in ``--read-every`` steps; on a
GPU all this needs no host.

Alone: ``python examples/jacobi.py``; on four ranks, with a picture:
``halox run examples/jacobi.py -n 4 --cells 36 24 30 --png jacobi.png``. On two ranks, with the time of a step:
``mpiexec -n 2 python -m mpi4py examples/jacobi.py --cells 256 256 256 --steps 200``.
With ``--reproducible`` the residual has the same bits on any number of ranks.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import halox

WAVES = {(1, 1, 1): 1.0, (3, 2, 1): -0.5}  # half waves along x, y, z, and the amplitude
INSIDE = (slice(1, -1),) * 3
THREADS = (32, 8)

# One thread a cell; all fields have the same shape, with a halo of one cell.
SOURCE = r"""
extern "C" __global__ void relax(
    const double* u, const double* f, double* next, int ny, int nz)
{
    const int z = blockIdx.x * blockDim.x + threadIdx.x;
    const int y = blockIdx.y * blockDim.y + threadIdx.y;
    const int x = blockIdx.z;
    if (y >= ny || z >= nz)
        return;
    const long long row = nz + 2, plane = (ny + 2) * row;
    const long long at = (x + 1) * plane + (y + 1) * row + z + 1;
    const double around = u[at - plane] + u[at + plane] + u[at - row] + u[at + row] + u[at - 1] + u[at + 1];
    next[at] = u[at] + (f[at] + around - 6 * u[at]) / 6;
}
"""

Relax = Callable[[Any, Any, Any], None]


def numpy_relax(u: Any, f: Any, following: Any) -> None:
    """Compute the next values."""
    around = u[:-2, 1:-1, 1:-1] + u[2:, 1:-1, 1:-1]
    around += u[1:-1, :-2, 1:-1]
    around += u[1:-1, 2:, 1:-1]
    around += u[1:-1, 1:-1, :-2]
    around += u[1:-1, 1:-1, 2:]
    following[INSIDE] = u[INSIDE] + (f[INSIDE] + around - 6 * u[INSIDE]) / 6


def cupy_relax(grid: halox.Grid) -> Relax:
    """Return a function that does the work of `numpy_relax` by one kernel."""
    kernel = grid.xp.RawKernel(SOURCE, "relax")
    nx, ny, nz = grid.rank_shape
    blocks = (-(-nz // THREADS[0]), -(-ny // THREADS[1]), nx)
    extents = [grid.xp.int32(n) for n in (ny, nz)]
    return lambda u, f, following: kernel(blocks, THREADS, (u, f, following, *extents))


class Wave:
    """A product of sines, an eigenvector of Jacobi's method."""

    def __init__(self, grid: halox.Grid, halves: tuple[int, ...], amplitude: float) -> None:
        angles = [math.pi * k / (n + 1) for k, n in zip(halves, grid.grid_shape, strict=True)]
        self.eigenvalue = sum(4 * math.sin(angle / 2) ** 2 for angle in angles)
        self.values = amplitude
        for angle, index in zip(angles, grid.indices(), strict=True):
            self.values = self.values * grid.xp.sin(angle * (index + 1))
        self.norm = abs(amplitude) * math.sqrt(math.prod((n + 1) / 2 for n in grid.grid_shape))

    def error(self, steps: int) -> float:
        """Return the fraction of the error that remains after ``steps`` steps from zero."""
        return (1 - self.eigenvalue / 6) ** steps


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the largest error."""
    options = parse(arguments)
    with halox.Grid(
        options.cells, halo=1, device=options.device, reproducible=options.reproducible
    ) as grid:
        xp, on_gpu = grid.xp, grid.device == "gpu"
        u, v, f = (grid.zeros("f8") for _ in range(3))
        residual, is_small = xp.zeros(()), xp.zeros((), bool)
        waves = [Wave(grid, halves, amplitude) for halves, amplitude in WAVES.items()]
        grid.interior(f)[...] = sum(wave.eigenvalue * wave.values for wave in waves)
        first = float(grid.norm(f))

        relax = cupy_relax(grid) if on_gpu else numpy_relax
        exchange = grid.plan(u, corners=False)

        def two_steps() -> None:
            for present, following in ((u, v), (v, u)):
                exchange(present)
                relax(present, f, following)
            grid.norm("6 * (b - a)", residual, a=v, b=u)
            xp.less_equal(residual, options.tolerance * first, out=is_small)

        two_steps()  # compiles the kernels, which the time of a step leaves out
        u[...] = 0
        rounds, every = -(-options.steps // options.read_every), options.read_every // 2
        loop = grid.loop(two_steps, until=is_small, most=rounds * every, every=every)
        begin = time.perf_counter()
        steps = 2 * loop()
        us = (time.perf_counter() - begin) / steps * 1e6
        now = float(residual)
        mode = "steps called by the host" if loop.why_host else "steps repeated by the GPU"
        if on_gpu and loop.why_host and grid.rank == 0:
            print(f"the host calls the steps: {loop.why_host}")

        whole = grid.gather(u) if options.png else None
        grid.interior(v)[...] = sum((1 - wave.error(steps)) * wave.values for wave in waves)
        # The residual belongs to the values before the last step. The sum below is NaN if either term is NaN.
        known = math.hypot(*(w.eigenvalue * w.norm * w.error(max(steps - 1, 0)) for w in waves))
        off = abs(now - known) / math.sqrt(math.prod(grid.grid_shape))
        error = float(grid.max("abs(u - v)", u=u, v=v)) + off
        if grid.rank == 0:
            print(
                f"{grid.size} rank(s), {grid.device}, {mode}: {steps} steps, {us:.1f} us each\n"
                f"residual {now!r}, {now / first:.1e} of the first; largest error {error:.1e}"
            )
    if whole is not None:
        draw(options.png, whole[:, :, whole.shape[2] // 2])
    # A step rounds ten times, numbers up to 9; a residual amplifies errors up to 12 times.
    if not error <= 3e-14 * (steps + 1):
        raise SystemExit("the result is wrong")
    return error


def draw(path: Path, plane: Any) -> None:
    """Draw the solution in a plane of the box."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=110, layout="constrained")
    axes = figure.subplots()
    figure.colorbar(axes.imshow(plane.T, origin="lower", cmap="RdBu_r"), ax=axes)
    axes.set(title="u half-way along z", xlabel="x", ylabel="y")
    figure.savefig(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs=3, default=(24, 16, 20), metavar="N")
    parser.add_argument(
        "--tolerance", type=float, default=1e-6, help="end at this share of the first residual"
    )
    parser.add_argument(
        "--steps", type=int, default=100_000, help="end after so many steps, in multiples of K"
    )
    parser.add_argument(
        "--read-every", type=int, default=100, metavar="K", help="steps between looks at it, even"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument(
        "--reproducible",
        action="store_true",
        help="residuals with the same bits on any number of ranks",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    options = parser.parse_args(arguments)
    if min(options.cells) <= max(map(max, WAVES)):
        parser.error(f"--cells: more than {max(map(max, WAVES))} along each axis, for the waves")
    if options.read_every < 2 or options.read_every % 2:
        parser.error("--read-every: an even number, since two fields alternate")
    return options


if __name__ == "__main__":
    main(sys.argv[1:])
