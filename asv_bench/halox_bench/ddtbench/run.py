"""DDTBench's patterns between two ranks: halox's typed messages beside DDTBench's own methods, phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from halox.errors import PathError
from halox.exchange.typed import Recv, Send
from halox.paths.messages import run_count
from halox_bench.ddtbench import baselines as by_users
from halox_bench.ddtbench.baselines import Packed, Reference
from halox_bench.ddtbench.cases import RANKS, WORD, DdtCase, places
from halox_bench.ddtbench.rows import PHASES, DdtRow
from halox_bench.pingpong.baselines import (
    BY_HAND,
    GPU_AWARE,
    GPU_TYPES,
    MOST_BLOCKS,
    MPI_TYPES,
    ZERO_COPY,
    Trip,
)
from halox_bench.pingpong.run import GRAPH_TRIPS, Exchanges, PingPongBench
from halox_bench.ranks.methods import Baseline, Method, Methods
from halox_bench.ranks.rows import STREAM

_CHECKS = 2
_DIRECTIONS = ("there", "back")


class DdtBench(PingPongBench):
    """Two ranks and a place for their slabs."""

    kind = "ddtbench"

    def measure(self, case: DdtCase) -> list[DdtRow]:  # type: ignore[override]
        """Measure one case."""
        with self.stage.current():
            return DdtTrips(self, case).measure()

    def heading(self) -> str:
        """Return what stands above the table."""
        return "microseconds of half a round trip, the slower rank's; GB/s of payload; phases measured one by one"


class DdtOracle:
    """Fills the slabs of both ranks and says what is wrong afterwards, from what hand-written packing moves."""

    def __init__(self, case: DdtCase, rank: int, xp: Any = np) -> None:
        self._rank, self._xp = rank, xp
        self._words = -(-case.slab_bytes // WORD)
        self._directions = [
            self._messages(case, direction) for direction in range(len(_DIRECTIONS))
        ]

    def _messages(self, case: DdtCase, direction: int) -> list[tuple[int, int, Any, Any]]:
        """Return source, target and the numbers of their words for each message of a direction."""
        found = []
        directions = [case.directions(rank)[direction] for rank in range(RANKS)]
        for source, target in np.ndindex(RANKS, RANKS):
            here, there = directions[target], directions[source]
            if target not in there.sends or there.packed is None or here.unpacked is None:
                continue
            sent = np.split(places(case, there.packed), len(there.sends))
            received = np.split(places(case, here.unpacked), len(here.receives))
            at = [*there.sends].index(target), [*here.receives].index(source)
            found.append((source, target, sent[at[0]], received[at[1]]))
        return found

    def filled(self, rank: int, step: int) -> Any:
        """Return the words of a rank's slab: each other than its neighbours, the other rank's and the last step's."""
        numbers = np.arange(self._words, dtype=np.uint32)
        return (numbers * 2 + rank) * np.uint32(2654435761) + np.uint32(step + 1)

    def fill(self, array: Any, step: int) -> None:
        """Fill this rank's slab."""
        self._words_of(array)[:] = self._xp.asarray(self.filled(self._rank, step))

    def _words_of(self, array: Any) -> Any:
        return array.view(np.uint32)

    def wrong(self, array: Any, step: int, directions: tuple[int, ...]) -> int:
        """Count the words of this rank's slab that are not as some directions leave them."""
        slabs = [self.filled(rank, step) for rank in range(RANKS)]
        for direction in directions:
            moved = [
                (target, here, slabs[source][there])
                for source, target, there, here in self._directions[direction]
            ]
            for target, here, values in moved:
                slabs[target][here] = values
        wanted = self._xp.asarray(slabs[self._rank])
        return int(self._xp.count_nonzero(self._words_of(array) != wanted))


