"""Runs the halo benchmark: every path, what halox selects, and what users write, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from halox.cli.bench.exchange_cases import ExchangeCase, Neighbourhood
from halox.cli.bench.exchange_oracle import Oracle
from halox.cli.bench.exchange_rivals import MPI_NEIGHBOUR, MPI_TYPES, MpiNeighbour, MpiTypes, Rival
from halox.cli.bench.exchange_rows import (
    BASELINE,
    GRAPH,
    PATH,
    SELECTED,
    STREAM,
    ExchangeRow,
)
from halox.cli.bench.ranks_clock import RanksClock, Stage, Timing, attempt
from halox.engine.cuda import why_no_gpu
from halox.errors import DeviceError, HaloxError, MissingPackageError, PathError
from halox.grid import Grid
from halox.world import load_mpi

PATHS = {"cpu": ("host",), "gpu": ("peer", "ipc", "staged", "cuda_aware")}
"""Paths that may carry messages to other ranks, by the arrays' memory."""

NOT_POSSIBLE = (PathError, MissingPackageError)
"""What says that something cannot be had here, which is no failure."""

GRAPH_EXCHANGES = 20
"""Exchanges in a captured graph."""

MOST_HOST_BYTES = 1 << 30
"""Fields larger than this on one rank are left out on CPUs."""

_FREE_SHARE = 0.4
_CHECKS = 3


@dataclass(frozen=True)
class ExchangeOptions:
    """What to measure.

    Attributes
    ----------
    device : {"cpu", "gpu"}
    paths : tuple of str or None
        Those to be named one by one; None means all.
    baselines : tuple of str or None
        Names of what users write; None means all.
    graph : bool
        Whether also to capture exchanges in CUDA graphs.
    timing : Timing
    no_gpu_aware : str
        Why MPI is not to be given device memory; empty if it may be.
    """

    device: str
    paths: tuple[str, ...] | None = None
    baselines: tuple[str, ...] | None = None
    graph: bool = True
    timing: Timing = field(default_factory=Timing)
    no_gpu_aware: str = "it is not known whether this MPI takes device memory"


@dataclass
class Way:
    """One way to exchange, made and checked.

    Attributes
    ----------
    kind, name : str
        As of `ExchangeRow`.
    call : callable
        Exchanges once.
    close : callable
        Gives back what it holds; collective.
    path : str
    capturable : bool
    fields : list of array
        What it exchanges.
    """

    kind: str
    name: str
    call: Callable[[], None]
    close: Callable[[], None]
    path: str
    capturable: bool
    fields: list[Any]


class Bench:
    """The ranks of a communicator with what all cases share.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    options : ExchangeOptions

    Attributes
    ----------
    shared_gpu : bool
        Whether two of the ranks use one GPU.

    Notes
    -----
    Everything here is collective.
    """

    def __init__(self, comm: Any, options: ExchangeOptions) -> None:
        self.comm, self.options = comm, options
        device: Any = options.device
        with Grid(comm.size, halo=0, comm=comm, device=device) as grid:
            self.stage = Stage(grid.device_id)
        self.clock = RanksClock(comm, self.stage, options.timing)
        self.shared_gpu = len(set(comm.allgather(self._place()))) < comm.size
        self._wire: Any = None

    def _place(self) -> Any:
        """Return what tells this rank's GPU from those of others."""
        if self.stage.device is None:
            return self.comm.rank
        properties = self.stage.xp.cuda.runtime.getDeviceProperties(self.stage.device)
        return bytes(properties["uuid"])

    def run(self, cases: Iterable[ExchangeCase]) -> Iterator[list[ExchangeRow]]:
        """Measure cases; yields the rows of each as they are there, the same on all ranks."""
        for case in cases:
            yield self.measure(case)
            if self.stage.device is not None:
                self.stage.xp.get_default_memory_pool().free_all_blocks()

    def measure(self, case: ExchangeCase) -> list[ExchangeRow]:
        """Measure one case."""
        if not self._fits(case):
            row = self._row(case, 0, SELECTED, SELECTED)
            return [replace(row, error=f"left out: {case.field_bytes:,} bytes a rank are too many")]
        with Prepared(self, case) as prepared:
            return prepared.rows()

    def _fits(self, case: ExchangeCase) -> bool:
        most = float(MOST_HOST_BYTES)
        if self.stage.device is not None:
            most = _FREE_SHARE * self.stage.xp.cuda.runtime.memGetInfo()[0]
            most /= self.comm.size if self.shared_gpu else 1
        return bool(self.comm.allreduce(case.field_bytes <= most, load_mpi().LAND))

    def _row(self, case: ExchangeCase, nbytes: int, kind: str, name: str) -> ExchangeRow:
        return ExchangeRow(
            case.name,
            case.shape,
            case.components,
            case.proc_shape(self.comm.size),
            case.faces,
            case.halo,
            case.dtype,
            case.fields,
            nbytes,
            kind,
            name,
        )

    def rival(self, name: str, near: Neighbourhood, fields: Sequence[Any]) -> Rival:
        """Make what users write by hand.

        Raises
        ------
        PathError
            If it cannot be had here.
        """
        comm, device = self.comm, self.stage.device
        if device is None:
            return {MPI_TYPES: MpiTypes, MPI_NEIGHBOUR: MpiNeighbour}[name](comm, near, fields)
        from halox.cli.bench import exchange_rivals_gpu as gpu

        if name == gpu.NCCL:
            return gpu.WithNccl(self.nccl(), comm, near, fields, device)
        if name == gpu.GPU_AWARE and self.options.no_gpu_aware:
            raise PathError(self.options.no_gpu_aware)
        return {gpu.ZERO_COPY: gpu.ZeroCopy, gpu.GPU_AWARE: gpu.GpuAware}[name](
            comm, near, fields, device
        )

    def nccl(self) -> Any:
        """Return NCCL between these ranks.

        Raises
        ------
        PathError
            On all ranks, if there is none.
        """
        from halox.cli.bench import exchange_rivals_gpu as gpu

        if self._wire is None:
            whys = self.comm.allgather(gpu.why_no_nccl())
            why = "NCCL refuses ranks that share a GPU" if self.shared_gpu else max(whys)
            if why:
                raise PathError(why)
            self._wire = gpu.NcclWire(self.comm)
        return self._wire

    def baselines(self) -> tuple[str, ...]:
        """Names of what users write, for these arrays."""
        if self.options.baselines is not None:
            return self.options.baselines
        if self.stage.device is None:
            return MPI_TYPES, MPI_NEIGHBOUR
        from halox.cli.bench import exchange_rivals_gpu as gpu

        return gpu.NCCL, gpu.ZERO_COPY, gpu.GPU_AWARE


