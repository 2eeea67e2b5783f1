"""Figures of transposes with their targets, in one run: on GPUs, and between ranks of a host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import halox
from halox_bench.common.targets import Figure, Progress, figure, measured, missing, over
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import Timing
from halox_bench.ranks.rows import GRAPH, SELECTED, STREAM, others, right, us_of
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
from halox_bench.transpose.rows import TransposeRow
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
ON_HOST = (128, 128, 128)
FEWER_ORDERS = ((0, 1, 2), (0, 2, 1), (2, 1, 0))

Groups = dict[str, Callable[[], Iterator[Figure]]]


def measure(
    comm: Any,
    *,
    budget_s: float = BUDGET_S,
    progress: Progress = lambda what, done, total: None,
) -> list[Figure]:
    """Measure all of them on the GPUs of the ranks at hand, collectively; see `measured`.

    Of one rank, the figures of one GPU; of several, those of divided grids.
    """
    bench = TransposeBench(comm, Options("gpu", (), timing=TIMING))
    return measured(Targets(bench).groups(), budget_s, progress, comm)


def measure_on_host(
    comm: Any,
    *,
    budget_s: float = BUDGET_S,
    progress: Progress = lambda what, done, total: None,
) -> list[Figure]:
    """Measure those of NumPy arrays; the target is for pencils on 4 ranks."""
    bench = TransposeBench(comm, Options("cpu", (), timing=TIMING))
    return measured(HostTargets(bench).groups(), budget_s, progress, comm)


class Targets:
    """The groups of figures, on one bench of GPUs."""

    def __init__(self, bench: TransposeBench) -> None:
        self._bench, self._comm = bench, bench.comm

    def groups(self) -> Groups:
        """Return the groups by name, in the order to be measured."""
        if self._comm.size > 1:
            return self._between_ranks()
        found: Groups = {}
        for shape, dtype in MATRICES:
            case = TransposeCase(shape, (1, 0), dtype, method=VECTOR)
            found[case.name] = partial(self.of_copy, case, MATRIX_OF_COPY[dtype])
        for dtype, permutations in (("c16", orders(3)[1:]), ("f8", FEWER_ORDERS[1:])):
            for axes in permutations:
                case = TransposeCase(VOLUME, axes, dtype)
                found[case.name] = partial(self.of_copy, case, VOLUME_OF_COPY)
        if hasattr(halox, "FFT"):
            found["3D FFT"] = self.fourier
        return found

    def _between_ranks(self) -> Groups:
        found: Groups = {}
        for division in (SLABS, PENCILS) if self._comm.size > 3 else (SLABS,):
            # Ranks that share a GPU have no target, and show that it works.
            for axes in BETWEEN_RANKS[:2] if self._bench.shared_gpu else BETWEEN_RANKS:
                case = TransposeCase(DIVIDED, axes, "c16", division=division)
                found[case.name] = partial(self.divided, case)
        return found

    def of_copy(self, first: TransposeCase, least: float) -> Iterator[Figure]:
        for case in _both(first):
            rows = self._measured(case)
            mode = _mode(rows)
            us, copy = us_of(rows, SELECTED, mode), us_of(rows, COPY, mode)
            what = f"{_what(case)}, in a {mode}: share of a device copy's speed"
            if us is None or copy is None:
                yield missing(what, _why(rows))
                continue
            yield figure(
                what, copy / us, "share", least, copy, "us of a device copy", **_beside(rows, us)
            )

    def divided(self, first: TransposeCase) -> Iterator[Figure]:
        speed = None if self._bench.shared_gpu else self._bench.peer_bytes_per_us()
        for case in _both(first):
            rows = self._measured(case)
            mode = _mode(rows)
            us, copy, nccl = (us_of(rows, name, mode) for name in (SELECTED, COPY, NCCL))
            what = f"{_what(case)}, {self._comm.size} ranks, in a {mode}"
            if us is None:
                yield missing(what, _why(rows))
                continue
            if nccl is not None:
                yield over(f"{what}: over {NCCL}", us, nccl, None, f"us of {NCCL}")
            if speed is None and copy is not None:
                beside = "us of a device copy of a rank's block"
                yield over(what, us, copy, None, beside, others=others(rows, mode))
            elif speed is not None:
                turned = case.axes != orders(case.ndim)[0]
                yield figure(
                    f"{what}: share of the measured speed of a copy to the peer",
                    rows[0].bytes_sent / us / speed,
                    "share",
                    OF_PEER if turned else None,
                    speed / 1e3,
                    "GB/s of that copy",
                    bytes_sent=rows[0].bytes_sent,
                    **_beside(rows, us),
                )

    def fourier(self) -> Iterator[Figure]:
        times = fft.times_us(self._bench)
        plan = times[fft.PLAN]
        for name, most in ((fft.HALOX, OF_CUFFT), (fft.BACK, None)):
            what = f"3D FFT of {fft.CELLS}^3 complex128, one GPU, {name}: over cuFFT's own 3D plan"
            yield over(what, times[name], plan, most, "us of cuFFT's plan")

    def _measured(self, case: TransposeCase) -> list[TransposeRow]:
        return right(self._bench.measure(case))


class HostTargets:
    """The groups of figures of NumPy arrays, on one bench."""

    def __init__(self, bench: TransposeBench) -> None:
        self._bench, self._size = bench, bench.comm.size

    def groups(self) -> Groups:
        """Return the groups by name, in the order to be measured."""
        divisions = (PENCILS, SLABS) if self._size > 1 else (WHOLE,)
        found: Groups = {}
        for division in divisions:
            for axes in {PENCILS: FEWER_ORDERS, SLABS: FEWER_ORDERS[:1]}.get(
                division, FEWER_ORDERS[1:]
            ):
                case = TransposeCase(ON_HOST, axes, "c16", division=division)
                found[case.name] = partial(self.faster, case)
        return found

    def faster(self, first: TransposeCase) -> Iterator[Figure]:
        names = (COPYTO,) if self._size == 1 else (ALLTOALLW, ALLTOALLW_COPYTO)
        for case in _both(first):
            rows = right(self._bench.measure(case))
            times = {name: us_of(rows, name, STREAM) for name in (SELECTED, *names)}
            ours = times.pop(SELECTED)
            timed = {name: us for name, us in times.items() if us is not None}
            what = f"{_what(case)}, {self._size} ranks, NumPy: times as fast as {names[0]}"
            if ours is None or not timed:
                yield missing(what, _why(rows))
                continue
            best = min(timed, key=lambda name: timed[name])
            least = OF_ALLTOALLW if self._size == 4 and case.division == PENCILS else None
            ratio = timed[best] / ours
            yield figure(
                what, ratio, "x", least, timed[best], f"us of {best}", **_beside(rows, ours)
            )


def _both(case: TransposeCase) -> list[TransposeCase]:
    """Return the case in both directions."""
    return [
        TransposeCase(
            *(case.shape, case.axes, case.dtype, case.components, case.division),
            direction,
            case.method,
        )
        for direction in DIRECTIONS
    ]


def _what(case: TransposeCase) -> str:
    if case.method != VECTOR:
        return f"Transpose of {case.name}"
    return f"matrix transposed by a datatype, {case.name}"


def _mode(rows: Sequence[TransposeRow]) -> str:
    """Return the mode that counts: a graph, where halox's transpose can be captured."""
    return GRAPH if us_of(rows, SELECTED, GRAPH) else STREAM


def _why(rows: Sequence[TransposeRow]) -> str:
    return next((row.error for row in rows if row.error), "not measured")


def _beside(rows: Sequence[TransposeRow], us: float) -> dict[str, Any]:
    """Return what stands beside a figure: all times, and why others are not there."""
    selected = next(row for row in rows if row.name == SELECTED)
    return {
        "us": round(us, 2),
        "path": selected.path,
        "others": others(rows, _mode(rows)),
        "refused": {row.name: row.error for row in rows if row.error},
    }
