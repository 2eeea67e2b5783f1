"""``halox bench fft``: the complex transform of three axes, beside one plan of the FFT library."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

import halox
from halox_bench.bench import Bench, rows_of_times
from halox_bench.clock import Call
from halox_bench.kinds import Kind, Option, numbers
from halox_bench.rows import Row

FORWARD, BACKWARD, PLAN = "halox.FFT", "halox.FFT backward", "one plan over all axes"

_WAVE = (3, 5, 2)
_TOLERANCE = 1e-9


class FftCase(NamedTuple):
    n: int

    @property
    def name(self) -> str:
        return f"{self.n}^3 c16"

    @property
    def details(self) -> dict[str, Any]:
        return {"nbytes": 16 * self.n**3}


def cases(args: argparse.Namespace) -> list[FftCase]:
    return [FftCase(n) for n in args.cells or ((32,) if args.quick else (128, 256, 512))]


def measure(bench: Bench, args: argparse.Namespace, case: FftCase) -> list[Row]:
    """Measure both directions; the transform of a plane wave, and the transform back, are compared."""
    if not bench.fits(4 * case.details["nbytes"]):
        return bench.left_out(case, "too large")
    n, stage, times = case.n, bench.stage, dict[str, float]()
    with (
        stage.current(),
        halox.FFT((n, n, n), comm=bench.comm, device=bench.device) as fft,
    ):
        grid = fft.physical
        u, again, spectrum = grid.zeros("c16"), grid.zeros("c16"), fft.grid.zeros("c16")
        phase = sum(k * index for k, index in zip(_WAVE, grid.indices(), strict=True))
        u[...] = grid.xp.exp(2j * np.pi / n * (phase % n))
        calls: dict[str, Call] = {
            FORWARD: lambda: fft.forward(u, spectrum),
            BACKWARD: lambda: fft.backward(spectrum, again),
        }
        for call in calls.values():
            call()
        stage.synchronize()
        # All of the wave is in one coefficient, on one rank.
        coefficient = abs(spectrum)
        mine = (coefficient > 0.5 * n**3).sum()
        bench.expect(abs(bench.comm.allreduce(int(mine)) - 1), "coefficients")
        rest = abs(coefficient - n**3 * (coefficient > 0.5 * n**3))
        bench.expect(int((rest > _TOLERANCE * n**3).sum()), "coefficients")
        bench.expect(int((abs(again - u) > _TOLERANCE).sum()), "values transformed back")
        if bench.comm.size == 1:
            calls[PLAN] = _plan(stage.xp, u, spectrum)
        stage.settle()
        times = bench.clock.measure(calls)
        stage.settle()
    bench.free()
    return rows_of_times(case, times, FORWARD)


def _plan(xp: Any, u: Any, spectrum: Any) -> Call:
    """Return one call of the library's transform over all axes: cuFFT's, or `scipy.fft`'s, else `numpy.fft`'s."""
    if xp is np:
        try:
            library = import_module("scipy.fft")
        except ModuleNotFoundError:
            library = np.fft
        return lambda: np.copyto(spectrum, library.fftn(u))
    plan = import_module("cupyx.scipy.fft").get_fft_plan(u, axes=(0, 1, 2), value_type="C2C")
    return lambda: plan.fft(u, spectrum, xp.cuda.cufft.CUFFT_FORWARD)


FFT = Kind(
    "fft",
    "Fourier transforms of complex128 values along three axes, beside one plan of the library",
    cases,
    measure,
    (Option("--cells", "cells along each axis, all ranks together", numbers),),
    budget_s=30.0,
)
