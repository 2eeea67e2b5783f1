"""The MILC benchmark: D, an iteration and its exchanges in turns with a copy, on all ranks or on some."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from halox.errors import HaloxError
from halox.runtime.world import load_mpi
from halox_bench.common.attempt import attempt
from halox_bench.common.options import MIB
from halox_bench.common.rows import BASELINE, GRAPH, SELECTED, STREAM, Row, beside
from halox_bench.milc import baselines as by_users
from halox_bench.milc.cases import (
    CG_FLOPS,
    DSLASH_FLOPS,
    LATTICES,
    SCALINGS,
    STRONG,
    WEAK,
    MilcCase,
    scaled,
)
from halox_bench.milc.problem import REWOUND_AFTER, TOLERANCES, Problem
from halox_bench.ranks.bench import Options, RanksBench
from halox_bench.ranks.clock import RanksClock
from halox_bench.ranks.methods import WrongResult

COPY, DSLASH, EXCHANGE = "copy", "D", "exchange"
COPY_BYTES = {"gpu": 512 * MIB, "cpu": 64 * MIB}

_POLL_S = 1e-3

Calls = dict[str, Callable[[], Any]]


class MilcBench(RanksBench):
    """The operator and its solver on the ranks of a communicator.

    Parameters
    ----------
    scalings : sequence of str
        Tables on several ranks, out of `SCALINGS`; if empty, each case on all ranks only.
    usual : bool
        Whether to take only the usual lattices of the device.
    """

    def __init__(
        self,
        comm: Any,
        options: Options,
        scalings: Sequence[str] = SCALINGS,
        *,
        usual: bool = False,
    ) -> None:
        super().__init__(comm, options)
        self._scalings, self._usual = scalings, usual
        self._rows: list[Row] = []
        nbytes = COPY_BYTES[options.device]
        with self.stage.current():
            self._ends = [self.stage.xp.ones(nbytes // 8) for _ in range(2)]

    def suited(self, cases: Sequence[MilcCase]) -> list[MilcCase]:
        """Return the cases on one rank, on all, and on numbers of ranks between."""
        size = self.comm.size
        if self._usual:
            cases = [case for case in cases if case.lattice in LATTICES[self.options.device]]
        if size == 1 or not self._scalings:
            return [replace(case, ranks=size) for case in cases]
        return [one for case in cases for one in scaled(case, size, self._scalings)]

    def measure(self, case: MilcCase) -> list[Row]:
        """Measure one case; idle ranks wait without using their processors."""
        ranks = case.ranks or self.comm.size
        takes_part = self.comm.rank < ranks
        part = self.comm.Split(0 if takes_part else load_mpi().UNDEFINED)
        rows: list[Row] = []
        if takes_part:
            rows = self._on(part, case, ranks)
            part.Free()
        arrived = self.comm.Ibarrier()
        while not arrived.Test():
            time.sleep(_POLL_S)
        self.free()
        rows = self.comm.bcast(rows)
        if case.scaling:
            rows = [with_efficiency(self._rows + rows, row) for row in rows]
        if ranks == 1:
            self._rows += [row for row in rows if row.kind == SELECTED]
        return rows

    def heading(self) -> str:
        return (
            f"{self.comm.size} ranks, {self.options.device} arrays; microseconds of an iteration and of D, the slowest "
            "rank's\n/floor, share: beside the bytes of the kernels at the speed of a copy in the same run"
        )

    def _on(self, comm: Any, case: MilcCase, ranks: int) -> list[Row]:
        blank = self.blank(case, SELECTED, "halox", ranks=ranks)
        rows, error = attempt(comm, lambda: self._measured(comm, case, blank))
        if rows is None:
            failed = isinstance(error, WrongResult) or not isinstance(error, HaloxError)
            text = f"{'' if failed else 'left out: '}{error}"
            return [blank.with_(error=text, failed=failed)]
        return rows

    def _measured(self, comm: Any, case: MilcCase, blank: Row) -> list[Row]:
        stage = self.stage
        with stage.current(), Problem(case, comm, self.options.device) as problem:
            problem.check()
            calls: Calls = {
                COPY: self._copy,
                DSLASH: problem.dslash(),
                EXCHANGE: problem.exchanges(),
                STREAM: problem.iterations(problem.iteration),
            }
            calls |= self._captured(comm, problem)
            calls |= self._whole_arrays(comm, case, problem)
            stage.settle()
            times = RanksClock(comm, stage, self.options.timing).measure(calls)
            stage.settle()
            if not problem.gradient.is_running:
                raise WrongResult("the iterations that were measured have ended before")
            row = _filled(blank, case, problem, times)
        return beside([row, *self._baselines(blank, case, times)])

    def _copy(self) -> None:
        source, target = self._ends
        if self.stage.device is None:
            target[...] = source
            return
        runtime = self.stage.xp.cuda.runtime
        ends = int(target.data.ptr), int(source.data.ptr)
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(*ends, source.nbytes, kind, self.stage.stream.ptr)

    def _captured(self, comm: Any, problem: Problem) -> Calls:
        """Return an iteration as a graph, if all of its paths can be captured."""
        if self.stage.device is None or not self.options.graph:
            return {}
        problem.rewind()
        problem.iteration()
        replay, _ = attempt(comm, lambda: self.stage.captured(problem.iteration, 1))
        return {} if replay is None else {GRAPH: problem.iterations(replay)}

    def _whole_arrays(self, comm: Any, case: MilcCase, problem: Problem) -> Calls:
        """Return D and an iteration by hand, on one rank's CPU."""
        wanted = self.options.baselines is None and self.stage.device is None and comm.size == 1
        found: Calls = {}
        for name, piece in ((by_users.WHOLE, 0), (by_users.PIECES, by_users.PIECE)):
            if wanted:
                whole = by_users.WholeArrays(case, problem, piece)
                whole.multiply()
                _expect_same(case, problem, whole.result)
                found[f"{DSLASH}, {name}"] = whole.multiply
                found[name] = partial(whole.iteration, REWOUND_AFTER)
        return found

    def _baselines(self, blank: Row, case: MilcCase, times: dict[str, float]) -> list[Row]:
        found = []
        for name in (by_users.WHOLE, by_users.PIECES):
            if name in times:
                row = blank.with_(kind=BASELINE, name=name, checked=True)
                found.append(_rated(row, case, times[name], times[f"{DSLASH}, {name}"]))
        return found


