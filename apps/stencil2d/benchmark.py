"""The benchmark: timed passes of many steps, then verification.

A pass copies the initial values from the host to the fields, computes the steps, and copies the
result back. It reports two times: the time of the steps alone, and as in the original the time of
the whole pass. The original also allocates memory in every pass; here it is allocated once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

import halox

from ..common import Progress, Timer, shared_cores
from . import verification
from .operator import Stencil, Weights, weights
from .options import Settings
from .problem import Problem, computed

PRECISION_NAMES = {"f4": "single", "f8": "double"}

# Above this number of point updates the one-rank run takes minutes, so "auto" omits it.
_AUTO_ONE_RANK_UPDATES = 4e9


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one pass on the slowest rank."""

    steps_s: float
    with_copies_s: float


class Field:
    """The two fields of one precision on one rank, with their plans and stencil.

    Parameters
    ----------
    grid : halox.Grid
        Grid of the problem.
    problem : Problem
        Initial values and halo width.
    dtype : str
        ``"f4"`` or ``"f8"``.
    weights : Weights
        Weights of the operator.
    """

    def __init__(self, grid: halox.Grid, problem: Problem, dtype: str, weights: Weights) -> None:
        self.timer = Timer(grid.xp)
        self._grid = grid
        self._every = problem.halo
        self._fields = (grid.zeros(dtype), grid.zeros(dtype))
        self._plans = tuple(grid.plan(field) for field in self._fields)
        rows, cols = (
            computed(owned.start, owned.stop, points, stored, problem.halo)
            for owned, points, stored in zip(
                grid.owned, grid.grid_shape, grid.padded_shape, strict=True
            )
        )
        self._stencil = Stencil(self._fields[0], rows, cols, weights, grid.xp)
        self._start = np.zeros(grid.padded_shape, dtype)
        inside = slice(problem.halo, -problem.halo)
        self._start[inside, inside] = problem.initial(grid.owned)
        self._host = np.empty_like(self._start)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends to other ranks in one exchange."""
        return int(self._plans[0].bytes_sent)

    def exchanges(self, steps: int) -> int:
        """Return the number of exchanges that ``steps`` steps need."""
        return -(-steps // self._every)

    def result(self, steps: int) -> Any:
        """Return the field that holds the values after ``steps`` steps."""
        return self._fields[steps % 2]

    def run_pass(self, steps: int, exchanges: list[tuple[Any, Any]] | None = None) -> PassTimes:
        """Run one pass; collective. Appends the marks of `timer` before and after every exchange to ``exchanges``."""
        barrier = self._grid.comm.Barrier
        barrier()
        begin = time.perf_counter()
        self._copy_in()
        self._wait()
        barrier()  # the steps of a rank must not wait for the copies of other ranks
        steps_begin = time.perf_counter()
        old, new = self._fields
        exchange, exchange_next = self._plans
        for step in range(steps):
            if step % self._every == 0:
                if exchanges is None:
                    exchange()
                else:
                    mark = self.timer.mark()
                    exchange()
                    exchanges.append((mark, self.timer.mark()))
            self._stencil(old, new)
            old, new = new, old
            exchange, exchange_next = exchange_next, exchange
        self._wait()
        steps_end = time.perf_counter()
        self._copy_out(old)
        barrier()
        mine = (steps_end - steps_begin, time.perf_counter() - begin)
        everyone = self._grid.comm.allgather(mine)
        return PassTimes(*(max(times) for times in zip(*everyone, strict=True)))

    def _copy_in(self) -> None:
        if self._grid.device == "cpu":
            np.copyto(self._fields[0], self._start)
        else:
            self._fields[0].set(self._start)

    def _copy_out(self, field: Any) -> None:
        if self._grid.device == "cpu":
            np.copyto(self._host, field)
        else:
            field.get(out=self._host)

    def _wait(self) -> None:
        if self._grid.device != "cpu":
            self._grid.xp.cuda.get_current_stream().synchronize()


def run_benchmark(settings: Settings, comm: Any, progress: Progress) -> dict[str, Any] | None:
    """Run all passes in all precisions; returns the figures on rank 0 and None elsewhere."""
    problem = Problem.make(
        settings.tile, settings.proc_shape, settings.halo, strong=settings.strong
    )
    used = weights(exact=settings.exact_weights)
    _refuse_what_cannot_work(settings, problem, used)
    with halox.Grid(
        problem.grid_shape,
        halo=settings.halo,
        proc_shape=settings.proc_shape,
        blocks=problem.blocks,
        comm=comm,
        device=settings.device,
    ) as grid:
        rows = []
        checks = {}
        result = None
        for dtype in settings.dtypes:
            row, checked, result = _one_precision(grid, problem, settings, dtype, used, progress)
            rows.append(row)
            checks[row["precision"]] = checked
        ranks_at = dict(grid.comm.allgather((tuple(grid.proc_coords), grid.rank)))
        notes = shared_cores(grid.comm)
        if grid.rank != 0:
            return None
        figures = _figures(grid, problem, settings, used, notes) | {"rows": rows, "checks": checks}
        if result is not None:
            figures["picture"] = {
                "values": result.T,
                "what": f"SHOC Stencil2D after {settings.steps} steps",
                "where": f"{grid.size} rank(s), {figures['rows'][-1]['precision']} precision",
                "dims": ("column", "row"),
                "blocks": problem.blocks[::-1],
                "ranks": {coords[::-1]: rank for coords, rank in ranks_at.items()},
                "log": True,  # near the zero boundary values decrease over many decades
            }
        figures["verified"] = all(row["verified"] for row in rows)
        return figures


def _refuse_what_cannot_work(settings: Settings, problem: Problem, used: Weights) -> None:
    """Raise before the run, on all ranks, if the values would overflow."""
    largest = np.log10(max(problem.largest, 1.0)) + settings.steps * np.log10(used.total)
    for dtype in settings.dtypes:
        if largest > np.log10(float(np.finfo(dtype).max)):
            raise halox.errors.HaloxError(
                f"--num-iters {settings.steps}: values grow by {used.total:.2f} a step, to about "
                f"1e{largest:.0f}, more than {PRECISION_NAMES[dtype]} precision holds; use fewer "
                "steps" + (" or --precision double" if dtype == "f4" else "")
            )


def _one_precision(
    grid: halox.Grid,
    problem: Problem,
    settings: Settings,
    dtype: str,
    used: Weights,
    progress: Progress,
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Run one precision; return its row of the table, its checks and the field (on rank 0)."""
    name = PRECISION_NAMES[dtype]
    steps = settings.steps
    field = Field(grid, problem, dtype, used)
    total = settings.warmup_passes + settings.passes + 1
    times = []
    for number in range(total - 1):
        progress(f"{name} precision, pass", number + 1, total)
        times.append(field.run_pass(steps))
    times = times[settings.warmup_passes :]

    # An additional pass measures the share of the exchanges; its time is not reported.
    progress(f"{name} precision, pass", total, total)
    exchanges: list[tuple[Any, Any]] = []
    timed = field.run_pass(steps, exchanges)
    in_exchange = grid.comm.allgather(sum(field.timer.seconds(exchanges)))
    bytes_sent = sum(grid.comm.allgather(field.bytes_sent))

    gathered = grid.gather(field.result(steps))
    checks = {}
    if gathered is not None:
        progress(f"{name} precision, checking", total, total)
        checks = _checks(gathered, problem, settings, dtype, used)
    # Other ranks wait in this barrier for the checks, since waits inside halox have a time limit.
    grid.comm.Barrier()
    gflop = problem.flops_per_step * steps / 1e9
    steps_s = median(t.steps_s for t in times)
    with_copies_s = median(t.with_copies_s for t in times)
    row = {
        "precision": name,
        "time_s": steps_s,
        "gflops": gflop / steps_s,
        "shoc_time_s": with_copies_s,
        "shoc_gflops": gflop / with_copies_s,
        "bytes_exchanged": bytes_sent * field.exchanges(steps),
        "exchange_share": sum(in_exchange) / len(in_exchange) / timed.steps_s,
        "verified": checks.pop("verified", False),
    }
    return row, checks, gathered


