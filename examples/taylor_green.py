"""Taylor-Green vortices in a plane: the Navier-Stokes equations in Fourier space, compared with their exact solution.

The state is the vorticity w in Fourier space. The stream function has the coefficients w / k**2, and its derivatives
are the velocity. Velocity and the gradient of w are transformed to points and multiplied there, and the product is
transformed back. ``dealias=True`` uses 3/2 as many points as cells per axis, which avoids aliasing. A mean flow carries
the vortices, which keep their shape while they decay (G. I. Taylor, Phil. Mag. 46, 671, 1923).

Alone: ``python examples/taylor_green.py``; on four ranks, with a picture:
``halox run examples/taylor_green.py -n 4 --png taylor_green.png``. ``taylor_green_3d.py`` is the flow in a box.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import halox

MEAN_FLOW = (0.25, 0.125)


class Flow:
    """Vorticity in Fourier space, in a plane 2 pi long each way."""

    def __init__(self, fft: halox.FFT, nu: float) -> None:
        self.fft, self.nu, self.xp, self.k = fft, nu, fft.grid.xp, fft.wavenumbers()
        self.squares = sum(a * a for a in self.k)
        # With an even number of cells the wave of two cells per period has no derivative, so it is dropped.
        self.kept = math.prod(2 * abs(a) < fft.grid.grid_shape[0] for a in self.k)

    def rate(self, w: Any) -> Any:
        """Return the time derivative of the vorticity: advection and diffusion."""
        x, y = self.k
        stream = w / self.xp.maximum(self.squares, 1)
        u, v, along_x, along_y = self.fft.backward(
            1j * self.xp.stack([y * stream, -x * stream, x * w, y * w])
        )
        carried = (MEAN_FLOW[0] + u) * along_x + (MEAN_FLOW[1] + v) * along_y
        return -self.fft.forward(carried) * self.kept - self.nu * self.squares * w

    def step(self, w: Any, dt: float) -> Any:
        """Return the vorticity one time step later, by the fourth-order Runge-Kutta scheme."""
        total, later = 0, w
        for weight, part in ((1, dt / 2), (2, dt / 2), (2, dt), (1, 0)):
            rate = self.rate(later)
            total, later = total + weight * rate, w + part * rate
        return w + dt / 6 * total


def vortices(points: halox.Grid, nu: float, t: float) -> Any:
    """Return the exact vorticity at the points."""
    x, y = (
        2 * math.pi * i / points.grid_shape[0] - mean * t
        for i, mean in zip(points.indices(), MEAN_FLOW, strict=True)
    )
    return -2 * math.exp(-2 * nu * t) * points.xp.sin(x) * points.xp.sin(y)


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the largest error."""
    options = parse(arguments)
    shape, device = (options.cells,) * 2, options.device
    with halox.FFT(shape, real=True, norm="forward", dealias=True, device=device) as fft:
        flow, points = Flow(fft, 1 / options.re), fft.physical
        w = fft.forward(vortices(points, flow.nu, 0))
        for _ in range(options.steps):
            w = flow.step(w, options.dt)
        t = options.steps * options.dt
        found = fft.backward(w)
        error = float(points.max(abs(found - vortices(points, flow.nu, t))))
        whole = points.gather(found) if options.png else None
        if points.rank == 0:
            print(
                f"{points.size} rank(s), {points.device}: "
                f"{options.steps} steps to t = {t:.4g}: largest error {error:.1e}"
            )
    if whole is not None:
        draw(options.png, whole, t)
    if not error <= 1e-13 + 1e-3 * options.dt**4 * t:
        raise SystemExit("the result is wrong")
    return error


def draw(path: Path, whole: Any, t: float) -> None:
    """Draw the vorticity."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(whole.T, origin="lower", extent=(0, 2, 0, 2), cmap="RdBu_r")
    figure.colorbar(image, ax=axes, label="vorticity")
    axes.set(title=f"t = {t:.4g}", xlabel="x / pi", ylabel="y / pi")
    figure.savefig(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, default=32, metavar="N", help="along each axis")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dt", type=float, default=0.01, help="time step")
    parser.add_argument("--re", type=float, default=100, help="Reynolds number, 1 / nu")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