class DdtTrips(Methods[DdtRow]):
    """A case's slab on both ranks, and every method to send it there and back."""

    bench: DdtBench

    def __init__(self, bench: DdtBench, case: DdtCase) -> None:
        words = -(-case.slab_bytes // WORD)
        super().__init__(bench, bench.stage.xp.zeros(words * WORD, "u1"), GRAPH_TRIPS)
        self._case = case
        self._oracle = DdtOracle(case, self.comm.rank, self.stage.xp)
        self.stage.settle()

    def measure(self) -> list[DdtRow]:
        """Make every method, measure it and its phases, and close it."""
        self.make()
        rows = self.rows()
        found = self._phases()
        self.close()
        return [
            replace(row, **found.get(row.name, {})) if row.mode == STREAM else row for row in rows
        ]

    def _phases(self) -> dict[str, dict[str, Any]]:
        """Return the microseconds of each method's phases."""
        calls = {
            (method.name, phase): call
            for method in self.made
            if isinstance(method.call, Packed)
            for phase, call in method.call.phases().items()
        }
        times = self.bench.clock.measure(
            {f"{name}/{phase}": calls[name, phase] for name, phase in calls}
        )
        found: dict[str, dict[str, Any]] = {}
        for name, phase in calls:
            halves = 2 if phase == PHASES[1] else 1
            found.setdefault(name, {})[f"{phase}_us"] = times[f"{name}/{phase}"] / halves
        return found

    def blank(self, kind: str, name: str) -> DdtRow:
        """Return a method's row without a figure."""
        case = self._case
        what = case.pattern, case.nbytes, self.bench.place, case.size, case.block_bytes
        return DdtRow(*what, case=case.name, kind=kind, name=name)

    def measured(self, method: Method, mode: str, us: float) -> DdtRow:
        """Return the row of a method whose round trips were timed."""
        row = super().measured(method, mode, us / 2)
        return replace(row, gb_per_s=self._case.nbytes / (us / 2) / 1e3)

    def own(self, kind: str, name: str, chosen: str | None) -> Method:
        """Plan both directions by a path."""
        slab, directions = self.arrays, self._case.directions(self.comm.rank)
        messages = [
            (
                [Send(slab, made, peer) for peer, made in direction.sends.items()],
                [Recv(slab, made, peer) for peer, made in direction.receives.items()],
            )
            for direction in directions
        ]
        trip = Exchanges(self.comm, messages, chosen)
        return Method(kind, name, trip, trip.close, True, slab, {"path": trip.taken})

    def baselines(self) -> Mapping[str, Callable[[], Baseline]]:
        """Return DDTBench's methods for the slab's memory, and halox's packing."""
        what, device = (self.comm, self._case, self.arrays), self.stage.device
        found: dict[str, Callable[[], Baseline]] = {}
        if device is None:
            found[MPI_TYPES] = partial(by_users.MpiTypes, *what)
            found[BY_HAND] = partial(by_users.ByHandPacked, *what)
            found[by_users.MPI_PACK] = partial(by_users.MpiPacked, *what)
        else:

            def types() -> Baseline:
                self.bench.need_gpu_aware()
                directions = self._case.directions(0)
                every = [
                    m
                    for direction in directions
                    for m in (*direction.sends.values(), *direction.receives.values())
                ]
                most = max(map(run_count, every))
                if most > MOST_BLOCKS:
                    raise PathError(f"left out: {most:,} blocks, which MPI may copy one by one")
                return by_users.MpiTypes(*what)

            def by_mpi() -> Baseline:
                self.bench.need_gpu_aware()
                return by_users.Kernels(*what, device, host=False)

            found[ZERO_COPY] = lambda: by_users.Kernels(*what, device, host=True)
            found[GPU_AWARE] = by_mpi
            found[GPU_TYPES] = types
        found[by_users.HALOX_PACK] = partial(by_users.HaloxPacked, *what, device)
        found[by_users.REFERENCE] = partial(Reference, *what[:2])
        return found

    def check(self, method: Method, call: Callable[[], Any]) -> None:
        """Go each way from slabs filled anew, and look at all of both; of a graph, look at its end."""
        trip, array = method.call, self.arrays
        if isinstance(trip, Reference):
            self.expect(trip.wrong(), "bytes")
            return
        for step in range(_CHECKS):
            if call is trip and isinstance(trip, Trip):
                wrong = 0
                for direction, go in enumerate((trip.there, trip.back)):
                    self._fill(2 * step + direction)
                    go()
                    self.stage.synchronize()
                    wrong += self._oracle.wrong(array, 2 * step + direction, (direction,))
            else:
                self._fill(step)
                call()
                self.stage.synchronize()
                wrong = self._oracle.wrong(array, step, (0, 1))
            self.expect(wrong, f"4-byte words, in round trip {step + 1}")

    def _fill(self, step: int) -> None:
        """Fill the slab, and wait: MPI reads device memory without regard to streams."""
        self._oracle.fill(self.arrays, step)
        self.stage.synchronize()
