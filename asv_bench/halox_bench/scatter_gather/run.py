"""Strided messages between two ranks: every path of halox, with and without key caches, beside packing by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isfinite
from statistics import median
from typing import Any

import numpy as np

from halox.paths.scatter_gather.agreement import AgreeingChannel
from halox.runtime.context import Context
from halox.runtime.world import World, load_mpi
from halox_bench.pingpong.run import Exchanges, PingPongBench, Trips
from halox_bench.ranks.busy import times_us
from halox_bench.ranks.methods import Method
from halox_bench.ranks.rows import BASELINE, PATH, STREAM
from halox_bench.scatter_gather.cases import ScatterGatherCase
from halox_bench.scatter_gather.rows import ScatterGatherRow

NO_CACHE = "scatter_gather, no key cache"
"""Keys mapped and sent anew in every transfer."""

BUSY = (0.0, 0.5)

Zeros = Callable[[int], Any]
"""Returns so many float64 zeros that the other rank can map, if they are on a GPU."""


class ScatterGatherBench(PingPongBench):
    """Two ranks and a place for their arrays.

    Attributes
    ----------
    left_out : dict
        Methods for which there was no case, with the reason.
    """

    kind = "scatter_gather"

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self.left_out: dict[str, str] = {}

    @contextmanager
    def memory(self) -> Iterator[Zeros]:
        """Provide arrays, which end with the block; collective."""
        if self.stage.device is None:
            yield lambda n: np.zeros(n)
            return
        context = Context(World(self.comm))
        arena = context.use_device(self.stage.device)

        def zeros(n: int) -> Any:
            found = arena.array((n,), np.dtype("f8"))
            found.fill(0)
            return found

        yield zeros
        self.stage.settle()
        context.close()

    def measure(self, case: ScatterGatherCase) -> list[ScatterGatherRow]:  # type: ignore[override]
        """Measure one case; methods that are impossible are left out."""
        with self.memory() as zeros, self.stage.current():
            found = ScatterGatherTrips(self, case, zeros).measure()
        self.free()
        possible = {row.name for row in found if row.us is not None or row.failed}
        refused = {row.name: row.error for row in found if row.name not in possible}
        self.left_out |= {name: refused[name] for name in refused if name not in self.left_out}
        return [row for row in found if row.name in possible]

    def heading(self) -> str:
        """Return what stands above the table."""
        return (
            "microseconds of half a round trip, the slower rank's; GB/s of payload; keys of one end of a message, and "
            "as many as a network adapter would take"
        )


class Uncached(Exchanges):
    """Two exchanges whose keys are mapped and sent anew before each transfer."""

    capturable = False

    def there(self) -> None:
        self._remap(0)
        super().there()

    def back(self) -> None:
        self._remap(1)
        super().back()

    def _remap(self, number: int) -> None:
        for channel in keyed(self, number):
            channel.remap()


def keyed(trip: Any, number: int) -> list[AgreeingChannel]:
    """Return the channels that have keys, of one of a trip's exchanges."""
    channels: Sequence[Any] = trip.plans[number]._channels
    return [channel for channel in channels if isinstance(channel, AgreeingChannel)]


def mapping_us(channels: Sequence[AgreeingChannel], samples: int) -> float:
    """Return microseconds in which this rank maps the keys of channels anew, without a word from the peers; collective.

    What they say is always the same, and is heard once.
    """
    heard: dict[AgreeingChannel, list[dict[int, Any]]] = {channel: [] for channel in channels}

    def hear(channel: AgreeingChannel) -> Callable[[dict[int, Any]], dict[int, Any]]:
        def swap(said: dict[int, Any]) -> dict[int, Any]:
            heard[channel].append(channel.swap(said))
            return heard[channel][-1]

        return swap

    for channel in channels:
        channel.remap(hear(channel))
    times = []
    for _ in range(samples):
        words = {channel: iter(said) for channel, said in heard.items()}
        begin = time.perf_counter()
        for channel in channels:
            channel.remap(lambda _, said=words[channel]: next(said))  # type: ignore[misc]
        times.append(time.perf_counter() - begin)
    for channel in channels:  # and once more with the peers, who know other keys by now
        channel.remap()
    return median(times) * 1e6


class ScatterGatherTrips(Trips[ScatterGatherRow]):
    """A case's array on both ranks, and every method to send it there and back."""

    bench: ScatterGatherBench
    _case: ScatterGatherCase

    def __init__(self, bench: ScatterGatherBench, case: ScatterGatherCase, zeros: Zeros) -> None:
        super().__init__(bench, case, zeros(case.sides[bench.comm.rank].elements))
        self._adapter_keys = case.adapter_keys()

    def make(self) -> None:
        """Make and check all, and the ``scatter_gather`` path without caches."""
        super().make()
        if any(keyed(one.call, 0) for one in self.made if one.kind == PATH):
            self.add(PATH, NO_CACHE, partial(self.own, PATH, NO_CACHE, "scatter_gather"))

    def measure(self) -> list[ScatterGatherRow]:
        """Make every method, measure it and close it."""
        self.make()
        found = self.rows()
        if self.bench.options.busy and self.stage.device is not None:
            found += self._with_busy_gpus()
        self.close()
        self.arrays = None
        return found

    def trip(self, name: str, messages: Any, chosen: str | None) -> Exchanges:
        """Plan both exchanges."""
        kind = Uncached if name == NO_CACHE else Exchanges
        return kind(self.comm, messages, chosen)

    def own(self, kind: str, name: str, chosen: str | None) -> Method:
        """Plan both exchanges by a path, and count its keys."""
        made = super().own(kind, name, chosen)
        channels = keyed(made.call, 0)
        if channels:
            made.details["keys"] = sum(channel.n_keys for channel in channels)
            us = mapping_us(channels, self.bench.options.timing.batches)
            made.details["map_us"] = self.comm.allreduce(us, load_mpi().MAX)
        return made

    def blank(self, kind: str, name: str) -> ScatterGatherRow:
        """Return a method's row without a figure."""
        case = self._case
        what = case.pattern, case.nbytes, self.bench.place, case.size
        return ScatterGatherRow(
            *what,
            case.n,
            case.block_bytes,
            self._adapter_keys,
            case=case.name,
            kind=kind,
            name=name,
        )

    def _with_busy_gpus(self) -> list[ScatterGatherRow]:
        found = []
        for method in self.made:
            if method.kind == BASELINE or method.name == NO_CACHE:
                continue
            us = times_us(self.comm, self.stage, method.call, BUSY, shared=self.bench.shared_gpu)[
                BUSY[1]
            ]
            row = self.measured(method, STREAM, us)
            if not isfinite(us):
                row = replace(row, us=None, gb_per_s=None, error="did not end beside the kernel")
            found.append(replace(row, held=BUSY[1]))
        return found
