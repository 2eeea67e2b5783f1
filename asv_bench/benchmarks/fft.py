"""Fourier transforms of NumPy arrays on one rank, forward and backward, beside SciPy's or NumPy's own."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np

import halox

HALOX, WHOLE = "halox", "whole array"
Calls = dict[str, Callable[[], object]]


def whole_transforms() -> ModuleType:
    """Return the module that transforms whole arrays fastest."""
    found = importlib.util.find_spec("scipy") is not None
    return importlib.import_module("scipy.fft" if found else "numpy.fft")


def in_turn(calls: Calls, repeats: int) -> dict[str, float]:
    """Return the median microseconds of each call; they are made in turn, so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e6)
    return {name: median(found) for name, found in times.items()}


class OneRank:
    """Forward and backward of an N^3 array of float64 or complex128, with results in given arrays."""

    params = ([16, 32, 64, 128], ["complex", "real"])
    param_names = ("N", "values")
    timeout = 600
    repeats = 21

    @classmethod
    def small(cls) -> OneRank:
        tiny = cls()
        tiny.params = ([8], ["complex", "real"])
        tiny.repeats = 3
        return tiny

    def setup_cache(self) -> dict[tuple[int, str], dict[str, float]]:
        sizes, kinds = self.params
        return {(n, kind): self.measured(n, kind == "real") for n in sizes for kind in kinds}

    def measured(self, n: int, real: bool) -> dict[str, float]:
        whole = whole_transforms()
        with (
            halox.Grid((n,) * 3, halo=0, periodic=True, device="cpu") as grid,
            halox.FFT(grid, real=real) as fft,
        ):
            u = grid.zeros("f8" if real else "c16")
            u[...] = np.random.default_rng(1).random(u.shape)
            s = fft.forward(u)

            def both() -> None:
                fft.forward(u, s)
                fft.backward(s, u)

            def both_whole() -> object:
                if real:
                    return whole.irfftn(whole.rfftn(u), u.shape, (0, 1, 2))
                return whole.ifftn(whole.fftn(u))

            return in_turn({HALOX: both, WHOLE: both_whole}, self.repeats)

    def track_both_ways(self, measured: Any, n: int, values: str) -> float:
        return float(measured[n, values][HALOX])

    track_both_ways.unit = "us"  # type: ignore[attr-defined]

    def track_time_over_whole_array(self, measured: Any, n: int, values: str) -> float:
        figures = measured[n, values]
        return float(figures[HALOX] / figures[WHOLE])

    track_time_over_whole_array.unit = "ratio"  # type: ignore[attr-defined]
