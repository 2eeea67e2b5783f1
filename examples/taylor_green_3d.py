"""The Taylor-Green vortex in a box: the Navier-Stokes equations in Fourier space, compared with a known series.

The state is the Fourier coefficients of the velocity u in a box 2 pi long each way. For the nonlinear term, u x curl u,
both factors are transformed to points and multiplied there, and the product is transformed back. ``dealias=True`` uses
3/2 as many points as cells per axis, which avoids aliasing. The vortex breaks up. Energy and enstrophy, half the mean
square of the vorticity, are compared at early times with the power series of G. I. Taylor and A. E. Green ("Mechanism
of the production of small eddies from large ones", Proc. R. Soc. London A 158, 499, 1937).

Alone: ``python examples/taylor_green_3d.py``; on four ranks, with a picture:
``halox run examples/taylor_green_3d.py -n 4 --cells 64 --re 400 --dt 0.025 --steps 320 --png vortex.png``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import halox

EARLY = 0.5  # end of the comparison

# The enstrophy divided by its initial value, 3/8: rows are powers of t, columns powers of nu.
SERIES = (
    (1,),
    (0, -6),
    (5 / 48, 0, 18),
    (0, -5 / 3, 0, -36),
    (50 / (99 * 64), 0, 1835 / (9 * 16), 0, 54),
    (0, -361 / (44 * 32), 0, -761 / 12, 0, -324 / 5),
)


def known(nu: float, t: float) -> tuple[float, float]:
    """Return energy and enstrophy by the series; the energy decreases by twice nu times the enstrophy."""
    terms = [sum(c * nu**p for p, c in enumerate(row)) * t**n for n, row in enumerate(SERIES)]
    integral = sum(term * t / (n + 1) for n, term in enumerate(terms))
    return 1 / 8 - 2 * nu * 3 / 8 * integral, 3 / 8 * sum(terms)


class Flow:
    """Time steps and averages of a velocity in Fourier space, of shape (3, ...)."""

    def __init__(self, fft: halox.FFT, nu: float) -> None:
        self.fft, self.nu, self.xp, self.k = fft, nu, fft.grid.xp, fft.wavenumbers()
        self.squares = sum(a * a for a in self.k)
        # With an even number of cells the wave of two cells per period has no derivative, so it is dropped.
        self.kept = math.prod(2 * abs(a) < fft.grid.grid_shape[0] for a in self.k)

    def cross(self, a: Any, b: Any) -> Any:
        return self.xp.stack([a[i - 2] * b[i - 1] - a[i - 1] * b[i - 2] for i in range(3)])

    def tendency(self, u: Any) -> Any:
        """Return u x curl u without its gradient part, which the pressure balances."""
        vorticity = self.fft.backward(self.cross(self.k, 1j * u))
        f = self.fft.forward(self.cross(self.fft.backward(u), vorticity)) * self.kept
        pressure = sum(a * b for a, b in zip(self.k, f, strict=True))
        pressure /= self.xp.maximum(self.squares, 1)
        return f - self.xp.stack([a * pressure for a in self.k])

    def step(self, u: Any, dt: float) -> Any:
        """Return the velocity one time step later, by the fourth-order Runge-Kutta scheme."""
        total, later = 0, u
        for weight, part in ((1, dt / 2), (2, dt / 2), (2, dt), (1, 0)):
            rate = self.tendency(later) - self.nu * self.squares * later
            total, later = total + weight * rate, u + part * rate
        return u + dt / 6 * total

    def averages(self, u: Any) -> tuple[float, float]:
        """Return energy and enstrophy per volume."""
        # The last axis has only waves k >= 0; waves with k > 0 count twice.
        density = (1 + (self.k[-1] > 0)) / 2 * (abs(u) ** 2).sum(axis=0)
        texts = {"energy": "density", "enstrophy": "squares * density"}
        sums = self.fft.grid.reduce(texts, density=density, squares=self.squares)
        return float(sums["energy"]), float(sums["enstrophy"])


def vortex(points: halox.Grid) -> Any:
    """Return the velocity at the points at time 0."""
    sin, cos = points.xp.sin, points.xp.cos
    x, y, z = (2 * math.pi * i / points.grid_shape[0] for i in points.indices())
    u = sin(x) * cos(y) * cos(z)
    return points.xp.stack([u, -cos(x) * sin(y) * cos(z), 0 * u])


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the largest error."""
    options = parse(arguments)
    shape, device = (options.cells,) * 3, options.device
    with halox.FFT(shape, real=True, norm="forward", dealias=True, device=device) as fft:
        flow, dt = Flow(fft, 1 / options.re), options.dt
        grid = fft.physical
        u = fft.forward(vortex(grid))
        curve = [(0.0, *flow.averages(u))]
        for step in range(options.steps):
            u = flow.step(u, dt)
            curve.append(((step + 1) * dt, *flow.averages(u)))
        error, is_right = 0.0, True
        for t, *found in curve:
            if t <= EARLY:
                pairs = zip(found, known(flow.nu, t), strict=True)
                off = max(abs(value - exact) for value, exact in pairs)
                # Errors of rounding, of the time steps, and of the truncated series.
                most = 1e-13 + 1e-4 * dt**4 * t + (5e-4 + 5 * flow.nu**2) * t**6
                error, is_right = max(error, off), is_right and off <= most
        whole = None
        if options.png:
            squares = fft.backward(flow.cross(flow.k, 1j * u)) ** 2
            whole = grid.gather(squares.sum(axis=0) ** 0.5)
        if grid.rank == 0:
            t, energy, enstrophy = curve[-1]
            print(
                f"{grid.size} rank(s), {grid.device}: {options.steps} steps to t = {t:.4g}\n"
                f"energy {energy:.12g}, enstrophy {enstrophy:.12g}; largest error {error:.1e}"
            )
    if whole is not None:
        draw(options.png, whole[0], curve, flow.nu)
    if not is_right:
        raise SystemExit("the result is wrong")
    return error


def draw(path: Path, plane: Any, curve: list[tuple[float, ...]], nu: float) -> None:
    """Draw the vorticity in a plane, and energy and enstrophy over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    image = left.imshow(plane.T, origin="lower", extent=(0, 2, 0, 2), cmap="inferno")
    figure.colorbar(image, ax=left, label="|vorticity|")
    left.set(title=f"t = {curve[-1][0]:.4g}, x = 0", xlabel="y / pi", ylabel="z / pi")
    times, *columns = zip(*curve, strict=True)
    early = [t for t in times if t <= 2]
    dashed = zip(*(known(nu, t) for t in early), strict=True)
    for name, values, exact in zip(("energy", "enstrophy"), columns, dashed, strict=True):
        right.plot(times, [value / values[0] for value in values], label=name)
        right.plot(early, [value / values[0] for value in exact], "--", color="gray", lw=1)
    right.set(title="dashed: Taylor and Green, 1937", xlabel="t", ylim=(0, None))
    right.set_ylabel("relative to t = 0")
    right.legend(loc="upper left")
    figure.savefig(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, default=16, metavar="N", help="along each axis")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dt", type=float, default=0.01, help="time step")
    parser.add_argument("--re", type=float, default=100, help="Reynolds number, 1 / nu")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
