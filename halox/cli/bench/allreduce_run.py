"""Runs the allreduce benchmark: every algorithm, what halox selects, and what users write, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import halox
from halox.cli.bench import allreduce_rivals as rivals
from halox.cli.bench.allreduce_cases import AllreduceCase, AllreduceOracle
from halox.cli.bench.allreduce_rows import ALGORITHM, VALUE, AllreduceRow, paid
from halox.cli.bench.ranks_bench import RanksBench
from halox.cli.bench.ranks_clock import Timing, attempt
from halox.cli.bench.ranks_ways import BASELINE, SELECTED, Way, Ways, WrongResult, beside
from halox.collectives.algorithms import DEVICE_ALGORITHMS, HOST_ALGORITHMS
from halox.errors import FieldError, HaloxError, PathError
from halox.runtime.world import load_mpi

GRAPH_CALLS = 20
"""Allreduces in a captured graph."""

_CHECKS = 3


@dataclass(frozen=True)
class AllreduceOptions:
    """What to measure.

    Attributes
    ----------
    device : {"cpu", "gpu"}
    algorithms : tuple of str or None
        Those to be named one by one; None means all.
    baselines : tuple of str or None
        Names of what users write; None means all.
    graph : bool
        Whether also to capture allreduces in CUDA graphs.
    timing : Timing
    no_gpu_aware : str
        Why MPI is not to be given device memory; empty if it may be.
    """

    device: str
    algorithms: tuple[str, ...] | None = None
    baselines: tuple[str, ...] | None = None
    graph: bool = True
    timing: Timing = field(default_factory=Timing)
    no_gpu_aware: str = "it is not known whether this MPI takes device memory"


def known_algorithms(device: str) -> tuple[str, ...]:
    """Return the names of all algorithms for arrays on a device."""
    return DEVICE_ALGORITHMS if device == "gpu" else HOST_ALGORITHMS


def make_reduction(comm: Any, case: AllreduceCase, algorithm: str | None, device: Any) -> Any:
    """Make halox's allreduce; collective.

    Raises
    ------
    PathError
        If there is none by this algorithm; says why.
    """
    try:
        return halox.Allreduce(comm, case.elements, case.dtype, case.op, algorithm, device=device)
    except FieldError as error:
        raise PathError(str(error)) from error


class AllreduceBench(RanksBench):
    """The ranks of a communicator with what all cases share.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    options : AllreduceOptions

    Notes
    -----
    Everything here is collective.
    """

    def __init__(self, comm: Any, options: AllreduceOptions) -> None:
        super().__init__(comm, options.device, options.timing)
        self.options = options

    def measure(self, case: AllreduceCase) -> list[AllreduceRow]:
        """Measure one case."""
        arrays, error = attempt(self.comm, lambda: self._arrays(case))
        if arrays is None:
            row = blank(case, SELECTED, SELECTED)
            return [replace(row, error=f"left out: no memory for it ({error})")]
        with self.stage.current():
            self.stage.settle()
            reductions = Reductions(self, case, arrays)
            rows = reductions.measure()
        del arrays, reductions
        self.free()
        return rows

    def _arrays(self, case: AllreduceCase) -> tuple[Any, Any]:
        xp = self.stage.xp
        return xp.zeros(case.elements, case.dtype), xp.zeros(case.elements, case.dtype)

    def baseline(self) -> str:
        """Name of the baseline that the set-up is held against."""
        return rivals.MPI if self.stage.device is None else rivals.HOST_STAGED

    def baselines(self) -> tuple[str, ...]:
        """Names of what users write, for these arrays."""
        if self.options.baselines is not None:
            return self.options.baselines
        if self.stage.device is None:
            return (rivals.MPI,)
        return rivals.NCCL, rivals.HOST_STAGED, rivals.GPU_AWARE

    def rival(self, name: str, case: AllreduceCase, arrays: tuple[Any, Any]) -> rivals.Reducing:
        """Make what users write by hand.

        Raises
        ------
        PathError
            If it cannot be had here.
        """
        if name == rivals.NCCL:
            return rivals.WithNccl(self.nccl(), self.comm, case, *arrays)
        if name == rivals.GPU_AWARE and self.options.no_gpu_aware:
            raise PathError(self.options.no_gpu_aware)
        made: dict[str, type[rivals.Reducing]] = {
            rivals.MPI: rivals.HostMpi,
            rivals.HOST_STAGED: rivals.HostStaged,
            rivals.GPU_AWARE: rivals.GpuAware,
        }
        return made[name](self.comm, case, *arrays)


class Reductions(Ways[AllreduceRow]):
    """A case's arrays on the ranks, and every way to reduce them.

    Parameters
    ----------
    bench : AllreduceBench
    case : AllreduceCase
    arrays : (array, array)
        What is reduced, and where the result is to be.
    """

    bench: AllreduceBench

    def __init__(self, bench: AllreduceBench, case: AllreduceCase, arrays: tuple[Any, Any]) -> None:
        super().__init__(bench, GRAPH_CALLS if bench.options.graph else 0)
        self._case, self._arrays = case, arrays
        self._oracle = AllreduceOracle(case, self.comm.rank, self.comm.size, self.stage.xp)
        self._values: dict[str, Callable[[], Any]] = {}

    def measure(self) -> list[AllreduceRow]:
        """Make every way, measure it and close it; an error that not all ranks have leaves things as they are."""
        for kind, name, make in self._makers():
            self.add(kind, name, make)
        rows = self.rows()
        if self._case.elements == 1 and self.stage.device is not None:
            rows += self._read_by_host()
        self.close()
        return paid(rows)

    def blank(self, kind: str, name: str) -> AllreduceRow:
        """Return a way's row without a figure."""
        return blank(self._case, kind, name)

    def check(self, call: Callable[[], Any], arrays: Any) -> None:
        """Reduce several times: see `Ways`."""
        source, target = arrays
        for step in range(1, _CHECKS + 1):
            self._oracle.fill(source, target, step)
            call()
            self.stage.synchronize()
            total = self.comm.allreduce(self._oracle.wrong(target, step))
            if total:
                raise WrongResult(f"wrong result: {total} values, in call {step} of {_CHECKS}")

    def _makers(self) -> Iterator[tuple[str, str, Callable[[], Way]]]:
        """Yield kind, name, and what makes it on all ranks together."""
        options = self.bench.options
        names = options.algorithms
        yield SELECTED, SELECTED, lambda: self._persistent(SELECTED, SELECTED, None)
        for name in known_algorithms(options.device) if names is None else names:
            yield ALGORITHM, name, lambda name=name: self._persistent(ALGORITHM, name, name)  # type: ignore[misc]
        for name in self.bench.baselines():
            yield BASELINE, name, lambda name=name: self._by_hand(name)  # type: ignore[misc]

    def _persistent(self, kind: str, name: str, algorithm: str | None) -> Way:
        """Make halox's own twice, since much is made only once in a process."""
        first_us = self._timed_setup(algorithm, keep=False)[0]
        setup_us, reduce = self._timed_setup(algorithm, keep=True)
        source, target = self._arrays

        def call() -> Any:
            return reduce(source, out=target)

        self._values[name] = lambda: call()[0].item()
        captures = self.stage.device is not None and reduce.captures
        details = {
            "algorithm": reduce.algorithm,
            "first_setup_us": first_us,
            "setup_us": setup_us,
        }
        return Way(kind, name, call, reduce.close, captures, self._arrays, details)

    def _timed_setup(self, algorithm: str | None, *, keep: bool) -> tuple[float, Any]:
        """Make halox's own and call it once; returns the slowest rank's microseconds, and what was made."""
        self.stage.settle()
        self.comm.Barrier()
        begin = time.perf_counter()
        reduce = make_reduction(self.comm, self._case, algorithm, self.bench.options.device)
        reduce(self._arrays[0], out=self._arrays[1])
        self.stage.synchronize()
        us = self.comm.allreduce((time.perf_counter() - begin) * 1e6, load_mpi().MAX)
        if not keep:
            reduce.close()
        return us, reduce

    def _by_hand(self, name: str) -> Way:
        rival = self.bench.rival(name, self._case, self._arrays)
        self._values[name] = rival.value
        return Way(BASELINE, name, rival, rival.close, rival.capturable, self._arrays)

    def _read_by_host(self) -> list[AllreduceRow]:
        """Measure how long it takes until the host has a single value."""
        _, error = attempt(self.comm, self._check_values)
        if error is not None:
            row = replace(self.blank(SELECTED, SELECTED), mode=VALUE, failed=True)
            return [replace(row, error=f"{type(error).__name__}: {error}")]
        times = self.bench.clock.measure({way.name: self._values[way.name] for way in self.ways})
        return beside([self.measured(way, VALUE, times[way.name]) for way in self.ways])

    def _check_values(self) -> None:
        source, target = self._arrays
        for step, way in enumerate(self.ways, 1):
            self._oracle.fill(source, target, step)
            given = self._values[way.name]()
            target[...] = given
            total = self.comm.allreduce(self._oracle.wrong(target, step))
            if total:
                raise WrongResult(f"wrong value on the host by {way.name}")


def blank(case: AllreduceCase, kind: str, name: str) -> AllreduceRow:
    """Return a case's row without a figure."""
    return AllreduceRow(case.name, case.elements, case.nbytes, case.dtype, case.op, kind, name)


def not_measured(rows: list[AllreduceRow], name: str, mode: str) -> HaloxError:
    """Return an error that says why there is no figure."""
    said = [row.error for row in rows if row.name == name and row.mode == mode]
    return HaloxError(said[0] if said and said[0] else f"{name} was not measured in a {mode}")
