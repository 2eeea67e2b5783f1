"""The allreduce benchmark: every algorithm, what halox selects, and what users write, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import halox
from halox.collectives.algorithms import DEVICE_ALGORITHMS, HOST_ALGORITHMS
from halox.errors import FieldError, HaloxError, PathError
from halox.runtime.world import load_mpi
from halox_bench.allreduce import baselines as by_users
from halox_bench.allreduce import rows as table
from halox_bench.allreduce.baselines import Reducing
from halox_bench.allreduce.cases import AllreduceCase, AllreduceOracle
from halox_bench.allreduce.rows import ALGORITHM, VALUE, AllreduceRow, paid
from halox_bench.common.attempt import attempt
from halox_bench.ranks.bench import RanksBench
from halox_bench.ranks.methods import Baseline, Method, Methods, WrongResult
from halox_bench.ranks.rows import SELECTED, beside

GRAPH_CALLS = 20
"""Allreduces in a captured graph."""

_CHECKS = 3


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


class AllreduceBench(RanksBench[AllreduceRow]):
    """Allreduces of the ranks of a communicator."""

    kind = "allreduce"
    choice = ALGORITHM

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
        return by_users.MPI if self.stage.device is None else by_users.HOST_STAGED

    def known(self) -> tuple[str, ...]:
        """Return the names of all algorithms for these arrays."""
        return DEVICE_ALGORITHMS if self.options.device == "gpu" else HOST_ALGORITHMS

    def heading(self) -> str:
        """Return what stands above the table."""
        return (
            f"{self.comm.size} ranks, {self.options.device} arrays; microseconds an allreduce, the slowest rank's\n"
            f"set-up: made and called once; pays after so many calls, against {self.baseline()}"
        )

    def line(self, row: AllreduceRow, selected_us: float | None) -> str:
        """Return a row's line."""
        return table.line(row, selected_us, self.baseline())

    def draw(self, found: Sequence[AllreduceRow], folder: Path) -> list[Path]:
        """Draw the figures and return the files."""
        from halox_bench.allreduce import plots

        return plots.draw(found, folder, self.baseline())


class Reductions(Methods[AllreduceRow]):
    """A case's arrays on the ranks, and every method to reduce them.

    Parameters
    ----------
    arrays : (array, array)
        Source and result.
    """

    bench: AllreduceBench
    named = ALGORITHM

    def __init__(self, bench: AllreduceBench, case: AllreduceCase, arrays: tuple[Any, Any]) -> None:
        super().__init__(bench, arrays, GRAPH_CALLS)
        self._case = case
        self._oracle = AllreduceOracle(case, self.comm.rank, self.comm.size, self.stage.xp)
        self._values: dict[str, Callable[[], Any]] = {}

    def measure(self) -> list[AllreduceRow]:
        """Make every method, measure it and close it; an error that not all ranks have leaves things as they are."""
        self.make()
        rows = self.rows()
        if self._case.elements == 1 and self.stage.device is not None:
            rows += self._read_by_host()
        self.close()
        return paid(rows)

    def blank(self, kind: str, name: str) -> AllreduceRow:
        """Return a method's row without a figure."""
        return blank(self._case, kind, name)

    def check(self, method: Method, call: Callable[[], Any]) -> None:
        """Reduce several times: see `Methods`."""
        source, target = method.arrays
        for step in range(1, _CHECKS + 1):
            self._oracle.fill(source, target, step)
            call()
            self.stage.synchronize()
            wrong = self._oracle.wrong(target, step)
            self.expect(wrong, f"values, in call {step} of {_CHECKS}")

    def baselines(self) -> Mapping[str, Callable[[], Baseline]]:
        """Return MPI for NumPy arrays; NCCL, staging through the host, and GPU-aware MPI for CuPy arrays."""
        what = self.comm, self._case, *self.arrays
        if self.stage.device is None:
            return {by_users.MPI: partial(by_users.HostMpi, *what)}

        def aware() -> Baseline:
            self.bench.need_gpu_aware()
            return by_users.GpuAware(*what)

        return {
            by_users.NCCL: lambda: by_users.ByNccl(self.bench.nccl(), *what),
            by_users.HOST_STAGED: partial(by_users.HostStaged, *what),
            by_users.GPU_AWARE: aware,
        }

    def by_hand(self, name: str, make: Callable[[], Baseline]) -> Method:
        """Make a baseline, and keep how the host reads its value."""
        method = super().by_hand(name, make)
        if isinstance(method.call, Reducing):
            self._values[name] = method.call.value
        return method

    def own(self, kind: str, name: str, chosen: str | None) -> Method:
        """Make halox's own twice, since much is made only once in a process."""
        first_us, made = self._timed_setup(chosen)
        made.close()
        setup_us, reduce = self._timed_setup(chosen)
        source, target = self.arrays

        def call() -> Any:
            return reduce(source, out=target)

        self._values[name] = lambda: call()[0].item()
        captures = self.stage.device is not None and reduce.captures
        details = {"path": reduce.algorithm, "first_setup_us": first_us, "setup_us": setup_us}
        return Method(kind, name, call, reduce.close, captures, self.arrays, details)

    def _timed_setup(self, algorithm: str | None) -> tuple[float, Any]:
        """Make halox's own and call it once; returns the slowest rank's microseconds, and what was made."""
        source, target = self.arrays
        self.stage.settle()
        self.comm.Barrier()
        begin = time.perf_counter()
        reduce = make_reduction(self.comm, self._case, algorithm, self.bench.options.device)
        reduce(source, out=target)
        self.stage.synchronize()
        us = self.comm.allreduce((time.perf_counter() - begin) * 1e6, load_mpi().MAX)
        return us, reduce

    def _read_by_host(self) -> list[AllreduceRow]:
        """Measure how long it takes until the host has a single value."""
        _, error = attempt(self.comm, self._check_values)
        if error is not None:
            row = replace(self.blank(SELECTED, SELECTED), mode=VALUE, failed=True)
            return [replace(row, error=f"{type(error).__name__}: {error}")]
        times = self.bench.clock.measure({one.name: self._values[one.name] for one in self.made})
        return beside([self.measured(one, VALUE, times[one.name]) for one in self.made])

    def _check_values(self) -> None:
        source, target = self.arrays
        for step, method in enumerate(self.made, 1):
            self._oracle.fill(source, target, step)
            given = self._values[method.name]()
            target[...] = given
            total = self.comm.allreduce(self._oracle.wrong(target, step))
            if total:
                raise WrongResult(f"wrong value on the host by {method.name}")


def blank(case: AllreduceCase, kind: str, name: str) -> AllreduceRow:
    """Return a case's row without a figure."""
    what = case.elements, case.nbytes, case.dtype, case.op
    return AllreduceRow(*what, case=case.name, kind=kind, name=name)


def not_measured(rows: list[AllreduceRow], name: str, mode: str) -> HaloxError:
    """Return an error that says why there is no figure."""
    said = [row.error for row in rows if row.name == name and row.mode == mode]
    return HaloxError(said[0] if said and said[0] else f"{name} was not measured in a {mode}")
