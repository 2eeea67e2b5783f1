"""Figures of transposes with their targets: on GPUs, and of NumPy arrays."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from halox_bench.common.rows import GRAPH, SELECTED, STREAM, Row, others, right, us_of
from halox_bench.common.targets import (
    FASTER,
    OVER,
    Figure,
    Groups,
    Target,
    figure,
    over,
)
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import Timing
from halox_bench.transpose import fft
from halox_bench.transpose.baselines import ALLTOALLW, ALLTOALLW_COPYTO, COPY, COPYTO
from halox_bench.transpose.baselines_gpu import NCCL
from halox_bench.transpose.cases import (
    DIRECTIONS,
    DIVIDED,
    MATRICES,
    PENCILS,
    SLABS,
    VECTOR,
    VOLUME,
    WHOLE,
    TransposeCase,
    orders,
)
from halox_bench.transpose.run import TransposeBench

BUDGET_S = 45.0
TIMING = Timing(batches=7, batch_s=3e-3)

MATRIX_OF_COPY = {"f4": 0.80, "f8": 0.85, "c16": 0.90}
"""A matrix transposed by a datatype: least share of a device copy's speed."""

VOLUME_OF_COPY = 0.80
OF_CUFFT = 1.15
OF_PEER = 0.75
OF_ALLTOALLW = 1.3

BETWEEN_RANKS = ((0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0))
FEWER_ORDERS = ((0, 1, 2), (0, 2, 1), (2, 1, 0))
ON_HOST = (128, 128, 128)
HOST_DIVISIONS = {WHOLE: FEWER_ORDERS[1:], PENCILS: FEWER_ORDERS, SLABS: FEWER_ORDERS[:1]}
"""Orders of the axes of NumPy arrays, by the division."""


def groups(args: argparse.Namespace | None, comm: Any, device: str) -> Groups:
    """Return the groups of figures: of one GPU on one rank, of divided grids on several; on CPUs of NumPy arrays."""
    target = Targets(TransposeBench(comm, Options(device, (), timing=TIMING)))
    if device == "cpu":
        return target.on_host()
    return target.between_ranks() if comm.size > 1 else target.of_one_gpu()


class Targets:
    """The groups of figures, on one bench."""

    def __init__(self, bench: TransposeBench) -> None:
        self._bench, self._comm = bench, bench.comm

    def of_one_gpu(self) -> Groups:
        """Return the groups of one GPU."""
        cases = [
            (TransposeCase(shape, (1, 0), dtype, method=VECTOR), MATRIX_OF_COPY[dtype])
            for shape, dtype in MATRICES
        ]
        for dtype, permutations in (("c16", orders(3)[1:]), ("f8", FEWER_ORDERS[1:])):
            cases += [(TransposeCase(VOLUME, axes, dtype), VOLUME_OF_COPY) for axes in permutations]
        found: Groups = {case.name: partial(self.of_copy, case, least) for case, least in cases}
        return {**found, "3D FFT": self.fourier}

    def between_ranks(self) -> Groups:
        """Return the groups of divided grids; ranks that share a GPU have no targets, and fewer cases."""
        return {
            case.name: partial(self.divided, case)
            for division in ((SLABS, PENCILS) if self._comm.size > 3 else (SLABS,))
            for axes in BETWEEN_RANKS[: 2 if self._bench.shared_gpu else None]
            for case in [TransposeCase(DIVIDED, axes, "c16", division=division)]
        }

    def on_host(self) -> Groups:
        """Return the groups of NumPy arrays; the target is for pencils on 4 ranks."""
        return {
            case.name: partial(self.faster, case)
            for division in ((PENCILS, SLABS) if self._comm.size > 1 else (WHOLE,))
            for axes in HOST_DIVISIONS[division]
            for case in [TransposeCase(ON_HOST, axes, "c16", division=division)]
        }

    def of_copy(self, first: TransposeCase, least: float) -> Iterator[Figure]:
        """Measure both directions of a case on one GPU beside a device copy."""
        label = "us of a device copy"
        for case, rows, mode in self._both(first):
            what = f"{_what(case)}, in a {mode}: share of a device copy's speed"
            target = Target(what, {mode: least}, (COPY,), FASTER, unit="share", label=label)
            yield from target.figures(rows, refused=_refused(rows))

    def divided(self, first: TransposeCase) -> Iterator[Figure]:
        """Measure both directions of a divided case beside NCCL by hand and the speed of a copy to the peer."""
        speed = None if self._bench.shared_gpu else self._bench.peer_bytes_per_us()
        for case, rows, mode in self._both(first):
            us, path = us_of(rows, SELECTED, mode), rows[0].path
            what = f"{_what(case)}, {self._comm.size} ranks, in a {mode}"
            target = Target(f"{what}: over {NCCL}", {mode: None}, (NCCL,), OVER, required=False)
            yield from target.figures(rows)
            if speed is None or us is None:
                label = "us of a device copy of a rank's block"
                yield from Target(what, {mode: None}, (COPY,), OVER, label=label).figures(rows)
                continue
            turned = case.axes != orders(case.ndim)[0]
            yield figure(
                f"{what}: share of the measured speed of a copy to the peer",
                rows[0].bytes_sent / us / speed,
                "share",
                OF_PEER if turned else None,
                speed / 1e3,
                "GB/s of that copy",
                bytes_sent=rows[0].bytes_sent,
                us=round(us, 2),
                path=path,
                others=others(rows, mode),
            )

    def fourier(self) -> Iterator[Figure]:
        """Measure `halox.FFT` beside cuFFT's own plan."""
        times = fft.times_us(self._bench)
        plan = times[fft.PLAN]
        for name, most in ((fft.HALOX, OF_CUFFT), (fft.BACK, None)):
            what = f"3D FFT of {fft.CELLS}^3 complex128, one GPU, {name}: over cuFFT's own 3D plan"
            yield over(what, times[name], plan, most, "us of cuFFT's plan")

    def faster(self, first: TransposeCase) -> Iterator[Figure]:
        """Measure both directions of a case of NumPy arrays beside the faster baseline."""
        size = self._comm.size
        names = (COPYTO,) if size == 1 else (ALLTOALLW, ALLTOALLW_COPYTO)
        least = OF_ALLTOALLW if size == 4 and first.division == PENCILS else None
        for case, rows, _ in self._both(first):
            best = min(names, key=lambda name: us_of(rows, name) or float("inf"))
            what = f"{_what(case)}, {size} ranks, NumPy: times as fast as {names[0]}"
            yield from Target(what, {STREAM: least}, (best,), FASTER).figures(rows)

    def _both(self, first: TransposeCase) -> Iterator[tuple[TransposeCase, list[Row], str]]:
        """Yield both directions of a case, the rows, and the mode that counts: a graph where one is possible."""
        for direction in DIRECTIONS:
            case = replace(first, direction=direction)
            rows = right(self._bench.measure(case))
            yield case, rows, GRAPH if us_of(rows, SELECTED, GRAPH) else STREAM


def _what(case: TransposeCase) -> str:
    if case.method != VECTOR:
        return f"Transpose of {case.name}"
    return f"matrix transposed by a datatype, {case.name}"


def _refused(rows: Sequence[Row]) -> dict[str, str]:
    return {row.name: row.error for row in rows if row.error}
