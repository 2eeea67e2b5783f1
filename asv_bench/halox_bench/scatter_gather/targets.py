"""Figures of transfers without packing with their targets: key caches, the kernel's copies, busy GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from halox.errors import PathError
from halox.exchange.typed import Exchange, Recv, Send
from halox.paths.scatter_gather import ScatterGatherPath
from halox_bench.common.sizes import KIB, MIB, size_label
from halox_bench.common.targets import Figure, Progress, figure, limited, measured, missing
from halox_bench.pingpong.cases import PingPongOracle
from halox_bench.ranks.bench import Options
from halox_bench.ranks.busy import beside_work
from halox_bench.ranks.clock import Timing
from halox_bench.ranks.methods import NOT_POSSIBLE, WrongResult, paths_taken
from halox_bench.ranks.rows import STREAM, right, us_of
from halox_bench.scatter_gather.cases import ScatterGatherCase, vector
from halox_bench.scatter_gather.run import NO_CACHE, ScatterGatherBench

BUDGET_S = 40.0
TIMING = Timing(batches=15, batch_s=3e-3)

OWN = ScatterGatherPath.name

CACHED = {16: 2.0, 64: 3.0}
"""Speed with key caches over that without, at least, by the number of blocks of 1 KiB: figure 8."""

OF_HOST = 1.5
"""Speed of NumPy arrays copied by the kernel over that of the ``host`` path, at least."""

HOST_BLOCKS = (KIB, 2 * KIB, 4 * KIB, 16 * KIB, 64 * KIB)
MESSAGE_BYTES = MIB

BUSY_BLOCK = 4 * KIB
KERNEL_LOSS = 0.02
"""Share of time that a kernel which fills the GPU may take longer beside transfers."""

BESIDE_KERNEL = 1.5
"""Time of a transfer beside that kernel over its time alone, at most."""


def measure(
    comm: Any,
    place: str,
    *,
    budget_s: float = BUDGET_S,
    progress: Progress = lambda what, done, total: None,
) -> list[Figure]:
    """Measure them between two ranks whose arrays are in a place, collectively; see `measured`."""
    device = "cpu" if place == "host" else "gpu"
    options = Options(device, (OWN,), (), graph=False, timing=TIMING)
    try:
        bench = ScatterGatherBench(comm, place, options)
    except PathError as error:
        return [missing(f"transfers without packing, {place}", str(error))]
    return measured(Targets(bench).groups(), budget_s, progress, comm)


class Targets:
    """The groups of figures in one place."""

    def __init__(self, bench: ScatterGatherBench) -> None:
        self._bench, self._comm = bench, bench.comm

    def groups(self) -> dict[str, Callable[[], Iterator[Figure]]]:
        """Return the groups by name, in the order to be measured."""
        found: dict[str, Callable[[], Iterator[Figure]]] = {
            f"key caches, {count} blocks": partial(self.caches, count) for count in CACHED
        }
        if self._bench.stage.device is None:
            for block in HOST_BLOCKS:
                found[f"blocks of {size_label(block)}"] = partial(self.over_host, block)
        else:
            found["beside a kernel"] = self.beside_kernel
        return found

    def caches(self, count: int) -> Iterator[Figure]:
        rows = right(self._bench.measure(vector(KIB, count)))
        cached, without = (us_of(rows, name, STREAM) for name in (OWN, NO_CACHE))
        name = (
            f"{count} blocks of 1 KiB, {self._bench.place}: speed with key caches over that without"
        )
        if cached is None or without is None:
            yield missing(name, self._bench.left_out.get(OWN, "not measured"))
            return
        (own,) = (row for row in rows if row.name == OWN)
        details: dict[str, Any] = {"us": round(cached, 2), "map_us": own.map_us, "path": own.path}
        yield figure(name, without / cached, "x", CACHED[count], without, "us without", **details)

    def over_host(self, block: int) -> Iterator[Figure]:
        """Measure messages one way, there and back, and both ways at once, beside the ``host`` path."""
        case = vector(block, MESSAGE_BYTES // block)
        with ExitStack() as stack:
            calls = {
                (way, path): BothEnds(stack, self._bench, case, path, one_way=way == "one way").call
                for way in ("one way", "both ways")
                for path in (OWN, "host")
            }
            us = self._bench.clock.measure(
                {f"{way} {path}": calls[way, path] for way, path in calls}
            )
        for way in ("one way", "both ways"):
            ours, theirs = us[f"{way} {OWN}"], us[f"{way} host"]
            yield figure(
                f"1 MiB in blocks of {size_label(block)}, own arrays, {way}: speed over the host path's",
                theirs / ours,
                "x",
                OF_HOST,
                theirs,
                "us of the host path",
                us=round(ours, 2),
            )

    def beside_kernel(self) -> Iterator[Figure]:
        """Measure every path with a kernel that fills the GPU.

        The path without kernels has targets where each rank has a GPU: within one, the driver itself copies by kernels,
        and GPUs take turns between processes.
        """
        bench = self._bench
        case = vector(BUSY_BLOCK, MESSAGE_BYTES // BUSY_BLOCK)
        known = sorted(bench.known(), key=OWN.__ne__)
        for path in known:
            with ExitStack() as stack:
                try:
                    ends = BothEnds(stack, bench, case, path)
                except NOT_POSSIBLE as error:
                    if path == OWN:
                        yield missing(
                            f"beside a kernel that fills the GPU, {bench.place}", str(error)
                        )
                    continue
                found = beside_work(
                    bench.comm, bench.stage, bench.clock, ends.call, shared=bench.shared_gpu
                )
                ends.check(3)
            has_target = path == OWN and not bench.shared_gpu
            what = f"1 MiB both ways in blocks of 4 KiB, {bench.place}, {ends.taken}"
            yield limited(
                f"{what}: time that a kernel which fills the GPU loses",
                found.loss,
                "of its time",
                KERNEL_LOSS if has_target else None,
                found.work_us,
                "us of the kernel alone",
                beside_us=round(found.work_beside_us, 1),
            )
            bound = "" if found.is_covered else "at least, as the kernel ended first: "
            yield limited(
                f"{what}: beside that kernel over alone",
                found.call_beside_us / found.call_us,
                "x its time",
                BESIDE_KERNEL if has_target else None,
                found.call_us,
                f"us alone; {bound}{found.call_beside_us:.1f} us beside it",
            )


class BothEnds:
    """An exchange of a case between both ranks, each from an array into another one; checked.

    Parameters
    ----------
    stack : ExitStack
        Ends what is made.
    one_way : bool
        There, and then back; else both at once.
    """

    def __init__(
        self,
        stack: ExitStack,
        bench: ScatterGatherBench,
        case: ScatterGatherCase,
        path: str,
        *,
        one_way: bool = False,
    ) -> None:
        self._bench, self._case = bench, case
        rank, zeros = bench.comm.rank, stack.enter_context(bench.memory())
        self._oracle = PingPongOracle(case, rank, bench.stage.xp)
        side, other = case.sides[rank], 1 - rank
        self._arrays = [zeros(side.elements) for _ in range(2)]
        stack.callback(self._arrays.clear)
        bench.stage.settle()
        send = Send(self._arrays[0], side.datatype, other)
        receive = Recv(self._arrays[1], side.datatype, other)
        ways: list[Any] = [([send], [receive])]
        if one_way:
            ways = [([send], []), ([], [receive])][:: 1 if rank == 0 else -1]
        exchanges = []
        for sends, receives in ways:
            exchange = Exchange(sends, receives, comm=bench.comm, path=path)
            exchanges.append(stack.enter_context(exchange))
        self.taken = paths_taken(row for one in exchanges for row in one.explain().rows)
        self._exchanges = exchanges
        with bench.stage.current():
            for step in range(2):
                self.check(step)

    def call(self) -> None:
        """Exchange once."""
        for exchange in self._exchanges:
            exchange()

    def check(self, step: int) -> None:
        """Exchange values of a step; `WrongResult` on both ranks if any is wrong."""
        oracle, (out, into), rank = self._oracle, self._arrays, self._bench.comm.rank
        with self._bench.stage.current():
            oracle.fill(out, 2 * step + rank, full=True)
            oracle.fill(into, 0, full=False)
            self._bench.stage.synchronize()
            self.call()
            self._bench.stage.synchronize()
            wrong = self._bench.comm.allreduce(oracle.wrong(into, 2 * step + 1 - rank))
        if wrong:
            raise WrongResult(f"wrong result: {wrong} elements by {self.taken}")
