"""Figures of exchanges between GPUs with their targets, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from halox.grid import Grid
from halox.runtime.world import load_mpi
from halox_bench.common.machine import why_not_gpu_aware
from halox_bench.common.targets import (
    BARE_LAUNCH,
    Figure,
    Progress,
    bare_launch,
    figure,
    limited,
    measured,
    missing,
    over,
)
from halox_bench.exchange.baselines_gpu import NCCL, ZERO_COPY
from halox_bench.exchange.cases import ExchangeCase
from halox_bench.exchange.rows import ExchangeRow
from halox_bench.exchange.run import Bench, Prepared
from halox_bench.exchange.steps import PENCIL_SHAPE, STEP_CELLS, step_us, transpose_us
from halox_bench.ranks.bench import Options
from halox_bench.ranks.busy import times_us
from halox_bench.ranks.clock import Timing
from halox_bench.ranks.rows import (
    GRAPH,
    PATH,
    SELECTED,
    STREAM,
    chosen_over_best,
    others,
    right,
    share_close,
    us_of,
)

BUDGET_S = 90.0
TIMING = Timing(batches=7, batch_s=3e-3)

X_FACES_US = {64: (7.0, 5.0), 128: (8.5, 7.0), 256: (11.0, 9.5), 512: (30.0, 28.0)}
"""Both x-faces of N^3 float64 a rank: at most so many microseconds in a stream, in a graph."""

SIX_FACES_US = {64: 12.0, 128: None, 256: 22.0, 512: 55.0}
"""All six faces on 8 GPUs, in a stream."""

OF_BY_HAND = 1.02
"""Six faces by the path ``nccl``, beside the same steps by hand."""

OF_NCCL = 0.5
OF_ZERO_COPY_SHARED = 0.6
OF_ZERO_COPY_STAGED = 0.7
BY_NCCL = "nccl"
LARGE_BYTES = 1 << 20
HOP_US = 1.5
OF_WIRE = 1.25
FOUR_FIELDS = 2.0
HALF_BUSY = 1.10
WELL_CHOSEN = 0.95
OF_PEER = 0.75
WEAK_SCALING = 0.95


def measure(
    comm: Any,
    *,
    budget_s: float = BUDGET_S,
    progress: Progress = lambda what, done, total: None,
) -> list[Figure]:
    """Measure all of them on the GPUs of the ranks at hand, collectively; see `measured`.

    Figures with targets are for 2 ranks, on a GPU each or, for the ``ipc`` path, on one; times of six faces are for 8.
    What is beside NCCL by hand, the wire or one GPU has its target on any number.
    """
    options = Options("gpu", timing=TIMING, no_gpu_aware=why_not_gpu_aware(comm, "gpu"))
    bench = Targets(Bench(comm, options))
    return measured(bench.groups(), budget_s, progress, comm)


class Targets:
    """The groups of figures, on one bench."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._comm = bench, bench.comm
        self._rows: list[ExchangeRow] = []

    def groups(self) -> dict[str, Callable[[], Iterator[Figure]]]:
        """Return the groups by name, in the order to be measured."""
        found: dict[str, Callable[[], Iterator[Figure]]] = {}
        if self._comm.size > 2 and not self._bench.shared_gpu:
            return {
                **self._six_faces(),
                "z-faces": self.z_faces,
                "pencil transpose": self.transpose,
                "weak scaling": self.weak_scaling,
            }
        for n in X_FACES_US:
            found[f"x-faces of {n}^3"] = partial(self.x_faces, n)
        found["host time"] = self.host_time
        if self._bench.shared_gpu:
            return found
        found["z-faces"] = self.z_faces
        found |= self._six_faces()
        found["half the GPU busy"] = self.half_busy
        found["all neighbours"] = self.all_neighbours
        found["pencil transpose"] = self.transpose
        found["weak scaling"] = self.weak_scaling
        for n in (16, 32):
            found[f"x-faces of {n}^3"] = partial(self.x_faces, n)
        found["choice of paths"] = self.choice
        return found

    def x_faces(self, n: int) -> Iterator[Figure]:
        rows = self._measured(ExchangeCase((n,) * 3, "x"))
        what = f"both x-faces of {n}^3 float64, {self._comm.size} ranks"
        shared = self._bench.shared_gpu
        streamed, nbytes = us_of(rows, SELECTED, STREAM), rows[0].bytes_each_way
        zero_copy, nccl = (us_of(rows, name, STREAM) for name in (ZERO_COPY, NCCL))
        targets = X_FACES_US.get(n) if not shared and self._comm.size == 2 else None
        for mode, place in ((STREAM, 0), (GRAPH, 1)):
            us = us_of(rows, SELECTED, mode)
            if us is None:
                # Ranks that share a GPU have no path that a graph can hold.
                if not shared:
                    yield missing(f"{what}, in a {mode}", _why(rows, mode))
                continue
            beside = us_of(rows, NCCL, mode) or nccl or zero_copy
            name = NCCL if nccl else ZERO_COPY
            yield limited(
                f"{what}, in a {mode}",
                us,
                "us",
                None if targets is None else targets[place],
                beside,
                f"us of {name}",
                others=others(rows, mode),
                path=_taken(rows, mode),
                bytes_each_way=nbytes,
            )
        if streamed is not None and nccl is not None:
            yield over(f"{what}: over {NCCL}", streamed, nccl, OF_NCCL, f"us of {NCCL}")
        path, most = ("ipc", OF_ZERO_COPY_SHARED) if shared else ("staged", OF_ZERO_COPY_STAGED)
        ours = us_of(rows, path, STREAM)
        if ours is not None and zero_copy is not None:
            large = nbytes >= LARGE_BYTES if shared else n == 512
            name, most = f"{what}: {path} over {ZERO_COPY}", most if large else 1.0
            yield over(name, ours, zero_copy, most, f"us of {ZERO_COPY}")

    def z_faces(self) -> Iterator[Figure]:
        rows = self._measured(ExchangeCase((512,) * 3, "z"))
        speed = self._bench.peer_bytes_per_us()
        for mode in (STREAM, GRAPH):
            us = us_of(rows, SELECTED, mode)
            if us is None:
                continue
            wire = None if speed is None else HOP_US + rows[0].bytes_each_way / speed
            yield limited(
                f"both z-faces of 512^3 float64, {self._comm.size} ranks, in a {mode}",
                us,
                "us",
                None if wire is None or mode == GRAPH else round(OF_WIRE * wire, 2),
                wire,
                f"us: {HOP_US} and the bytes at the measured speed of a copy to the peer",
                others=others(rows, mode),
                path=_taken(rows, mode),
            )

    def all_neighbours(self) -> Iterator[Figure]:
        one, four = (
            self._measured(ExchangeCase((128,) * 3, "all", fields=fields)) for fields in (1, 4)
        )
        for mode in (STREAM, GRAPH):
            alone, together = us_of(one, SELECTED, mode), us_of(four, SELECTED, mode)
            if alone is None or together is None:
                continue
            what = (
                f"all 26 neighbours of 128^3, 4 fields over 1, {self._comm.size} ranks, in a {mode}"
            )
            beside = others(four, mode)
            yield over(what, together, alone, FOUR_FIELDS, "us of one field", others=beside)

    def _six_faces(self) -> dict[str, Callable[[], Iterator[Figure]]]:
        return {f"six faces of {n}^3": partial(self.six_faces, n) for n in SIX_FACES_US}

    def six_faces(self, n: int) -> Iterator[Figure]:
        """Measure what halox selects, and the path ``nccl``, beside NCCL by hand."""
        bench = Bench(self._comm, Options("gpu", (BY_NCCL,), (NCCL,), timing=TIMING))
        rows = right(bench.measure(ExchangeCase((n,) * 3, "faces")))
        bench.free()
        for mode in (STREAM, GRAPH):
            what = f"six faces of {n}^3 float64, {self._comm.size} ranks, in a {mode}"
            us, hand = us_of(rows, SELECTED, mode), us_of(rows, NCCL, mode)
            if us is None:
                yield missing(what, _why(rows, mode))
                continue
            yield limited(
                what,
                us,
                "us",
                SIX_FACES_US[n] if self._comm.size == 8 and mode == STREAM else None,
                hand,
                f"us of {NCCL}",
                others=others(rows, mode),
                path=_taken(rows, mode),
            )
            ours = us_of(rows, BY_NCCL, mode)
            if ours is not None and hand is not None:
                yield over(
                    f"{what}: {BY_NCCL} over {NCCL}", ours, hand, OF_BY_HAND, f"us of {NCCL}"
                )

    def half_busy(self) -> Iterator[Figure]:
        bench = Bench(self._comm, Options("gpu", (), (), graph=False, timing=TIMING))
        for n in (128, 512):
            with Prepared(bench, ExchangeCase((n,) * 3, "x")) as prepared:
                for method in prepared.made:
                    times = times_us(self._comm, prepared.stage, method.call, (0.0, 0.5))
                    what = f"both x-faces of {n}^3 with half of the SMs held, over the GPU alone"
                    busy, alone = times[0.5], times[0.0]
                    yield over(what, busy, alone, HALF_BUSY, "us alone", **method.details)

    def transpose(self) -> Iterator[Figure]:
        found = transpose_us(self._comm, self._bench.stage)
        shape = "x".join(map(str, PENCIL_SHAPE))
        what = f"pencil transpose of {shape} complex128, {self._comm.size} ranks"
        speed = self._bench.peer_bytes_per_us()
        if speed is None:
            yield missing(what, "the speed of a copy to the peer could not be measured")
            return
        yield figure(
            what,
            found["bytes_each_way"] / found["us"] / speed,
            "of the measured speed of a copy to the peer",
            OF_PEER,
            speed / 1e3,
            "GB/s of that copy",
            **found,
        )

    def weak_scaling(self) -> Iterator[Figure]:
        stage = self._bench.stage
        alone = self._comm.allreduce(step_us(load_mpi().COMM_SELF, stage), load_mpi().MAX)
        together = step_us(self._comm, stage)
        yield figure(
            f"weak scaling of a 7-point step at {STEP_CELLS}^3 a GPU, 1 to {self._comm.size} ranks",
            alone / together,
            "of the speed of one",
            WEAK_SCALING,
            alone,
            "us of a step on one",
            us=round(together, 1),
        )

    def choice(self) -> Iterator[Figure]:
        compared = chosen_over_best(self._rows)
        share = share_close(compared)
        if share is not None:
            worst = max(compared, key=lambda one: float(one["ratio"]))
            yield figure(
                "share of cases whose chosen path is the best, or takes at most 1.10 x its time",
                share,
                "share",
                WELL_CHOSEN,
                worst["ratio"],
                f"x, the largest ratio: {worst['case']}, {worst['mode']}",
                cases=len(compared),
            )

    def host_time(self) -> Iterator[Figure]:
        """Host time of one exchange that has nobody to wait for: one rank, nothing but a launch."""
        stage = self._bench.stage
        nothing = bare_launch(stage.xp)

        def us(call: Callable[[], Any]) -> float:
            times = []
            for _ in range(30):
                stage.synchronize()
                begin = time.perf_counter()
                for _ in range(20):
                    call()
                times.append((time.perf_counter() - begin) / 20)
            stage.synchronize()
            return median(times) * 1e6

        alone: Any = load_mpi().COMM_SELF
        with Grid((32, 32, 32), periodic=True, comm=alone, device="gpu") as grid, stage.current():
            u = grid.zeros("f8")
            exchange, launch = us(lambda: grid.exchange(u)), us(nothing)
        yield limited(
            "host time of one cached exchange (one rank, 26 periodic neighbours, one launch)",
            exchange,
            "us",
            None,
            launch,
            f"us of a {BARE_LAUNCH}",
        )

    def _measured(self, case: ExchangeCase) -> list[ExchangeRow]:
        rows = right(self._bench.measure(case))
        self._rows += [row for row in rows if row.kind in (SELECTED, PATH)]
        self._bench.free()
        return rows


def _taken(rows: list[ExchangeRow], mode: str) -> str:
    return next((row.path for row in rows if row.name == SELECTED and row.mode == mode), "")


def _why(rows: list[ExchangeRow], mode: str) -> str:
    found = [row.error for row in rows if row.name == SELECTED and row.mode == mode]
    return found[0] if found else "not measured"
