"""The three-dimensional FFT of halox beside one plan of its FFT library."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

import halox
from halox.grid import Grid
from halox_bench.ranks.bench import RanksBench
from halox_bench.ranks.methods import WrongResult

CELLS = 512
HALOX, BACK, PLAN = "halox.FFT", "halox.FFT backward", "one plan over all axes"

_WAVE = (3, 5, 2)
_TOLERANCE = 1e-9


def times_us(bench: RanksBench, n: int = CELLS) -> dict[str, float]:
    """Time the complex transform of n^3 cells on one rank, forward and backward, and one plan over three axes.

    Raises
    ------
    WrongResult
        If the transform of a plane wave is wrong, or the transform back.

    Notes
    -----
    Collective. The plan is cuFFT's on a GPU; on a host it is `numpy.fft.fftn`.
    """
    device: Any = bench.options.device
    with (
        bench.stage.current(),
        Grid((n, n, n), halo=0, comm=bench.comm, device=device) as grid,
        halox.FFT(grid) as fft,
    ):
        found = _measured(bench, grid, fft, n)
    bench.free()
    return found


def _measured(bench: RanksBench, grid: Grid, fft: Any, n: int) -> dict[str, float]:
    """Check the transform, and time it."""
    stage = bench.stage
    u, again, spectrum = grid.zeros("c16"), grid.zeros("c16"), fft.grid.zeros("c16")
    u[...] = _wave(grid, n)
    calls: dict[str, Callable[[], Any]] = {
        HALOX: lambda: fft.forward(u, spectrum),
        BACK: lambda: fft.backward(spectrum, again),
    }
    for call in calls.values():
        call()
    stage.synchronize()
    _expect(bench, abs(spectrum[_WAVE] - n**3) < _TOLERANCE * n**3, "the wave's coefficient")
    spectrum[_WAVE] = 0
    _expect(bench, (abs(spectrum) < _TOLERANCE * n**3).all(), "another coefficient")
    _expect(bench, (abs(again - u) < _TOLERANCE).all(), "a value transformed back")
    calls[PLAN] = _plan(stage.xp, u, spectrum)
    stage.settle()
    found = bench.clock.measure(calls)
    stage.settle()
    return found


def _wave(grid: Grid, n: int) -> Any:
    """Return the plane wave that has the single coefficient `_WAVE`."""
    phase = sum(k * index for k, index in zip(_WAVE, grid.indices(), strict=True))
    return grid.xp.exp(2j * np.pi / n * (phase % n))


def _expect(bench: RanksBench, right: Any, what: str) -> None:
    if bench.comm.allreduce(int(not bool(right))):
        raise WrongResult(f"the FFT is wrong: {what}")


def _plan(xp: Any, u: Any, spectrum: Any) -> Callable[[], Any]:
    """Return one call of the library's transform over all axes."""
    if xp is np:

        def on_host() -> None:
            spectrum[...] = np.fft.fftn(u)

        return on_host
    plan = import_module("cupyx.scipy.fft").get_fft_plan(u, axes=(0, 1, 2), value_type="C2C")
    return lambda: plan.fft(u, spectrum, xp.cuda.cufft.CUFFT_FORWARD)
