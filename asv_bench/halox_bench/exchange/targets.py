"""Figures of halo exchanges with their targets: between GPUs, and of NumPy arrays beside exchanges by hand."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from halox.grid import Grid
from halox.runtime.world import load_mpi
from halox_bench.common.machine import why_not_gpu_aware
from halox_bench.common.rows import (
    GRAPH,
    PATH,
    SELECTED,
    STREAM,
    Row,
    chosen_over_best,
    right,
    share_close,
    us_of,
)
from halox_bench.common.targets import (
    BARE_LAUNCH,
    OVER,
    Figure,
    Groups,
    Target,
    bare_launch,
    figure,
    limited,
    over,
)
from halox_bench.exchange.baselines import BY_HAND
from halox_bench.exchange.baselines_gpu import NCCL, ZERO_COPY
from halox_bench.exchange.cases import ExchangeCase
from halox_bench.exchange.run import ExchangeBench, PreparedExchange
from halox_bench.exchange.steps import STEP_CELLS, step_us
from halox_bench.ranks.bench import Options
from halox_bench.ranks.busy import times_us
from halox_bench.ranks.clock import Timing

BUDGET_S = 90.0
TIMING = Timing(batches=7, batch_s=3e-3)
HOST_TIMING = Timing(batches=41, batch_s=1.5e-3)

X_FACES_US = {
    **{64: (7.0, 5.0), 128: (8.5, 7.0), 256: (11.0, 9.5), 512: (30.0, 28.0)},
    **{16: (None, None), 32: (None, None)},
}
"""Both x-faces of N^3 float64 a rank: most microseconds in a stream, in a graph, between 2 GPUs."""

SIX_FACES_US = {64: 12.0, 128: None, 256: 22.0, 512: 55.0}
"""All six faces on 8 GPUs, in a stream."""

BY_NCCL = "nccl"
OF_NCCL, OF_NCCL_STEPS = 0.5, 1.02
"""Time over NCCL by hand: of halox's own choice for x-faces, and of the path ``nccl`` for six faces."""

OF_ZERO_COPY = {"ipc": 0.6, "staged": 0.7}
LARGE_BYTES = 1 << 20
HOP_US, OF_WIRE = 1.5, 1.25
FOUR_FIELDS = 2.0
HALF_BUSY = 1.10
WELL_CHOSEN = 0.95
WEAK_SCALING = 0.95

HOST_SHAPES = ((64, 64), (512, 512), (2048, 2048), (32, 32, 32), (128, 128, 128))
OF_BY_HAND = {1: 1.0, 2: 1.5, 4: 1.0}
"""NumPy arrays: least speed over exchanges by hand, by the number of ranks."""

_CONVENIENT = "grid.exchange"


def groups(args: argparse.Namespace | None, comm: Any, device: str) -> Groups:
    """Return the groups of figures of GPUs or of NumPy arrays.

    Targets are for 2 ranks, on a GPU each or, for the ``ipc`` path, on one; times of six faces are for 8. Ratios to
    NCCL by hand, the wire or one GPU have their target on any number.
    """
    if device == "cpu":
        bench = ExchangeBench(comm, Options("cpu", (), (BY_HAND,), timing=HOST_TIMING))
        return {case.name: partial(on_host, bench, case) for case in host_cases(comm.size)}
    options = Options("gpu", timing=TIMING, no_gpu_aware=why_not_gpu_aware(comm, "gpu"))
    return Targets(ExchangeBench(comm, options)).groups()