def _checks(
    got: np.ndarray, problem: Problem, settings: Settings, dtype: str, used: Weights
) -> dict[str, Any]:
    """Compare the gathered field with known solutions; None for a check not requested."""
    start = problem.initial()
    steps = settings.steps
    # The kernel rounds its weights to single precision in any case.
    applied = weights(exact=False) if dtype == "f4" else used
    kind = settings.check
    error = one_rank = reference = None
    passed = []
    if kind in ("auto", "sine", "all"):
        error = verification.relative_error(got, verification.solution(start, steps, applied))
        passed.append(error <= verification.tolerance(dtype, steps))
        if dtype == "f8" and settings.exact_weights and settings.halo == 1 and problem.is_original:
            reference = verification.matches_reference(got, steps)
            passed.append(reference is not False)
    cheap = start.size * steps <= _AUTO_ONE_RANK_UPDATES
    if kind in ("one-rank", "all") or (kind == "auto" and cheap):
        expected = verification.one_rank_run(start, steps, used, dtype)
        one_rank = bool(np.array_equal(got, expected))
        passed.append(one_rank)
    return {
        "sine_error": error,
        "equals_one_rank": one_rank,
        "reference_numbers": reference,
        "verified": bool(passed) and all(passed),
    }


def _figures(
    grid: halox.Grid, problem: Problem, settings: Settings, used: Weights, notes: list[str]
) -> dict[str, Any]:
    return {
        "app": "stencil2d",
        "ranks": grid.size,
        "process_grid": list(grid.proc_shape),
        "device": grid.device,
        "scaling": "strong" if settings.strong else "weak",
        "tile" if not settings.strong else "plane": list(settings.tile),
        "points": list(problem.grid_shape),
        "steps_a_pass": settings.steps,
        "passes": settings.passes,
        "halo": settings.halo,
        "weights": [used.centre, used.cardinal, used.diagonal],
        "reading_the_table": [
            "time: median over passes of the slowest rank's steps, fields on the " + grid.device,
            "shoc: the same with the field's copies from and to the host, as SHOC times it",
            "gflops: 11 operations a point, by SHOC's rule; bytes: sent between ranks in one pass",
            "exchange share: of the time, mean over ranks, with the wait for slower ranks",
            *notes,
        ],
    }
