"""Poisson's equation in a periodic box by Fourier transforms, compared with its exact solution.

Alone: ``python examples/poisson.py``; on four ranks, with a picture:
``halox run examples/poisson.py -n 4 --png poisson.png``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import halox

LENGTHS = (2 * math.pi, math.pi, 3.0)
# The solution: number of periods of cosines along each axis, and their amplitudes.
WAVES = {(1, 2, 3): 1.0, (5, 0, -1): -0.5, (0, 7, 2): 0.25}


def solve(fft: halox.FFT, f: Any, lengths: Sequence[float]) -> Any:
    """Return p with -laplacian(p) = f and a mean of 0, in a box of these lengths."""
    squares = sum(k * k for k in fft.wavenumbers(lengths))
    s = fft.forward(f)
    s *= (squares > 0) / (squares + (squares == 0))  # 1 / squares, and 0 for the mean
    return fft.backward(s)


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the largest error."""
    options = parse(arguments)
    with (
        halox.Grid(options.cells, halo=1, periodic=True, device=options.device) as grid,
        halox.FFT(grid, real=True) as fft,
    ):
        f, exact = grid.zeros("f8"), grid.zeros("f8")
        x, y, z = (
            length * i / n
            for length, i, n in zip(LENGTHS, grid.indices(), options.cells, strict=True)
        )
        for periods, amplitude in WAVES.items():
            kx, ky, kz = (
                2 * math.pi * m / length for m, length in zip(periods, LENGTHS, strict=True)
            )
            wave = amplitude * grid.xp.cos(kx * x + ky * y + kz * z)
            grid.interior(exact)[...] += wave
            grid.interior(f)[...] += (kx**2 + ky**2 + kz**2) * wave

        p = solve(fft, f, LENGTHS)
        grid.exchange(p)  # for stencils that use p next

        whole = grid.gather(p) if options.png else None
        p -= exact
        error = float(grid.max(abs(p)))
        if grid.rank == 0:
            print(f"{grid.size} rank(s), {grid.device}: largest error {error:.1e}")
    if whole is not None:
        draw(options.png, whole[:, :, 0])
    if not error <= 1e-12:
        raise SystemExit("the result is wrong")
    return error


def draw(path: Path, plane: Any) -> None:
    """Draw the solution in a plane of the box."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), dpi=110, layout="constrained")
    axes = figure.subplots()
    extent = (0, LENGTHS[0], 0, LENGTHS[1])
    figure.colorbar(axes.imshow(plane.T, origin="lower", extent=extent, cmap="RdBu_r"), ax=axes)
    axes.set(title="p at z = 0", xlabel="x", ylabel="y")
    figure.savefig(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs=3, default=(32, 24, 40), metavar="N")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
