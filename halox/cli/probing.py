"""Measurement of cost constants: exchanges of a few shapes, by every possible protocol between two ranks.

``halox tune`` and ``halox predict`` call `campaign`, which measures each constant of each protocol by itself, with a
`Prober`. The latency is the time of a small exchange, the time of a further message the difference between one and
several messages, and the bandwidth of a length of runs the time of a large exchange beyond the latency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import halox
from halox import datatypes
from halox.errors import ExchangeTimeoutError, HaloxError
from halox.paths import PATHS
from halox.paths.base import Protocol
from halox.paths.costs import RUN_BYTES, ProtocolCost
from halox.plans.costs import Costs, protocol_name
from halox.plans.measuring import exchange_us
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
_LEAST_US = 1e-3
_FASTEST_GB_PER_S = 20_000.0
"""Bandwidth of a protocol whose time does not grow with the bytes, so that no bandwidth can be measured."""


@dataclass(frozen=True)
class Point:
    """A measured shape: ``messages`` messages of ``nbytes`` bytes in total, in runs of ``run_bytes``."""

    nbytes: int
    run_bytes: int
    messages: int = 1


Sample: TypeAlias = tuple[Point, float]
"""What a rank exchanged at most, and the microseconds of it."""

Probe: TypeAlias = Callable[[str, Point], Sample]
"""Measures "path/protocol" at a point; raises `HaloxError` on all ranks if the protocol cannot be used."""

Progress: TypeAlias = Callable[[str, int, int], None]

SMALL = Point(_KIB, RUN_BYTES[-1])
ONE, SEVERAL = Point(64 * _KIB, RUN_BYTES[-1]), Point(64 * _KIB, RUN_BYTES[-1], 8)
LARGE_BYTES = 4096 * _KIB


@dataclass
class Campaign:
    """Constants by `protocol_name`, and reasons for missing constants."""

    costs: dict[str, ProtocolCost] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def campaign(
    probe: Probe,
    protocols: Sequence[str],
    before: Costs,
    progress: Progress,
    *,
    shared_gpu: bool = False,
    large_bytes: int | None = None,
    rounds: int = 2,
) -> Campaign:
    """Measure the constants of every protocol; the best of some rounds counts. Collective if the probe is.

    ``before`` has the time of a further message for protocols of fields, since a grid fuses all messages to a rank into
    one.
    """
    found = Campaign()
    for place, name in enumerate(protocols):
        path, _, protocol = name.partition("/")
        full = protocol_name(path, protocol, shared_gpu)
        progress(f"measuring {name}", place, len(protocols))
        try:
            old = before.protocols.get(full) if _protocol(name).in_field else None
            larges = [Point(large_bytes or LARGE_BYTES, run) for run in RUN_BYTES]
            points = [SMALL, *larges, *(() if old else (ONE, SEVERAL))]
            best = _measured(partial(probe, name), points, rounds)
            found.costs[full] = _cost(best, larges, old)
        except ExchangeTimeoutError:
            raise
        except HaloxError as error:
            found.refused[name] = str(error)
    return found


def _cost(
    best: Mapping[Point, Sample], larges: Sequence[Point], old: ProtocolCost | None
) -> ProtocolCost:
    """Return constants from the times of points; those before, ``old``, give the time of a message, if not None."""
    if old:
        message_us = old.message_us
    else:
        added_us = best[SEVERAL][1] - best[ONE][1]
        message_us = max(added_us, 0.0) / (SEVERAL.messages - ONE.messages)
    small, small_us = best[SMALL]

    def speed(done: Point, us: float) -> float:
        return min(1e-3 * done.nbytes / max(us - small_us, _LEAST_US), _FASTEST_GB_PER_S)

    speeds = [speed(*best[point]) if point in best else 0.0 for point in larges]
    slowest = next(filter(None, speeds))  # also of shorter runs, which the protocol does not take
    # Noise aside, longer runs are never slower.
    speeds = [max(each, slowest) for each in accumulate(speeds, max)]
    latency_us = max(small_us - (small.messages - 1) * message_us, 0.0)
    return ProtocolCost(latency_us, message_us, tuple(speeds))


def _measured(
    measure: Callable[[Point], Sample], points: Sequence[Point], rounds: int
) -> dict[Point, Sample]:
    """Measure points, and return the shortest time of each; without points of short runs that the protocol refuses."""
    best: dict[Point, Sample] = {}
    # Other work on the machine only adds time, and mostly to measurements that follow one another.
    for point in [*points] * rounds:
        try:
            sample = measure(point)
        except ExchangeTimeoutError:
            raise
        except HaloxError:
            if point.run_bytes == RUN_BYTES[-1]:
                raise
            continue
        best[point] = min(sample, best.get(point, sample), key=lambda each: each[1])
    return best


def tuned_protocols(memory: str) -> list[str]:
    """Return the protocols to measure, for memory "gpu" (including messages within a rank) or "host"."""
    return [
        protocol_name(path.name, protocol.name)
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

    def __call__(self, wanted: str, point: Point) -> Sample:
        """Measure a protocol at a point; collective."""
        measure = self._in_fields if _protocol(wanted).in_field else self._typed
        return measure(wanted, point)

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
        return point, us

    def _in_fields(self, wanted: str, point: Point) -> Sample:
        """Measure the halos of a grid's field, with ranks in a row.

        The row is not periodic, so that two ranks send one message each. With more ranks, inner ranks send two.
        """
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
        return Point(nbytes, point.run_bytes, messages), us

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
        if is_cold:
            us -= exchange_us(self.world, self._sweep, repeats, self.device)
        if us <= 0:  # the same on all ranks
            raise HaloxError(
                f"exchanges of {nbytes} bytes take no longer than the noise of the measurement"
            )
        return us

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
