"""The examples of Fourier transforms: their reference values and their checks. tests/mpi/test_examples.py runs them."""

from __future__ import annotations

import itertools
import re
import runpy
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import halox
from tests import support

ROOT = Path(__file__).resolve().parents[3]
POISSON = ROOT / "examples" / "poisson.py"
PLANE = ROOT / "examples" / "taylor_green.py"
BOX = ROOT / "examples" / "taylor_green_3d.py"
PRINTED = re.compile(
    r"(\d+) rank\(s\), (\w+): (\d+) steps to t = (\S+)\n"
    r"energy (\S+), enstrophy (\S+); largest error (\S+)\n"
)

Vector = tuple[int, int, int]
Series = dict[Vector, list[Fraction]]


def box() -> dict[str, Any]:
    return runpy.run_path(str(BOX))


def product(first: Series, second: Series, into: Series) -> None:
    """Add -(first . grad) second to a series; velocities are i times its coefficients, which are real."""
    for (p, a), (q, b) in itertools.product(first.items(), second.items()):
        along = sum(x * k for x, k in zip(a, q, strict=True))
        if along:
            sums = into[p[0] + q[0], p[1] + q[1], p[2] + q[2]]
            for axis in range(3):
                sums[axis] += along * b[axis]


def exact_enstrophy(nu: Fraction, order: int) -> list[Fraction]:
    """Return the Taylor coefficients of the enstrophy in time, by exact arithmetic."""

    def zero() -> list[Fraction]:
        return [Fraction(0)] * 3

    # sin x cos y cos z and -cos x sin y cos z, as a sum of exp(i k x) with k = (+-1, +-1, +-1)
    start: Series = {
        k: [Fraction(-k[0], 8), Fraction(k[1], 8), Fraction(0)]
        for k in itertools.product((1, -1), repeat=3)
    }
    powers = [start]
    for n in range(order):
        rate: Series = defaultdict(zero)
        for i in range(n + 1):
            product(powers[i], powers[n - i], rate)
        for k, v in rate.items():
            square = sum(a * a for a in k)
            if square:
                gradient = sum(a * b for a, b in zip(k, v, strict=True)) / square
                rate[k] = [b - a * gradient for a, b in zip(k, v, strict=True)]
        for k, v in powers[n].items():
            square = sum(a * a for a in k)
            rate[k] = [a - nu * square * b for a, b in zip(rate[k], v, strict=True)]
        powers.append({k: [a / (n + 1) for a in v] for k, v in rate.items() if any(v)})
    return [
        sum(
            Fraction(sum(a * a for a in k), 2) * a * b
            for i in range(n + 1)
            for k, v in powers[i].items()
            for a, b in zip(v, powers[n - i].get(k, zero()), strict=True)
        )
        for n in range(order + 1)
    ]


def test_the_published_series_solves_the_equations() -> None:
    series, nu = box()["SERIES"], Fraction(1, 7)
    exact = exact_enstrophy(nu, len(series) - 1)
    assert exact[0] == Fraction(3, 8)
    for row, coefficient in zip(series, exact, strict=True):
        published = sum(Fraction(c).limit_denominator(10_000) * nu**p for p, c in enumerate(row))
        assert Fraction(3, 8) * published == coefficient


def printed(said: str) -> tuple[str, int, float, float]:
    """Return device, steps, energy and enstrophy of a run."""
    found = PRINTED.search(said)
    assert found, said
    return found[2], int(found[3]), float(found[5]), float(found[6])


# Energy and enstrophy at t = 0.1 and Re = 1600, from the tests of spectralDNS (M. Mortensen and H. P. Langtangen,
# Comput. Phys. Commun. 203, 53, 2016).
CASES = dict.fromkeys(
    ("--cells 16 --steps 10 --re 1600", "--cells 19 --steps 5 --dt 0.02 --re 1600"),
    (0.124953117517, 0.375249930801),
)
PLANES = ["--cells 17 --steps 20 --re 50 --dt 0.02", "--cells 16"]


@pytest.mark.full
def test_largest_dissipation() -> None:
    """The vortex at Re = 100; reference from a figure of M. E. Brachet et al., J. Fluid Mech. 130, 411, 1983."""
    support.require("mpi")
    example, nu, dt, cells = box(), 0.01, 0.05, 16
    with (
        halox.Grid((cells,) * 3, halo=0, periodic=True, device="cpu") as grid,
        halox.FFT(grid, real=True, norm="forward", dealias=True) as fft,
    ):
        flow = example["Flow"](fft, nu)
        u = fft.forward(example["vortex"](fft.physical))
        dissipation = []
        for _ in range(120):
            u = flow.step(u, dt)
            dissipation.append(2 * nu * flow.averages(u)[1])
    largest = int(np.argmax(dissipation))
    assert dissipation[largest] == pytest.approx(0.01298, rel=0.02)
    assert (largest + 1) * dt == pytest.approx(4.9, abs=0.3)


def slightly_wrong(method: str) -> type[halox.FFT]:
    """Return `halox.FFT` with a method that returns slightly too large numbers."""

    def larger(self: halox.FFT, *given: Any) -> Any:
        found = getattr(super(Wrong, self), method)(*given)
        if method == "wavenumbers":
            return (*found[:-1], 1.0001 * found[-1])
        return 1.0001 * found

    class Wrong(halox.FFT):
        pass

    setattr(Wrong, method, larger)
    return Wrong


@pytest.mark.parametrize(
    ("example", "words", "wrong"),
    [
        (PLANE, "--steps 3", "backward"),
        (BOX, "--cells 16 --steps 20", "wavenumbers"),
        (POISSON, "", "forward"),
        # Without products, and without the mean flow, since the vortices do not advect themselves.
        (BOX, "--cells 16 --steps 20", ("tendency", lambda flow, u: 0 * u)),
        (PLANE, "--steps 3", ("rate", lambda flow, w: -flow.nu * flow.squares * w)),
    ],
)
def test_wrong_results_are_noticed(example: Path, words: str, wrong: Any) -> None:
    support.require("mpi")
    scope = runpy.run_path(str(example))
    if isinstance(wrong, str):
        changed = SimpleNamespace(Grid=halox.Grid, FFT=slightly_wrong(wrong))
        scope["main"].__globals__["halox"] = changed
    else:
        setattr(scope["Flow"], *wrong)
    with pytest.raises(SystemExit, match="wrong"):
        scope["main"]([*words.split(), "--device", "cpu"])
