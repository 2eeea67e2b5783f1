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
from halox.cli.bench.exchange_rows import PATH, ExchangeRow
from halox.cli.bench.ranks_bench import RanksBench
from halox.cli.bench.ranks_clock import Timing
from halox.cli.bench.ranks_ways import BASELINE, SELECTED, Way, Ways, WrongResult
from halox.errors import PathError
from halox.grid import Grid
from halox.runtime.world import load_mpi

PATHS = {"cpu": ("host",), "gpu": ("peer", "ipc", "staged", "cuda_aware")}
"""Paths that may carry messages to other ranks, by the arrays' memory."""

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


class Bench(RanksBench):
    """The ranks of a communicator with what all cases share.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    options : ExchangeOptions

    Notes
    -----
    Everything here is collective.
    """

    def __init__(self, comm: Any, options: ExchangeOptions) -> None:
        super().__init__(comm, options.device, options.timing)
        self.options = options

    def run(self, cases: Iterable[ExchangeCase]) -> Iterator[list[ExchangeRow]]:
        """Measure cases; yields the rows of each as they are there, the same on all ranks."""
        for case in cases:
            yield self.measure(case)
            self.free()

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

    def baselines(self) -> tuple[str, ...]:
        """Names of what users write, for these arrays."""
        if self.options.baselines is not None:
            return self.options.baselines
        if self.stage.device is None:
            return MPI_TYPES, MPI_NEIGHBOUR
        from halox.cli.bench import exchange_rivals_gpu as gpu

        return gpu.NCCL, gpu.ZERO_COPY, gpu.GPU_AWARE


class Prepared(Ways[ExchangeRow]):
    """A case on the ranks: its grid and fields, and every way that gave the right result.

    Parameters
    ----------
    bench : Bench
    case : ExchangeCase
    """

    bench: Bench

    def __init__(self, bench: Bench, case: ExchangeCase) -> None:
        super().__init__(bench, GRAPH_EXCHANGES if bench.options.graph else 0)
        self.case = case
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
                self.add(kind, name, make)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """Give everything back, unless an error is on its way: other ranks may not come along then."""
        self._stack.__exit__(*error)

    def _leave(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
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
        path = {"path": ", ".join(sorted(taken))}
        return Way(kind, name, plan, plan.close, True, self.fields, path)

    def _by_hand(self, name: str) -> Way:
        fields = self._private()
        rival = self.bench.rival(name, self._near, fields)
        return Way(BASELINE, name, rival, rival.close, rival.capturable, fields)

    def _private(self) -> list[Any]:
        """Return the arrays that users would have: NumPy's own, not halox's shared memory, which slows MPI down."""
        if self.stage.device is not None:
            return self.fields
        if not self._own:
            self._own = [np.empty(field.shape, field.dtype) for field in self.fields]
        return self._own

    def settle_details(self, way: Way) -> None:
        """Say all paths of a way: ranks may take different ones to their neighbours."""
        said = self.comm.allgather(way.details.get("path", ""))
        taken = {path for found in said for path in found.split(", ")}
        way.details["path"] = ", ".join(sorted(filter(None, taken)))

    def blank(self, kind: str, name: str) -> ExchangeRow:
        """Return a way's row without a figure."""
        return self.bench._row(self.case, self._near.bytes_sent, kind, name)

    def check(self, call: Callable[[], Any], arrays: Any) -> None:
        """Exchange several times: see `Ways`."""
        for step in range(1, _CHECKS + 1):
            self._oracle.fill(arrays, step)
            call()
            wrong = self._oracle.wrong(arrays, step)
            self.stage.synchronize()
            total = self.comm.allreduce(wrong)
            if total:
                raise WrongResult(f"wrong result: {total} values, in exchange {step} of {_CHECKS}")
