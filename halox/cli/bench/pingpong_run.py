"""Runs the ping-pong: halox's typed messages beside MPI's types and packing by hand, between two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from halox.cli.bench import pingpong_rivals as rivals
from halox.cli.bench.exchange_rows import PATH
from halox.cli.bench.exchange_run import PATHS
from halox.cli.bench.pingpong_cases import PingPong, PingPongOracle
from halox.cli.bench.ranks_clock import RanksClock, Stage, Timing, attempt
from halox.cli.bench.ranks_ways import (
    BASELINE,
    GRAPH,
    NOT_POSSIBLE,
    SELECTED,
    STREAM,
    WrongResult,
)
from halox.errors import HaloxError, PathError
from halox.exchange.typed import Exchange, Recv, Send
from halox.paths.messages import run_count

PLACES = ("host", "1gpu", "2gpus")
"""Where the two arrays are."""

BUSY = (0.0, 0.25, 0.5)
"""Shares of the GPU that are held while others are measured: figure 15 of Wu et al."""

GRAPH_TRIPS = 10
_CHECKS = 2


@dataclass(frozen=True)
class PingPongRow:
    """One way to send one case there and back.

    Attributes
    ----------
    pattern : str
    n, nbytes : int
        Order of the matrix, and payload of one message.
    place : str
        One of `PLACES`.
    kind, name, path, mode, checked, beside, error, failed
        As of `ExchangeRow`; ``beside`` in microseconds of half a round trip.
    held : float
        Share of the GPU held by other work.
    half_us : float or None
        Half of the wall time of a round trip, the slower rank's.
    gb_per_s : float or None
        Payload over that, 1e9 bytes a second.
    """

    pattern: str
    n: int
    nbytes: int
    place: str
    kind: str
    name: str
    path: str = ""
    mode: str = STREAM
    held: float = 0.0
    half_us: float | None = None
    gb_per_s: float | None = None
    checked: bool = False
    beside: dict[str, float] = field(default_factory=dict)
    error: str = ""
    failed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class PingPongOptions:
    """What to measure; attributes as of `ExchangeOptions`, and ``busy``: also with a busy GPU."""

    paths: tuple[str, ...] | None = None
    baselines: bool = True
    graph: bool = True
    busy: bool = False
    timing: Timing = field(default_factory=Timing)
    no_gpu_aware: str = "it is not known whether this MPI takes device memory"


@dataclass
class _Way:
    kind: str
    name: str
    there: Callable[[], None]
    back: Callable[[], None]
    close: Callable[[], None]
    path: str = ""
    capturable: bool = False

    def trip(self) -> None:
        """Go there and back."""
        self.there()
        self.back()


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
    from halox.runtime.gpu.cuda import cupy, gpu_count

    count = gpu_count()
    if not count:
        return []
    properties = cupy().cuda.runtime.getDeviceProperties
    return [bytes(properties(i)["uuid"]) for i in range(count)]


class PingPongBench:
    """Two ranks and a place for their arrays.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Of two ranks.
    place : str
    options : PingPongOptions

    Raises
    ------
    PathError
        On both ranks, if there is no such place here.
    """

    def __init__(self, comm: Any, place: str, options: PingPongOptions) -> None:
        self._comm, self._place, self._options = comm, place, options
        self._stage = Stage(devices(comm, place))
        self._clock = RanksClock(comm, self._stage, options.timing)

    def run(self, cases: Sequence[PingPong]) -> Iterator[list[PingPongRow]]:
        """Measure cases; yields the rows of each, the same on both ranks; collective."""
        for case in cases:
            with self._stage.current():
                yield self._measured(case)

    def _measured(self, case: PingPong) -> list[PingPongRow]:
        comm, stage = self._comm, self._stage
        array = stage.xp.zeros(case.sides[comm.rank].elements, "f8")
        oracle = PingPongOracle(case, comm.rank, stage.xp)
        stage.settle()
        ways: list[_Way] = []
        rows: list[PingPongRow] = []
        for kind, name, make in self._makers(case, array):
            way, error = attempt(comm, make)
            if way is not None:
                made = way
                _, error = attempt(comm, lambda made=made: self._check(made, oracle, array))  # type: ignore[misc]
            if way is None or error is not None:
                rows.append(self._refused(case, kind, name, error or HaloxError("nothing made")))
                continue
            ways.append(way)
        rows += self._timed(case, ways, oracle, array)
        stage.settle()
        for way in reversed(ways):
            way.close()
        return self._beside(rows)

    def _makers(self, case: PingPong, array: Any) -> Iterator[tuple[str, str, Callable[[], _Way]]]:
        memory = "cpu" if self._stage.device is None else "gpu"
        paths = PATHS[memory] if self._options.paths is None else self._options.paths
        yield SELECTED, SELECTED, lambda: self._exchanges(case, array, SELECTED, None)
        for path in paths:
            yield PATH, path, lambda path=path: self._exchanges(case, array, PATH, path)  # type: ignore[misc]
        if not self._options.baselines:
            return
        for name, make in self._rivals(case, array).items():
            yield BASELINE, name, lambda name=name, make=make: _party(name, make())  # type: ignore[misc]

    def _exchanges(self, case: PingPong, array: Any, kind: str, path: str | None) -> _Way:
        comm = self._comm
        side, other = case.sides[comm.rank], 1 - comm.rank
        chosen: dict[str, Any] = {} if path is None else {"path": path}
        made: list[Exchange] = []
        for sender in (0, 1):
            sends = [Send(array, side.datatype, other, side.count)] if comm.rank == sender else []
            receives = [] if sends else [Recv(array, side.datatype, other, side.count)]
            try:
                made.append(Exchange(sends, receives, comm=comm, **chosen))
            except HaloxError:
                for exchange in made:
                    exchange.close()
                raise
        there, back = made
        rows = [*there.explain().rows, *back.explain().rows]
        taken = ", ".join(sorted({f"{row.path}/{row.way}" for row in rows}))

        def close() -> None:
            there.close()
            back.close()

        return _Way(kind, path or SELECTED, there, back, close, taken, True)

    def _rivals(self, case: PingPong, array: Any) -> dict[str, Callable[[], rivals.Party]]:
        comm, device = self._comm, self._stage.device
        if device is None:
            return {
                rivals.MPI_TYPES: lambda: rivals.MpiTypes(comm, case, array),
                rivals.BY_HAND: lambda: rivals.ByHand(comm, case, array),
            }

        def types() -> rivals.Party:
            self._need_gpu_aware()
            most = max(run_count(side.datatype) * side.count for side in case.sides)
            if most > rivals.MOST_BLOCKS:
                raise PathError(f"left out: {most:,} blocks, which MPI may copy one by one")
            return rivals.MpiTypes(comm, case, array)

        def by_mpi() -> rivals.Party:
            self._need_gpu_aware()
            return rivals.KernelsAndMpi(comm, case, array, device, host=False)

        return {
            rivals.NCCL: lambda: rivals.KernelsAndNccl(self._nccl(), comm, case, array, device),
            rivals.ZERO_COPY: lambda: rivals.KernelsAndMpi(comm, case, array, device, host=True),
            rivals.GPU_AWARE: by_mpi,
            rivals.GPU_TYPES: types,
        }

    def _need_gpu_aware(self) -> None:
        if self._options.no_gpu_aware:
            raise PathError(self._options.no_gpu_aware)

    def _nccl(self) -> Any:
        from halox.cli.bench import exchange_rivals_gpu as gpu

        return gpu.nccl_between(self._comm, shared_gpu=self._place == "1gpu")

    def _check(self, way: _Way, oracle: PingPongOracle, array: Any) -> None:
        """Send it there and look, send it back and look; both with empty targets.

        Raises
        ------
        WrongResult
            On both ranks, if an element is wrong on either.
        """
        first = self._comm.rank == 0
        for step in range(_CHECKS):
            oracle.fill(array, step, full=first)
            way.there()
            wrong = oracle.wrong(array, step)
            if first:
                oracle.fill(array, step, full=False)
            way.back()
            wrong += oracle.wrong(array, step)
            self._stage.synchronize()
            total = self._comm.allreduce(wrong)
            if total:
                raise WrongResult(f"wrong result: {total} elements, in round trip {step + 1}")

    def _check_replay(self, replay: Callable[[], None], oracle: PingPongOracle, array: Any) -> None:
        for step in range(_CHECKS):
            oracle.fill(array, step, full=self._comm.rank == 0)
            replay()
            wrong = oracle.wrong(array, step)
            self._stage.synchronize()
            total = self._comm.allreduce(wrong)
            if total:
                raise WrongResult(f"wrong result: {total} elements, after replay {step + 1}")

    def _timed(
        self, case: PingPong, ways: Sequence[_Way], oracle: PingPongOracle, array: Any
    ) -> list[PingPongRow]:
        times = self._clock.measure({way.name: way.trip for way in ways})
        rows = [self._row(case, way, STREAM, times[way.name]) for way in ways]
        if self._stage.device is None:
            return rows
        if self._options.graph:
            rows += self._in_graphs(case, ways, oracle, array)
        if self._options.busy and self._place == "2gpus":
            rows += self._with_busy_gpus(case, ways)
        return rows

    def _in_graphs(
        self, case: PingPong, ways: Sequence[_Way], oracle: PingPongOracle, array: Any
    ) -> list[PingPongRow]:
        rows: list[PingPongRow] = []
        replays: dict[str, Callable[[], None]] = {}
        for way in ways:
            if not way.capturable:
                continue
            replay, error = self._replay(way, oracle, array)
            if replay is None:
                row = self._refused(case, way.kind, way.name, error or HaloxError("no graph"))
                failed = isinstance(error, WrongResult)
                rows.append(replace(row, mode=GRAPH, path=way.path, failed=failed))
                continue
            replays[way.name] = replay
        times = self._clock.measure(replays)
        rows += [
            self._row(case, way, GRAPH, times[way.name] / GRAPH_TRIPS)
            for way in ways
            if way.name in times
        ]
        return rows

    def _replay(
        self, way: _Way, oracle: PingPongOracle, array: Any
    ) -> tuple[Callable[[], None] | None, Exception | None]:
        """Capture round trips, check what the graph gives, and return what replays it; or why not."""
        replay, error = attempt(self._comm, lambda: self._stage.captured(way.trip, GRAPH_TRIPS))
        if replay is None:
            return None, error
        found = replay
        _, error = attempt(self._comm, lambda: self._check_replay(found, oracle, array))
        return (None, error) if error is not None else (found, None)

    def _with_busy_gpus(self, case: PingPong, ways: Sequence[_Way]) -> list[PingPongRow]:
        from halox.cli.bench.busy import times_us

        rows = []
        for way in ways:
            if way.kind == SELECTED:
                times = times_us(self._comm, self._stage, way.trip, BUSY)
                rows += [
                    replace(self._row(case, way, STREAM, us), held=share)
                    for share, us in times.items()
                    if share
                ]
        return rows

    def _row(self, case: PingPong, way: _Way, mode: str, trip_us: float) -> PingPongRow:
        half = trip_us / 2
        row = self._blank(case, way.kind, way.name)
        speed = case.nbytes / half / 1e3
        return replace(row, path=way.path, mode=mode, half_us=half, gb_per_s=speed, checked=True)

    def _blank(self, case: PingPong, kind: str, name: str) -> PingPongRow:
        return PingPongRow(case.pattern, case.n, case.nbytes, self._place, kind, name)

    def _refused(self, case: PingPong, kind: str, name: str, error: Exception) -> PingPongRow:
        fine = isinstance(error, NOT_POSSIBLE)
        said = str(error) if fine else f"{type(error).__name__}: {error}"
        return replace(self._blank(case, kind, name), error=said, failed=not fine)

    @staticmethod
    def _beside(rows: list[PingPongRow]) -> list[PingPongRow]:
        theirs = {
            row.name: row.half_us
            for row in rows
            if row.kind == BASELINE and row.mode == STREAM and row.half_us is not None
        }
        return [replace(row, beside=theirs) if row.half_us is not None else row for row in rows]


def _party(name: str, party: rivals.Party) -> _Way:
    return _Way(BASELINE, name, party.there, party.back, party.close, capturable=party.capturable)


def line(row: PingPongRow) -> str:
    """Return a row's line."""
    way = f"{row.name}, {row.held:.0%} held" if row.held else row.name
    cells = f"{row.place:6} {row.pattern:18} {row.n:6} {row.nbytes:13,} {way:34} {row.path:14} {row.mode:6}"
    if row.half_us is None:
        said = row.error.splitlines()[0] if row.error else "-"
        return f"{cells}  {'FAILED: ' if row.failed else ''}{said}"
    return f"{cells} {row.half_us:10.2f} {row.gb_per_s:8.2f}"


def header() -> str:
    """Return the table's head."""
    return f"{'where':6} {'pattern':18} {'N':>6} {'bytes':>13} {'way':34} {'path':14} {'mode':6} {'us':>10} {'GB/s':>8}"
