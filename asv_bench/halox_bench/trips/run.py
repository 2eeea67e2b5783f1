"""Messages there and back between two ranks: halox's typed messages beside MPI's types and packing by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import isfinite
from statistics import median
from typing import Any

import numpy as np

from halox.errors import HaloxError, PathError
from halox.exchange.typed import Exchange, Recv, Send
from halox.paths.messages import run_count
from halox.paths.scatter_gather.agreement import AgreeingChannel
from halox.runtime.context import Context
from halox.runtime.gpu.cuda import cupy, gpu_count
from halox.runtime.world import World, load_mpi
from halox_bench.common.rows import BASELINE, PATH, STREAM, Row
from halox_bench.ranks.bench import Options, RanksBench
from halox_bench.ranks.busy import times_us
from halox_bench.ranks.clock import Stage
from halox_bench.ranks.methods import Baseline, Method, Prepared, paths_taken
from halox_bench.trips import baselines as by_users
from halox_bench.trips.baselines import Packed, Reference, Trip
from halox_bench.trips.cases import Direction, TripCase
from halox_bench.trips.oracle import TripOracle

BUSY = (0.25, 0.5)
"""Shares of the GPU that other work holds: figure 15 of Wu et al."""

NO_CACHE = "scatter_gather, no key cache"
"""Keys mapped and sent anew in every transfer."""

_CHECKS = 2

Zeros = Callable[[int], Any]
"""Returns so many bytes of zeros."""


def devices(comm: Any, place: str) -> int | None:
    """Return this rank's GPU, None for host memory; collective; `PathError` if there is no such pair of GPUs.

    GPUs are told apart by their identity, not by their numbers in a process.
    """
    if place == "host":
        return None
    first, second = comm.allgather(_visible())
    both = [
        (i, k)
        for i, one in enumerate(first)
        for k, other in enumerate(second)
        if (one == other) == (place == "1gpu")
    ]
    if not both:
        raise PathError(f"{place}: the ranks see {len(first)} and {len(second)} GPUs, no such pair")
    return both[0][comm.rank]


def _visible() -> list[bytes]:
    count = gpu_count()
    if not count:
        return []
    properties = cupy().cuda.runtime.getDeviceProperties
    return [bytes(properties(i)["uuid"]) for i in range(count)]


class TripBench(RanksBench):
    """Two ranks and a place for their slabs.

    Parameters
    ----------
    place : {"host", "1gpu", "2gpus"}
    mapped : bool
        Whether the other rank can map slabs on a GPU, and key caches are measured.

    Raises
    ------
    PathError
        On both ranks, if there is no such place here.
    """

    def __init__(self, comm: Any, place: str, options: Options, *, mapped: bool = False) -> None:
        device = "cpu" if place == "host" else "gpu"
        super().__init__(comm, replace(options, device=device), Stage(devices(comm, place)))
        self.place, self.mapped = place, mapped

    def measure(self, case: TripCase) -> list[Row]:
        with PreparedTrip(self, case) as prepared:
            rows = prepared.rows()
        self.free()
        return rows

    def heading(self) -> str:
        return "microseconds of half a round trip, the slower rank's; GB/s of payload"

    @contextmanager
    def memory(self) -> Iterator[Zeros]:
        """Provide arrays until the block ends; collective."""
        if self.stage.device is None or not self.mapped:
            yield lambda n: self.stage.xp.zeros(n, "u1")
            return
        context = Context(World(self.comm))
        arena = context.use_device(self.stage.device)

        def zeros(n: int) -> Any:
            found = arena.array((n,), np.dtype("u1"))
            found.fill(0)
            return found

        yield zeros
        self.stage.settle()
        context.close()


class Exchanges(Trip):
    """Two typed exchanges, there and back."""

    capturable = True

    def __init__(
        self, comm: Any, slab: Any, directions: Sequence[Direction], path: str | None
    ) -> None:
        chosen: dict[str, Any] = {} if path is None else {"path": path}
        self._made: list[Exchange] = []
        for one in directions:
            sends = [Send(slab, made, peer) for peer, made in one.sends.items()]
            receives = [Recv(slab, made, peer) for peer, made in one.receives.items()]
            try:
                self._made.append(Exchange(sends, receives, comm=comm, **chosen))
            except HaloxError:
                self.close()
                raise
        self.taken = paths_taken(row for made in self._made for row in made.explain().rows)

    def keyed(self, direction: int) -> list[AgreeingChannel]:
        """Return the channels of a direction that have keys."""
        channels: Sequence[Any] = self._made[direction]._plan._channels
        return [channel for channel in channels if isinstance(channel, AgreeingChannel)]

    def go(self, direction: int) -> None:
        self._made[direction]()

    def close(self) -> None:
        for exchange in self._made:
            exchange.close()


class Uncached(Exchanges):
    """Two exchanges that map and send their keys anew before each transfer."""

    capturable = False

    def go(self, direction: int) -> None:
        for channel in self.keyed(direction):
            channel.remap()
        super().go(direction)


def mapping_us(channels: Sequence[AgreeingChannel], samples: int) -> float:
    """Return the microseconds of mapping the keys of channels anew, without messages; collective.

    The peers' replies are the same each time, and are received once.
    """
    replies: dict[AgreeingChannel, list[dict[int, Any]]] = {channel: [] for channel in channels}

    def recorded(channel: AgreeingChannel) -> Callable[[dict[int, Any]], dict[int, Any]]:
        def swap(said: dict[int, Any]) -> dict[int, Any]:
            replies[channel].append(channel.swap(said))
            return replies[channel][-1]

        return swap

    for channel in channels:
        channel.remap(recorded(channel))
    times = []
    for _ in range(samples):
        words = {channel: iter(said) for channel, said in replies.items()}
        begin = time.perf_counter()
        for channel in channels:
            channel.remap(lambda _, said=words[channel]: next(said))  # type: ignore[misc]
        times.append(time.perf_counter() - begin)
    for channel in channels:  # once more with the peers, which have outdated keys
        channel.remap()
    return median(times) * 1e6


class PreparedTrip(Prepared):
    """A case's slab on both ranks, and every method to send its messages there and back."""

    graph_calls = 10
    bench: TripBench
    case: TripCase

    def enter(self, stack: ExitStack) -> None:
        """Make the slab and the oracle."""
        zeros = stack.enter_context(self.bench.memory())
        with self.stage.current():
            self.own_arrays = self.arrays = zeros(self.case.slab_bytes)
            self._oracle = TripOracle(self.case, self.comm.rank, self.stage.xp)
        self.details = {"place": self.bench.place, "held": 0.0}

    def make(self) -> None:
        """Make and check all methods, and with mapped memory the ``scatter_gather`` path without caches."""
        super().make()
        keyed = [one for one in self.made if one.kind == PATH and one.call.keyed(0)]  # type: ignore[attr-defined]
        if self.bench.mapped and keyed:
            self.add(PATH, NO_CACHE, partial(self.own, PATH, NO_CACHE, "scatter_gather"))

    def rows(self) -> list[Row]:
        """Measure every method and its phases, and if asked halox's methods while other work holds the GPUs."""
        rows, phases = super().rows(), self._phases()
        rows = [
            row.with_(**phases.get(row.name, {})) if row.mode == STREAM else row for row in rows
        ]
        is_busy = self.bench.options.busy and self.stage.device is not None
        return rows + (self._with_busy_gpus() if is_busy else [])

    def measured(self, method: Method, mode: str, us: float) -> Row:
        """Return the row of a method, given the time of a round trip."""
        speed = self.case.nbytes / (us / 2) / 1e3
        return super().measured(method, mode, us / 2).with_(gb_per_s=speed)

    def own(self, kind: str, name: str, chosen: str | None) -> Method:
        """Plan both directions by a path; with mapped memory, count and time its keys."""
        make = Uncached if name == NO_CACHE else Exchanges
        trip = make(self.comm, self.arrays, self.case.directions(self.comm.rank), chosen)
        found: dict[str, Any] = {"path": trip.taken}
        channels = trip.keyed(0) if self.bench.mapped else []
        if channels:
            us = mapping_us(channels, self.bench.options.timing.batches)
            found["keys"] = sum(channel.n_keys for channel in channels)
            found["map_us"] = self.comm.allreduce(us, load_mpi().MAX)
        return Method(kind, name, trip, trip.close, trip.capturable, self.arrays, found)

    def baselines(self) -> Mapping[str, Callable[[], Baseline]]:
        """Return MPI's types, packing by hand, by MPI and by halox, NCCL, and contiguous bytes."""
        what, device = (self.comm, self.case, self.arrays), self.stage.device
        found: dict[str, Callable[[], Baseline]]
        if device is None:
            found = {
                by_users.MPI_TYPES: partial(by_users.MpiTypes, *what),
                by_users.BY_HAND: partial(by_users.ByHandPacked, *what),
                by_users.MPI_PACK: partial(by_users.MpiPacked, *what),
            }
        else:

            def types() -> Baseline:
                self.bench.need_gpu_aware()
                most = max(map(run_count, self.case.types()))
                if most > by_users.MOST_BLOCKS:
                    raise PathError(f"left out: {most:,} blocks, which MPI may copy one by one")
                return by_users.MpiTypes(*what)

            def by_mpi() -> Baseline:
                self.bench.need_gpu_aware()
                return by_users.Kernels(*what, device, host=False)

            found = {
                by_users.NCCL: lambda: by_users.KernelsAndNccl(self.bench.nccl(), *what, device),
                by_users.ZERO_COPY: lambda: by_users.Kernels(*what, device, host=True),
                by_users.GPU_AWARE: by_mpi,
                by_users.GPU_TYPES: types,
            }
        found[by_users.HALOX_PACK] = partial(by_users.HaloxPacked, *what, device)
        found[by_users.REFERENCE] = partial(Reference, *what[:2])
        return found

    def check(self, method: Method, call: Callable[[], Any]) -> None:
        """Go each way from slabs filled anew, and compare all of both; of a graph, compare its end."""
        trip, slab = method.call, self.arrays
        if isinstance(trip, Reference):
            self.expect(trip.wrong(), "bytes")
            return
        for step in range(_CHECKS):
            if call is trip and isinstance(trip, Trip):
                wrong = 0
                for direction in range(2):
                    self._fill(2 * step + direction)
                    trip.go(direction)
                    self.stage.synchronize()
                    wrong += self._oracle.wrong(slab, 2 * step + direction, (direction,))
            else:
                self._fill(step)
                call()
                self.stage.synchronize()
                wrong = self._oracle.wrong(slab, step, (0, 1))
            self.expect(wrong, f"words, in round trip {step + 1}")

    def _fill(self, step: int) -> None:
        """Fill the slab, and wait: MPI reads device memory without regard to streams."""
        self._oracle.fill(self.arrays, step)
        self.stage.synchronize()

    def _phases(self) -> dict[str, dict[str, float]]:
        """Return the microseconds of the phases of each method that packs."""
        calls = {
            (method.name, phase): call
            for method in self.made
            if isinstance(method.call, Packed) and not method.capturable
            for phase, call in method.call.phases().items()
        }
        # A rank with contiguous memory packs nothing: its methods have no such phases on any rank.
        common = set(calls).intersection(*self.comm.allgather(list(calls)))
        calls = {key: call for key, call in calls.items() if key in common}
        times = self.bench.clock.measure({"/".join(key): call for key, call in calls.items()})
        found: dict[str, dict[str, float]] = {}
        for name, phase in calls:
            halves = 2 if phase == "communicate" else 1
            found.setdefault(name, {})[f"{phase}_us"] = times[f"{name}/{phase}"] / halves
        return found

    def _with_busy_gpus(self) -> list[Row]:
        found = []
        for method in self.made:
            if method.kind == BASELINE or method.name == NO_CACHE:
                continue
            times = times_us(self.comm, self.stage, method.call, BUSY, shared=self.bench.shared_gpu)
            for share, us in times.items():
                row = self.measured(method, STREAM, us).with_(held=share)
                if not isfinite(us):
                    why = "did not end beside the kernel"
                    row = row.with_(us=None, gb_per_s=None, error=why)
                found.append(row)
        return found
