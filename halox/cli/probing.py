"""Measurements of ``halox tune``: exchanges of a few shapes, by every possible protocol between two ranks.

`campaign` measures each protocol at `POINTS` by a `Prober`, and `fitted` derives the constants of the cost model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import halox
from halox import datatypes
from halox.errors import ExchangeTimeoutError, HaloxError
from halox.exchange.costs import Costs, protocol_name
from halox.exchange.fitting import Sample, fit, follow_siblings
from halox.exchange.measuring import exchange_us
from halox.paths import PATHS
from halox.paths.base import Protocol
from halox.paths.costs import RUN_BYTES, ProtocolCost
from halox.runtime.gpu import cuda
from halox.runtime.gpu.devices import array_module
from halox.runtime.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

_KIB = 1 << 10
_ROW_US = 4000.0  # intended time of a row of repeated exchanges
_MOST_REPEATS = 200
_FEWEST_REPEATS = 3
_SPREAD = 4
"""Ratio of the stride of runs to the bytes of a run."""
_LEAST_STRIDE = 128
_COLD_BYTES = 1 << 20
"""Bytes of an exchange on GPUs from which its cells are read from memory, as after the computation of a step."""


@dataclass(frozen=True)
class Point:
    """A measured shape: ``messages`` messages of ``nbytes`` bytes in total, in runs of ``run_bytes``."""

    nbytes: int
    run_bytes: int
    messages: int = 1


POINTS = (
    *(Point(size * _KIB, run) for size in (2, 1024) for run in (RUN_BYTES[0], RUN_BYTES[-1])),
    *(Point(256 * _KIB, run) for run in RUN_BYTES[1:-1]),
    Point(128 * _KIB, RUN_BYTES[0], 4),
    Point(64 * _KIB, RUN_BYTES[-1], 8),
    *(Point(size * _KIB, run) for size in (32, 256) for run in (RUN_BYTES[0], RUN_BYTES[-1])),
    *(Point(4096 * _KIB, run) for run in RUN_BYTES),
    Point(16384 * _KIB, RUN_BYTES[-1]),
)
"""Points in the order of measurement; the first points must determine all constants if time runs out."""

Probe = Callable[[str, str, Point], Sample]
"""Measures a protocol at a point; raises `HaloxError` on all ranks if the protocol cannot be used."""

Progress = Callable[[str, int, int], None]


@dataclass
class Campaign:
    """Measurements by "path/protocol": samples, or reasons for missing samples, and whether time ran out."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    cut_short: bool = False


def campaign(
    probe: Probe,
    protocols: Sequence[tuple[str, str]],
    points: Sequence[Point],
    progress: Progress,
    time_is_up: Callable[[], bool],
) -> Campaign:
    """Measure every protocol at every point, until time is up.

    Collective if the probe is collective; ``time_is_up`` must return the same on all ranks.
    """
    measured = Campaign()
    for number, point in enumerate(points):
        for place, (path, protocol) in enumerate(protocols):
            if time_is_up():
                measured.cut_short = True
                return measured
            name, count = protocol_name(path, protocol), len(protocols)
            progress(f"measuring {name}", number * count + place, len(points) * count)
            try:
                sample = probe(path, protocol, point)
                measured.samples.setdefault(name, []).append(sample)
            except ExchangeTimeoutError:
                raise
            except HaloxError as error:
                measured.refused.setdefault(name, str(error))
    for name in measured.samples:
        measured.refused.pop(name, None)
    return measured


def fitted(measured: Campaign, before: Costs, *, shared_gpu: bool) -> dict[str, ProtocolCost]:
    """Return the constants of a campaign, by `protocol_name`.

    Constants of protocols that were not measured are estimated from measured protocols of their path. Protocols through
    MPI are an exception, since they have a different speed.
    """

    def full(name: str) -> str:
        path, _, protocol = name.partition("/")
        return protocol_name(path, protocol, shared_gpu)

    fits = {full(name): fit(samples) for name, samples in measured.samples.items()}
    results = {name: cost for name, cost in fits.items() if cost is not None}
    guesses = {
        full(name): follow_siblings(name, results, before.protocols, shared_gpu)
        for name in (*measured.samples, *measured.refused)
        if full(name) not in results and _protocol(name).reach != "nodes"
    }
    return results | {name: cost for name, cost in guesses.items() if cost is not None}


def tuned_protocols(memory: str) -> list[tuple[str, str]]:
    """Return the paths and protocols to measure, for memory "gpu" (including messages within a rank) or "host"."""
    return [
        (path.name, protocol.name)
        for path in PATHS.values()
        for protocol in path.protocols
        if path.is_tuned and protocol.is_tuned
        if memory == ("gpu" if path.to_self else protocol.memory or path.memory)
    ]


def _protocol(name: str) -> Protocol:
    path, _, protocol = name.partition("/")
    registered = PATHS[path].protocol(protocol)
    assert registered is not None
    return registered