class Prepared:
    """A case on the ranks: its grid and fields, and every way that gave the right result.

    Parameters
    ----------
    bench : Bench
    case : ExchangeCase

    Attributes
    ----------
    ways : list of Way
    refused : list of ExchangeRow
        Rows of those that cannot be had, or are wrong.
    """

    def __init__(self, bench: Bench, case: ExchangeCase) -> None:
        self.bench, self.case = bench, case
        self.comm, self.stage = bench.comm, bench.stage
        self.ways: list[Way] = []
        self.refused: list[ExchangeRow] = []
        self._own: list[Any] = []

    def __enter__(self) -> Prepared:
        """Make everything."""
        case, comm, stage = self.case, self.comm, self.stage
        device: Any = self.bench.options.device
        proc_shape = case.proc_shape(comm.size)
        grid_shape = tuple(n * p for n, p in zip(case.shape, proc_shape, strict=True))
        with ExitStack() as stack:
            self._grid = stack.enter_context(
                Grid(
                    grid_shape,
                    halo=case.halo,
                    periodic=case.periodic,
                    proc_shape=proc_shape,
                    comm=comm,
                    corners=case.corners,
                    device=device,
                )
            )
            stack.push(self._leave)
            stack.enter_context(stage.current())
            self.fields = [
                self._grid.zeros(case.dtype, components_after=case.components)
                for _ in range(case.fields)
            ]
            coords = dict(enumerate(comm.allgather(self._grid.coords)))
            self._near = Neighbourhood(case, coords, comm.rank)
            self._oracle = Oracle(self._near, stage.xp)
            stage.settle()
            for kind, name, make in self._makers():
                self._add(kind, name, make)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """Give everything back, unless an error is on its way: other ranks may not come along then."""
        self._stack.__exit__(*error)

    def _leave(self, kind: object, *_: object) -> None:
        if kind is None:
            self.stage.settle()
            while self.ways:
                self.ways.pop().close()
        self.fields, self._own = [], []

    def _makers(self) -> Iterator[tuple[str, str, Callable[[], Way]]]:
        """Yield kind, name, and what makes it on all ranks together."""
        options = self.bench.options
        paths = PATHS[options.device] if options.paths is None else options.paths
        yield SELECTED, SELECTED, lambda: self._planned(SELECTED, SELECTED, {})
        for path in paths:
            yield PATH, path, lambda path=path: self._planned(PATH, path, {"path": path})  # type: ignore[misc]
        for name in self.bench.baselines():
            yield BASELINE, name, lambda name=name: self._by_hand(name)  # type: ignore[misc]

    def _planned(self, kind: str, name: str, chosen: Mapping[str, Any]) -> Way:
        if name == "cuda_aware" and self.bench.options.no_gpu_aware:
            # Known once for the run; a grid of its own would have to find out again.
            raise PathError(self.bench.options.no_gpu_aware)
        plan = self._grid.plan(*self.fields, corners=self.case.corners, **chosen)
        rows = plan.explain().rows
        taken = {f"{row.path}/{row.way}" for row in rows if row.peer != self.comm.rank}
        return Way(kind, name, plan, plan.close, ", ".join(sorted(taken)), True, self.fields)

    def _by_hand(self, name: str) -> Way:
        fields = self._private()
        rival = self.bench.rival(name, self._near, fields)
        return Way(BASELINE, name, rival, rival.close, "", rival.capturable, fields)

    def _private(self) -> list[Any]:
        """Return the arrays that users would have: NumPy's own, not halox's shared memory, which slows MPI down."""
        if self.stage.device is not None:
            return self.fields
        if not self._own:
            self._own = [np.empty(field.shape, field.dtype) for field in self.fields]
        return self._own

    def _add(self, kind: str, name: str, make: Callable[[], Way]) -> None:
        way, error = attempt(self.comm, make)
        if way is not None:
            # Ranks may take different paths to their neighbours.
            taken = {path for found in self.comm.allgather(way.path) for path in found.split(", ")}
            way.path = ", ".join(sorted(filter(None, taken)))
            call, fields = way.call, way.fields
            _, error = attempt(self.comm, lambda: self.check(call, fields))
            if error is None:
                self.ways.append(way)
                return
            attempt(self.comm, way.close)
        self.refused.append(self._refused(kind, name, error or HaloxError("nothing was made")))

    def _refused(self, kind: str, name: str, error: Exception, mode: str = STREAM) -> ExchangeRow:
        fine = isinstance(error, NOT_POSSIBLE) or mode == GRAPH
        said = str(error) if fine else f"{type(error).__name__}: {error}"
        return replace(self._row(kind, name), mode=mode, error=said, failed=not fine)

    def _row(self, kind: str, name: str) -> ExchangeRow:
        return self.bench._row(self.case, self._near.bytes_sent, kind, name)

    def check(self, call: Callable[[], None], fields: Sequence[Any]) -> None:
        """Exchange several times, each time other values, and compare every cell.

        Raises
        ------
        HaloxError
            On all ranks, if any value is wrong on any.
        """
        for step in range(1, _CHECKS + 1):
            self._oracle.fill(fields, step)
            call()
            wrong = self._oracle.wrong(fields, step)
            self.stage.synchronize()
            total = self.comm.allreduce(wrong)
            if total:
                raise WrongResult(f"wrong result: {total} values, in exchange {step} of {_CHECKS}")

    def rows(self) -> list[ExchangeRow]:
        """Measure every way and return the rows, those without a figure included."""
        streamed = self.bench.clock.measure({way.name: way.call for way in self.ways})
        found = [self._measured(way, STREAM, streamed[way.name]) for way in self.ways]
        if self.stage.device is not None and self.bench.options.graph:
            found += self._in_graphs()
        found += self.refused
        order = [name for _, name, _ in self._makers()]
        found.sort(key=lambda row: (row.mode == GRAPH, order.index(row.name)))
        return self._beside(found)

    def _measured(self, way: Way, mode: str, us: float) -> ExchangeRow:
        row = self._row(way.kind, way.name)
        return replace(row, path=way.path, mode=mode, us=us, checked=True)

    def _in_graphs(self) -> list[ExchangeRow]:
        found: list[ExchangeRow] = []
        replays: dict[str, Callable[[], None]] = {}
        for way in self.ways:
            if not way.capturable:
                continue
            replay, error = self._replay(way)
            if replay is None:
                row = self._refused(way.kind, way.name, error or HaloxError("no graph"), GRAPH)
                failed = isinstance(error, WrongResult)
                found.append(replace(row, path=way.path, failed=failed))
                continue
            replays[way.name] = replay
        times = self.bench.clock.measure(replays)
        found += [
            self._measured(way, GRAPH, times[way.name] / GRAPH_EXCHANGES)
            for way in self.ways
            if way.name in times
        ]
        return found

    def _replay(self, way: Way) -> tuple[Callable[[], None] | None, Exception | None]:
        """Capture a way, check what the graph gives, and return what replays it; or why not."""
        replay, error = attempt(self.comm, lambda: self.stage.captured(way.call, GRAPH_EXCHANGES))
        if replay is None:
            return None, error
        found = replay
        _, error = attempt(self.comm, lambda: self.check(found, way.fields))
        return (None, error) if error is not None else (found, None)

    @staticmethod
    def _beside(rows: list[ExchangeRow]) -> list[ExchangeRow]:
        """Put the baselines' times beside each figure: those of the same mode, else in a stream."""
        theirs = [row for row in rows if row.kind == BASELINE and row.us is not None]
        finished = []
        for row in rows:
            beside = {r.name: r.us for r in theirs if r.mode == STREAM and r.us is not None}
            beside |= {r.name: r.us for r in theirs if r.mode == row.mode and r.us is not None}
            finished.append(replace(row, beside=beside) if row.us is not None else row)
        return finished


class WrongResult(HaloxError):
    """A benchmark's result differs from what it should be."""


def device_of(asked: str, comm: Any) -> str:
    """Return "cpu" or "gpu", the same on all ranks; collective.

    Parameters
    ----------
    asked : {"auto", "cpu", "gpu"}

    Raises
    ------
    DeviceError
        On all ranks, if GPUs are asked for and any rank has none.
    """
    whys = comm.allgather(None if asked == "cpu" else why_no_gpu())
    why = next(filter(None, whys), None)
    if asked == "gpu" and why is not None:
        raise DeviceError(f"--device gpu: no GPU can be used: {why}")
    return "gpu" if asked != "cpu" and why is None else "cpu"
