"""The examples of Fourier transforms: their reference values and their checks. tests/mpi/test_examples.py runs them."""

from __future__ import annotations

import re
import runpy
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


def box() -> dict[str, Any]:
    return runpy.run_path(str(BOX))


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