class Targets:
    """The groups of figures on one bench of GPUs."""

    def __init__(self, bench: ExchangeBench) -> None:
        self._bench, self._comm = bench, bench.comm
        self._ranks = f"{bench.comm.size} ranks"
        self._rows: list[Row] = []

    def groups(self) -> Groups:
        x_faces = {f"x-faces of {n}^3": partial(self.x_faces, n) for n in X_FACES_US}
        if self._bench.shared_gpu:
            found = [*x_faces.items()][:4]
            return {**dict(found), "host time": self.host_time}
        several: dict[str, Callable[[], Iterator[Figure]]] = {
            **{f"six faces of {n}^3": partial(self.six_faces, n) for n in SIX_FACES_US},
            "z-faces": self.z_faces,
            "weak scaling": self.weak_scaling,
        }
        if self._comm.size > 2:
            return several
        return {
            **x_faces,
            "host time": self.host_time,
            **several,
            "half the GPU busy": self.half_busy,
            "all neighbours": self.all_neighbours,
            "choice of paths": self.choice,
        }

    def x_faces(self, n: int) -> Iterator[Figure]:
        """Measure both x-faces beside NCCL and MPI by hand."""
        rows, shared = self._measured(ExchangeCase((n,) * 3, "x")), self._bench.shared_gpu
        what, nbytes = f"both x-faces of {n}^3 float64, {self._ranks}", rows[0].bytes_each_way
        has_target = self._comm.size == 2 and not shared
        limits = X_FACES_US[n] if has_target else (None, None)
        path = "ipc" if shared else "staged"
        is_large = nbytes >= LARGE_BYTES if shared else n == 512
        staged = {STREAM: OF_ZERO_COPY[path] if is_large else 1.0}
        zero_copy = f"{what}: {path} over {ZERO_COPY}"
        modes = (STREAM,) if shared else (STREAM, GRAPH)  # no path within a GPU can be captured
        for target in (
            Target(
                f"{what}, in a {{mode}}", dict(zip(modes, limits, strict=False)), (NCCL, ZERO_COPY)
            ),
            Target(f"{what}: over {NCCL}", {STREAM: OF_NCCL}, (NCCL,), OVER, required=False),
            Target(zero_copy, staged, (ZERO_COPY,), OVER, path, required=False),
        ):
            yield from target.figures(rows, bytes_each_way=nbytes)

    def z_faces(self) -> Iterator[Figure]:
        """Measure both z-faces beside the speed of a copy to the peer."""
        rows = self._measured(ExchangeCase((512,) * 3, "z"))
        speed = self._bench.peer_bytes_per_us()
        wire = None if speed is None else HOP_US + rows[0].bytes_each_way / speed
        limit = None if wire is None else round(OF_WIRE * wire, 2)
        what = f"both z-faces of 512^3 float64, {self._ranks}, in a {{mode}}"
        label = f"us: {HOP_US} and the bytes at the measured speed of a copy to the peer"
        target = Target(what, {STREAM: limit, GRAPH: None}, (NCCL,), required=False, label=label)
        for one in target.figures(rows):
            yield one | {"baseline": None if wire is None else round(wire, 3)}

    def all_neighbours(self) -> Iterator[Figure]:
        """Measure four fields in one exchange over one field."""
        one, four = (
            self._measured(ExchangeCase((128,) * 3, "all", fields=fields)) for fields in (1, 4)
        )
        for mode in (STREAM, GRAPH):
            alone, together = us_of(one, SELECTED, mode), us_of(four, SELECTED, mode)
            if alone is not None and together is not None:
                what = f"all 26 neighbours of 128^3, 4 fields over 1, {self._ranks}, in a {mode}"
                yield over(what, together, alone, FOUR_FIELDS, "us of one field")

    def six_faces(self, n: int) -> Iterator[Figure]:
        """Measure halox's own choice, and the path ``nccl``, beside NCCL by hand."""
        bench = ExchangeBench(self._comm, Options("gpu", (BY_NCCL,), (NCCL,), timing=TIMING))
        rows = right(bench.measure(ExchangeCase((n,) * 3, "faces")))
        bench.free()
        what = f"six faces of {n}^3 float64, {self._ranks}, in a {{mode}}"
        limit = SIX_FACES_US[n] if self._comm.size == 8 else None
        yield from Target(what, {STREAM: limit, GRAPH: None}, (NCCL,)).figures(rows)
        limits = {STREAM: OF_NCCL_STEPS, GRAPH: OF_NCCL_STEPS}
        beside = f"{what}: {BY_NCCL} over {NCCL}"
        yield from Target(beside, limits, (NCCL,), OVER, BY_NCCL, required=False).figures(rows)

    def half_busy(self) -> Iterator[Figure]:
        """Measure x-faces while a kernel holds half of each GPU."""
        bench = ExchangeBench(self._comm, Options("gpu", (), (), graph=False, timing=TIMING))
        for n in (128, 512):
            with PreparedExchange(bench, ExchangeCase((n,) * 3, "x")) as prepared:
                for method in prepared.made:
                    times = times_us(self._comm, prepared.stage, method.call, (0.0, 0.5))
                    what = f"both x-faces of {n}^3 with half of the SMs held, over the GPU alone"
                    busy, alone = times[0.5], times[0.0]
                    yield over(what, busy, alone, HALF_BUSY, "us alone", **method.found)

    def weak_scaling(self) -> Iterator[Figure]:
        """Measure a step on all ranks beside a step on one."""
        stage = self._bench.stage
        alone = self._comm.allreduce(step_us(load_mpi().COMM_SELF, stage), load_mpi().MAX)
        together = step_us(self._comm, stage)
        yield figure(
            f"weak scaling of a 7-point step at {STEP_CELLS}^3 a GPU, 1 to {self._ranks}",
            alone / together,
            "of the speed of one",
            WEAK_SCALING,
            alone,
            "us of a step on one",
            us=round(together, 1),
        )

    def choice(self) -> Iterator[Figure]:
        """Compare chosen and best paths of all cases so far."""
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
        """Measure the host time of an exchange of one rank, which launches a kernel and waits for nobody."""
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
        what = "host time of one cached exchange (one rank, 26 periodic neighbours, one launch)"
        yield limited(what, exchange, "us", None, launch, f"us of a {BARE_LAUNCH}")

    def _measured(self, case: ExchangeCase) -> list[Row]:
        rows = right(self._bench.measure(case))
        self._rows += [row for row in rows if row.kind in (SELECTED, PATH)]
        self._bench.free()
        return rows


def host_cases(ranks: int) -> list[ExchangeCase]:
    """Return exchanges with all neighbours: ranks along the outermost axes first, and along the innermost."""
    found = [
        ExchangeCase(shape, "all", outer=outer) for shape in HOST_SHAPES for outer in (True, False)
    ]
    distinct = {(case.shape, case.proc_shape(ranks)): case for case in reversed(found)}
    return list(reversed(distinct.values()))


def on_host(bench: ExchangeBench, case: ExchangeCase) -> Iterator[Figure]:
    """Measure an exchange of NumPy arrays, by a plan and by `Grid.exchange`, beside one by hand."""
    ranks = bench.comm.size
    with PreparedExchange(bench, case) as prepared:
        right(prepared.refused)
        calls: dict[str, Callable[[], Any]] = {one.name: one.call for one in prepared.made}
        us = bench.clock.measure({**calls, _CONVENIENT: prepared.exchange})
    divided = "x".join(map(str, case.proc_shape(ranks)))
    for what, name, least in (
        (
            f"{case.size} float64 a rank, all neighbours, {divided} ranks",
            SELECTED,
            OF_BY_HAND.get(ranks),
        ),
        (f"the same by {_CONVENIENT}", _CONVENIENT, None),
    ):
        ratio, by_hand = us[BY_HAND] / us[name], us[BY_HAND]
        unit, label = "x the speed by hand", f"us {BY_HAND}"
        yield figure(what, ratio, unit, least, by_hand, label, us=round(us[name], 2))