@dataclass(frozen=True)
class Prober:
    """Measurement of protocols between this rank and its partners: ``near`` on its node, ``far`` on another node.

    A partner is None for a rank without partner. ``device`` is this rank's GPU.
    """

    world: World
    comm: MPI.Intracomm
    device: int | None
    near: int | None
    far: int | None

    def __call__(self, path: str, protocol: str, point: Point) -> Sample:
        """Measure a protocol at a point; collective."""
        measure = self._in_fields if _protocol(f"{path}/{protocol}").in_field else self._typed
        return measure(f"{path}/{protocol}", point)

    def _typed(self, wanted: str, point: Point) -> Sample:
        """Measure typed messages between partners."""
        reach = _protocol(wanted).reach
        partner = {"self": self.comm.rank, "node": self.near, "nodes": self.far}[reach]
        sends, receives = self.world.attempt(
            lambda: self._messages(point, partner), "the allocation of arrays"
        )
        # Messages of a rank to itself have no selectable path.
        path = None if reach == "self" else wanted
        with halox.Exchange(sends, receives, comm=self.comm, path=path) as exchange:
            self._check(exchange.explain(), path)
            us = self._time(exchange, point.nbytes)
        return Sample(point.nbytes, point.run_bytes, point.messages, us)

    def _in_fields(self, wanted: str, point: Point) -> Sample:
        """Measure the halos of a grid's field, with ranks in a row.

        The row is not periodic, so that two ranks send one message each. With more ranks, inner ranks send two.
        """
        if point.messages > 1:
            raise HaloxError("a grid fuses what goes to one rank into one message")
        width = point.run_bytes // 8
        owned = max(width * (_SPREAD - 2), _LEAST_STRIDE // 8)
        shape = (point.nbytes // point.run_bytes, owned * self.comm.size)
        with halox.Grid(
            shape,
            halo=((0, 0), (width, width)),
            proc_shape=(1, self.comm.size),
            comm=self.comm,
            device="cpu" if self.device is None else "gpu",
            placement=False,
            path=wanted,
        ) as grid:
            plan = grid.plan(grid.zeros("f8"))
            self._check(plan.explain(), wanted)
            most = self.world.mpi.MAX
            nbytes = self.world.comm.allreduce(plan.bytes_sent, op=most)
            messages = self.world.comm.allreduce(plan.messages_sent, op=most)
            us = self._time(plan, nbytes)
        return Sample(nbytes, point.run_bytes, messages, us)

    def _messages(
        self, point: Point, partner: int | None
    ) -> tuple[list[halox.Send], list[halox.Recv]]:
        """Return sends and receives, each with a separate array."""
        if partner is None:
            return [], []
        run = point.run_bytes // 8
        count = point.nbytes // point.messages // point.run_bytes
        stride = max(run * _SPREAD, _LEAST_STRIDE // 8)
        datatype = datatypes.vector(count, run, stride, "f8")
        xp = array_module(self.device)
        sends, receives = [], []
        with nullcontext() if self.device is None else cuda.cupy().cuda.Device(self.device):
            for tag in range(point.messages):
                sends.append(halox.Send(xp.zeros(count * stride), datatype, partner, tag=tag))
                receives.append(halox.Recv(xp.zeros(count * stride), datatype, partner, tag=tag))
        return sends, receives

    def _check(self, report: halox.Report, wanted: str | None) -> None:
        """Raise on all ranks if messages take another path and protocol than ``wanted``."""
        mine = {f"{row.path}/{row.protocol}" for row in report.rows}
        used = sorted(set().union(*self.world.comm.allgather(mine)))
        if wanted is not None and used != [wanted]:
            raise HaloxError(f"messages went by {', '.join(used)} instead")

    def _time(self, call: Callable[[], None], nbytes: int) -> float:
        """Return the microseconds of an exchange; many bytes are in no cache of a GPU."""
        is_cold = self.device is not None and nbytes >= _COLD_BYTES

        def step() -> None:
            if is_cold:
                self._sweep()
            call()

        once = exchange_us(self.world, step, _FEWEST_REPEATS, self.device, rows=1)
        repeats = max(_FEWEST_REPEATS, min(_MOST_REPEATS, int(_ROW_US / max(once, 1.0))))
        us = exchange_us(self.world, step, repeats, self.device)
        return us - exchange_us(self.world, self._sweep, repeats, self.device) if is_cold else us

    @cached_property
    def _scratch(self) -> Any:
        """Array of twice the size of the GPU's cache."""
        with cuda.cupy().cuda.Device(self.device) as device:
            return cuda.cupy().zeros(device.attributes["L2CacheSize"] // 4, "u8")

    def _sweep(self) -> None:
        """Read and write all of the scratch array, on the current stream."""
        with cuda.cupy().cuda.Device(self.device):
            scratch = self._scratch
            scratch += 1


def partners(rank: int, nodes: Sequence[int]) -> tuple[int | None, int | None]:
    """Return a rank's partner on its node, and its partner for messages between nodes.

    Examples
    --------
    >>> [partners(rank, (0, 0, 0)) for rank in range(3)]
    [(1, 1), (0, 0), (None, None)]
    >>> [partners(rank, (0, 0, 1, 1)) for rank in range(4)]
    [(1, 2), (0, 3), (3, 0), (2, 1)]
    """

    def paired(ranks: Sequence[int]) -> dict[int, int]:
        pairs = zip(ranks[::2], ranks[1::2], strict=False)
        return {a: b for pair in pairs for a, b in (pair, pair[::-1])}

    numbers = sorted(set(nodes))
    members = {n: [r for r, node in enumerate(nodes) if node == n] for n in numbers}
    near: dict[int, int] = {}
    for ranks in members.values():
        near |= paired(ranks)
    if len(numbers) == 1:
        return near.get(rank), near.get(rank)
    far: dict[int, int] = {}
    for here, there in zip(numbers[::2], numbers[1::2], strict=False):
        for a, b in zip(members[here], members[there], strict=False):
            far |= {a: b, b: a}
    return near.get(rank), far.get(rank)


def until(world: World, limit_s: float) -> Callable[[], bool]:
    """Return a collective function that tells, equally on all ranks, whether ``limit_s`` seconds have passed."""
    end = time.monotonic() + limit_s

    def is_over() -> bool:
        return bool(world.comm.bcast(time.monotonic() > end))

    return is_over