def with_efficiency(found: Iterable[Row], row: Row) -> Row:
    """Return a row with its rate per rank over the rate of one rank alone, among the rows found.

    Examples
    --------
    >>> case = {"operator": "naive", "precision": "double", "ranks": 1}
    >>> one = Row("", SELECTED, "", us=8.0, details=case)
    >>> four = one.with_(ranks=4, us=4.0)
    >>> [with_efficiency([one], four.with_(scaling=kind)).efficiency for kind in ("strong", "weak")]
    [0.5, 2.0]
    """
    alone = [
        one
        for one in found
        if one.us
        and one.kind == SELECTED
        and one.ranks == 1
        and (one.operator, one.precision) == (row.operator, row.precision)
    ]
    if not alone or row.us is None or row.kind != SELECTED:
        return row
    parts = {STRONG: row.ranks, WEAK: 1}.get(row.scaling, 1)
    return row.with_(efficiency=(alone[-1].us or 0.0) / (parts * row.us))


def _expect_same(case: MilcCase, problem: Problem, found: Any) -> None:
    expected = problem.operator.dslash(problem.source, 1).reshape(found.shape)
    far = abs(found - expected).max() / abs(expected).max()
    if not far <= TOLERANCES[case.precision]:
        raise WrongResult(f"D of whole NumPy arrays differs by {far:.2g}")


def _rated(row: Row, case: MilcCase, us: float, dslash_us: float) -> Row:
    return row.with_(
        us=us,
        dslash_us=dslash_us,
        # D's result is on half of the sites.
        dslash_gflops=DSLASH_FLOPS[case.operator] * case.volume / 2 / dslash_us / 1e3,
        cg_gflops=CG_FLOPS[case.operator] * case.volume / us / 1e3,
    )


def _filled(blank: Row, case: MilcCase, problem: Problem, times: dict[str, float]) -> Row:
    nbytes = COPY_BYTES[problem.lattice.grid.device]
    speed = 2 * nbytes / times[COPY]
    mode = GRAPH if GRAPH in times else STREAM
    us, dslash_us = times[mode], times[DSLASH]
    # The slowest rank counts, and the largest block.
    of_dslash, of_iteration = problem.lattice.grid.comm.allreduce(
        problem.floor_bytes(), load_mpi().MAX
    )
    row = blank.with_(mode=mode, checked=True)
    return _rated(row, case, us, dslash_us).with_(
        process_grid=problem.lattice.grid.proc_shape,
        stream_us=times[STREAM],
        exchange_us=times[EXCHANGE],
        copy_bytes_per_us=speed,
        share=of_dslash / speed / dslash_us,
        over_floor=us * speed / of_iteration,
        exchange_share=times[EXCHANGE] / us,
    )
