"""The allreduce benchmark: every algorithm, halox's own choice, and hand-written allreduces, in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import halox
from halox.collectives.algorithms import DEVICE_ALGORITHMS, HOST_ALGORITHMS
from halox.errors import FieldError, HaloxError, PathError
from halox.runtime.world import load_mpi
from halox_bench.allreduce import baselines as by_users
from halox_bench.allreduce.baselines import Reducing
from halox_bench.allreduce.cases import AllreduceCase, AllreduceOracle
from halox_bench.common.attempt import attempt
from halox_bench.common.rows import SELECTED, Row, beside
from halox_bench.ranks.bench import Options, RanksBench
from halox_bench.ranks.methods import Baseline, Method, Prepared, WrongResult

ALGORITHM = "algorithm"

VALUE = "value"
"""Mode: a single value; each call ends when the host has read the result."""

_CHECKS = 3


def make_reduction(comm: Any, case: AllreduceCase, algorithm: str | None, device: Any) -> Any:
    """Make halox's allreduce; collective; `PathError` with the reason if the algorithm is impossible."""
    try:
        return halox.Allreduce(comm, case.elements, case.dtype, case.op, algorithm, device=device)
    except FieldError as error:
        raise PathError(str(error)) from error


def calls_to_pay(setup_us: float, us: float, baseline_us: float) -> int | None:
    """Return the number of calls that amortise a set-up, None if a call is not faster than the baseline's.

    Examples
    --------
    >>> calls_to_pay(100.0, 5.0, 10.0), calls_to_pay(1.0, 5.0, 100.0), calls_to_pay(100.0, 5.0, 5.0)
    (20, 1, None)
    """
    if us >= baseline_us:
        return None
    return max(1, math.ceil(setup_us / (baseline_us - us)))


def paid(found: Iterable[Row]) -> list[Row]:
    """Add to rows with a set-up the number of calls that amortise it, for each baseline (Faraji 2014, figure 3)."""
    rows = []
    for row in found:
        setup_us = row.details.get("setup_us")
        calls = {}
        if setup_us is not None and row.us is not None:
            calls = {name: calls_to_pay(setup_us, row.us, us) for name, us in row.beside.items()}
        rows.append(row.with_(pays_after=calls))
    return rows


class AllreduceBench(RanksBench):
    """Allreduces of the ranks of a communicator.

    Raises
    ------
    HaloxError
        If an algorithm is named that these arrays do not have.
    """

    choice = ALGORITHM

    def __init__(self, comm: Any, options: Options) -> None:
        super().__init__(comm, options)
        unknown = [name for name in self.names() if name not in self.known()]
        if unknown:
            allowed = ", ".join(self.known())
            raise HaloxError(f"--algorithms {unknown[0]}: on a {options.device} expected {allowed}")

    def known(self) -> tuple[str, ...]:
        """Return the names of all algorithms for these arrays."""
        return DEVICE_ALGORITHMS if self.options.device == "gpu" else HOST_ALGORITHMS

    def measure(self, case: AllreduceCase) -> list[Row]:
        arrays, error = attempt(self.comm, lambda: self._arrays(case))
        if arrays is None:
            return self.left_out(case, f"no memory for it ({error})")
        with Reductions(self, case, arrays) as reductions:
            rows = reductions.rows()
        del arrays, reductions
        self.free()
        return rows

    def _arrays(self, case: AllreduceCase) -> tuple[Any, Any]:
        xp = self.stage.xp
        return xp.zeros(case.elements, case.dtype), xp.zeros(case.elements, case.dtype)

    def heading(self) -> str:
        return (
            f"{self.comm.size} ranks, {self.options.device} arrays; microseconds an allreduce, the slowest rank's\n"
            "set-up: made and called once; pays after so many calls, against MPI, on a GPU staged through the host"
        )


class Reductions(Prepared):
    """A case's source and result on the ranks, and every method to reduce them."""

    case: AllreduceCase

    def __init__(self, bench: AllreduceBench, case: AllreduceCase, arrays: tuple[Any, Any]) -> None:
        super().__init__(bench, case)
        self.own_arrays = self.arrays = arrays
        self._values: dict[str, Callable[[], Any]] = {}

    def enter(self, stack: ExitStack) -> None:
        """Make the oracle."""
        self._oracle = AllreduceOracle(self.case, self.comm.rank, self.comm.size, self.stage.xp)

    def rows(self) -> list[Row]:
        """Measure every method, and of single values also the time until the host has them."""
        rows = super().rows()
        if self.case.elements == 1 and self.stage.device is not None:
            rows += self._read_by_host()
        return paid(rows)

    def check(self, method: Method, call: Callable[[], Any]) -> None:
        source, target = method.arrays
        for step in range(1, _CHECKS + 1):
            self._oracle.fill(source, target, step)
            call()
            self.stage.synchronize()
            wrong = self._oracle.wrong(target, step)
            self.expect(wrong, f"values, in call {step} of {_CHECKS}")

    def baselines(self) -> Mapping[str, Callable[[], Baseline]]:
        """Return MPI for NumPy arrays; NCCL, staging through the host, and GPU-aware MPI for CuPy arrays."""
        what = self.comm, self.case, *self.arrays
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
        """Make a baseline, and keep the call that returns its value."""
        method = super().by_hand(name, make)
        if isinstance(method.call, Reducing):
            self._values[name] = method.call.value
        return method

    def own(self, kind: str, name: str, chosen: str | None) -> Method:
        """Make halox's own twice: a process compiles and maps only once."""
        first_us, made = self._timed_setup(chosen)
        made.close()
        setup_us, reduce = self._timed_setup(chosen)
        source, target = self.arrays

        def call() -> Any:
            return reduce(source, out=target)

        self._values[name] = lambda: call()[0].item()
        captures = self.stage.device is not None and reduce.captures
        found = {"path": reduce.algorithm, "first_setup_us": first_us, "setup_us": setup_us}
        return Method(kind, name, call, reduce.close, captures, self.arrays, found)

    def _timed_setup(self, algorithm: str | None) -> tuple[float, Any]:
        """Make halox's allreduce and call it once; return the slowest rank's microseconds, and the allreduce."""
        source, target = self.arrays
        self.stage.settle()
        self.comm.Barrier()
        begin = time.perf_counter()
        reduce = make_reduction(self.comm, self.case, algorithm, self.bench.options.device)
        reduce(source, out=target)
        self.stage.synchronize()
        us = self.comm.allreduce((time.perf_counter() - begin) * 1e6, load_mpi().MAX)
        return us, reduce

    def _read_by_host(self) -> list[Row]:
        """Measure the time until the host has a single value."""
        _, error = attempt(self.comm, self._check_values)
        if error is not None:
            said = f"{type(error).__name__}: {error}"
            return [self.blank(SELECTED, SELECTED).with_(mode=VALUE, failed=True, error=said)]
        times = self.bench.clock.measure({one.name: self._values[one.name] for one in self.made})
        return beside(self.measured(one, VALUE, times[one.name]) for one in self.made)

    def _check_values(self) -> None:
        source, target = self.arrays
        for step, method in enumerate(self.made, 1):
            self._oracle.fill(source, target, step)
            given = self._values[method.name]()
            target[...] = given
            total = self.comm.allreduce(self._oracle.wrong(target, step))
            if total:
                raise WrongResult(f"wrong value on the host by {method.name}")
