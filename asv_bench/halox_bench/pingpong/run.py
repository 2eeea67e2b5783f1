"""The ping-pong: halox's typed messages beside MPI's types and packing by hand, between two ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from halox.errors import HaloxError, PathError
from halox.exchange.typed import Exchange, Recv, Send
from halox.paths.messages import run_count
from halox.runtime.gpu.cuda import cupy, gpu_count
from halox_bench.pingpong import baselines as by_users
from halox_bench.pingpong.baselines import Trip
from halox_bench.pingpong.cases import PingPong, PingPongOracle
from halox_bench.pingpong.rows import PingPongRow, TripRow
from halox_bench.ranks.bench import Options, RanksBench
from halox_bench.ranks.busy import times_us
from halox_bench.ranks.clock import Stage
from halox_bench.ranks.methods import Baseline, Method, Methods, paths_taken
from halox_bench.ranks.rows import SELECTED, STREAM

PLACES = ("host", "1gpu", "2gpus")
"""Memory of the two arrays."""

BUSY = (0.0, 0.25, 0.5)
"""Shares of the GPU that are held while others are measured: figure 15 of Wu et al."""

GRAPH_TRIPS = 10
_CHECKS = 2

AnyRow = TypeVar("AnyRow", bound=TripRow)

Ways = Sequence[tuple[list[Send], list[Recv]]]
"""This rank's sends and receives, there and back."""


def devices(comm: Any, place: str) -> int | None:
    """Return this player's GPU, None for host memory.

    Raises
    ------
    PathError
        On both, if there is no such pair of GPUs.

    Notes
    -----
    Collective. GPUs are told apart by what they are, not by their numbers in a process.
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


class PingPongBench(RanksBench[Any]):
    """Two ranks and a place for their arrays.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Of two ranks.
    place : str
        One of `PLACES`.

    Raises
    ------
    PathError
        On both ranks, if there is no such place here.
    """

    kind = "pingpong"

    def __init__(self, comm: Any, place: str, options: Options) -> None:
        device = "cpu" if place == "host" else "gpu"
        super().__init__(comm, replace(options, device=device), Stage(devices(comm, place)))
        self.place = place

    def measure(self, case: PingPong) -> list[PingPongRow]:
        """Measure one case."""
        with self.stage.current():
            return PingPongTrips(self, case).measure()

    def heading(self) -> str:
        """Return what stands above the table."""
        return "microseconds of half a round trip, the slower rank's; GB/s of payload"


class Exchanges(Trip):
    """Two typed exchanges, there and back, each with this rank's sends and receives."""

    capturable = True

    def __init__(self, comm: Any, messages: Ways, path: str | None) -> None:
        chosen: dict[str, Any] = {} if path is None else {"path": path}
        self._made: list[Exchange] = []
        for sends, receives in messages:
            try:
                self._made.append(Exchange(sends, receives, comm=comm, **chosen))
            except HaloxError:
                self.close()
                raise
        self.taken = paths_taken(row for made in self._made for row in made.explain().rows)

    @property
    def plans(self) -> list[Any]:
        """Their plans."""
        return [made._plan for made in self._made]

    def there(self) -> None:
        self._made[0]()

    def back(self) -> None:
        self._made[1]()

    def close(self) -> None:
        for exchange in self._made:
            exchange.close()


class Trips(Methods[AnyRow]):
    """A case's array of float64 on both ranks, and every method to send it there and back."""

    bench: PingPongBench

    def __init__(self, bench: PingPongBench, case: PingPong, array: Any) -> None:
        super().__init__(bench, array, GRAPH_TRIPS)
        self._case = case
        self._oracle = PingPongOracle(case, self.comm.rank, self.stage.xp)
        self.stage.settle()

    def measured(self, method: Method, mode: str, us: float) -> AnyRow:
        """Return the row of a method whose round trips were timed."""
        row = super().measured(method, mode, us / 2)
        return replace(row, gb_per_s=self._case.nbytes / (us / 2) / 1e3)

    def trip(self, name: str, messages: Ways, chosen: str | None) -> Exchanges:
        """Plan both exchanges of the method of a name."""
        return Exchanges(self.comm, messages, chosen)

    def own(self, kind: str, name: str, chosen: str | None) -> Method:
        """Plan both exchanges by a path."""
        array, side, other = self.arrays, self._case.sides[self.comm.rank], 1 - self.comm.rank
        what = array, side.datatype, other, side.count
        ways: Ways = [([Send(*what)], []), ([], [Recv(*what)])]
        trip = self.trip(name, ways[:: 1 if self.comm.rank == 0 else -1], chosen)
        return Method(kind, name, trip, trip.close, True, self.arrays, {"path": trip.taken})

    def baselines(self) -> Mapping[str, Callable[[], Baseline]]:
        """Return MPI's types and packing by hand, and for CuPy arrays NCCL."""
        what, device = (self.comm, self._case, self.arrays), self.stage.device
        if device is None:
            return {
                by_users.MPI_TYPES: partial(by_users.MpiTypes, *what),
                by_users.BY_HAND: partial(by_users.ByHand, *what),
            }

        def types() -> Baseline:
            self.bench.need_gpu_aware()
            most = max(run_count(side.datatype) * side.count for side in self._case.sides)
            if most > by_users.MOST_BLOCKS:
                raise PathError(f"left out: {most:,} blocks, which MPI may copy one by one")
            return by_users.MpiTypes(*what)

        def by_mpi() -> Baseline:
            self.bench.need_gpu_aware()
            return by_users.KernelsAndMpi(*what, device, host=False)

        return {
            by_users.NCCL: lambda: by_users.KernelsAndNccl(self.bench.nccl(), *what, device),
            by_users.ZERO_COPY: lambda: by_users.KernelsAndMpi(*what, device, host=True),
            by_users.GPU_AWARE: by_mpi,
            by_users.GPU_TYPES: types,
        }

    def check(self, method: Method, call: Callable[[], Any]) -> None:
        """Send it there and look, send it back and look, both with empty targets; of a graph, look at its end."""
        first, array, trip = self.comm.rank == 0, self.arrays, method.call
        for step in range(_CHECKS):
            self._oracle.fill(array, step, full=first)
            if call is trip and isinstance(trip, Trip):
                trip.there()
                wrong = self._oracle.wrong(array, step)
                if first:
                    self._oracle.fill(array, step, full=False)
                trip.back()
                wrong += self._oracle.wrong(array, step)
            else:
                call()
                wrong = self._oracle.wrong(array, step)
            self.expect(wrong, f"elements, in round trip {step + 1}")


class PingPongTrips(Trips[PingPongRow]):
    """A case of matrices."""

    def __init__(self, bench: PingPongBench, case: PingPong) -> None:
        elements = case.sides[bench.comm.rank].elements
        super().__init__(bench, case, bench.stage.xp.zeros(elements, "f8"))

    def measure(self) -> list[PingPongRow]:
        """Make every method, measure it and close it."""
        self.make()
        found = self.rows()
        if self.bench.options.busy and self.bench.place == "2gpus":
            found += self._with_busy_gpus()
        self.close()
        return found

    def blank(self, kind: str, name: str) -> PingPongRow:
        """Return a method's row without a figure."""
        case = self._case
        what = case.pattern, case.nbytes, self.bench.place, case.n
        return PingPongRow(*what, case=case.name, kind=kind, name=name)

    def _with_busy_gpus(self) -> list[PingPongRow]:
        return [
            replace(self.measured(method, STREAM, us), held=share)
            for method in self.made
            if method.kind == SELECTED
            for share, us in times_us(self.comm, self.stage, method.call, BUSY).items()
            if share
        ]
