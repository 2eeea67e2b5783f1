"""Several methods for one case on all ranks: each made and checked, all timed in turns, in streams and in graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np

from halox.errors import HaloxError, MissingPackageError, PathError
from halox_bench.common.attempt import attempt
from halox_bench.common.rows import BASELINE, GRAPH, SELECTED, STREAM, Row, beside
from halox_bench.ranks.bench import RanksBench

NOT_POSSIBLE = (PathError, MissingPackageError)
"""Errors of methods that this machine or case does not allow; these are not failures."""


class WrongResult(HaloxError):
    """A benchmark's result differs from the expected one."""


class Baseline(ABC):
    """A hand-written counterpart of a halox operation on the same arrays.

    Attributes
    ----------
    capturable : bool
        Whether to try to capture it in a CUDA graph.
    """

    name = ""
    capturable = False

    @abstractmethod
    def __call__(self) -> None:
        """Run once; collective."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release its resources; collective."""


@dataclass
class Method:
    """One method, made and checked.

    Attributes
    ----------
    kind, name : str
        The same as in `Row`.
    call : callable
        Runs it once.
    close : callable
        Releases its resources; collective.
    capturable : bool
        Whether to try to capture it in a CUDA graph.
    arrays : sequence of array
        Arrays that it reads and writes.
    found : dict
        Further attributes of its rows.
    """

    kind: str
    name: str
    call: Callable[[], Any]
    close: Callable[[], None]
    capturable: bool
    arrays: Any
    found: dict[str, Any] = field(default_factory=dict)


class Prepared(ABC):
    """A case on the ranks: its arrays and every method with a right result, while the context is entered.

    Attributes
    ----------
    own_arrays, arrays : sequence of array
        Arrays of halox, and of hand-written baselines.
    made : list of Method
    refused : list of Row
        Rows of methods that are impossible, or wrong.
    details : dict
        Further details of all rows.

    Notes
    -----
    All methods are collective.
    """

    graph_calls = 20
    """Calls in a captured graph."""

    own_arrays: Any
    arrays: Any

    def __init__(self, bench: RanksBench, case: Any) -> None:
        self.bench, self.case = bench, case
        self.comm, self.stage = bench.comm, bench.stage
        self.made: list[Method] = []
        self.refused: list[Row] = []
        self.details: dict[str, Any] = {}
        self._order: list[str] = []

    def __enter__(self) -> Self:
        """Make arrays and methods."""
        with ExitStack() as stack:
            self.enter(stack)
            stack.push(self._leave)
            stack.enter_context(self.stage.current())
            self.stage.settle()
            self.make()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """Release everything, unless an exception propagates: other ranks may not take part then."""
        self._stack.__exit__(*error)

    def _leave(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        self.own_arrays = self.arrays = None

    @abstractmethod
    def enter(self, stack: ExitStack) -> None:
        """Make the arrays and the oracle; resources go to the stack."""

    def arrays_of_users(self) -> list[Any]:
        """Return arrays for baselines: NumPy's own, not halox's shared memory, which slows MPI down."""
        if self.stage.device is not None:
            return list(self.own_arrays)
        return [np.empty(array.shape, array.dtype) for array in self.own_arrays]

    @abstractmethod
    def own(self, kind: str, name: str, chosen: str | None) -> Method:
        """Make halox's method by a path or an algorithm, or by its own choice."""

    @abstractmethod
    def baselines(self) -> Mapping[str, Callable[[], Baseline]]:
        """Return the factory of each baseline, by name; it raises `PathError` if the baseline is impossible here."""

    @abstractmethod
    def check(self, method: Method, call: Callable[[], Any]) -> None:
        """Call several times with different values and compare all results.

        Parameters
        ----------
        call : callable
            The method's own, or the replay of its graph.

        Raises
        ------
        WrongResult
            On all ranks, if any value is wrong on any rank.
        """

    def expect(self, wrong: int, what: str) -> None:
        """Raise `WrongResult` on all ranks if any rank counts wrong values."""
        self.stage.synchronize()
        total = self.comm.allreduce(wrong)
        if total:
            raise WrongResult(f"wrong result: {total} {what}")

    def blank(self, kind: str, name: str) -> Row:
        """Return a method's row without a time."""
        return self.bench.blank(self.case, kind, name, **self.details)

    def make(self) -> None:
        """Make and check halox's own choice, all named methods, and the baselines."""
        self.add(SELECTED, SELECTED, partial(self.own, SELECTED, SELECTED, None))
        named = self.bench.choice
        for name in self.bench.names():
            self.add(named, name, partial(self.own, named, name, name))
        wanted = self.bench.options.baselines
        for name, make in self.baselines().items():
            if wanted is None or name in wanted:
                self.add(BASELINE, name, partial(self.by_hand, name, make))

    def by_hand(self, name: str, make: Callable[[], Baseline]) -> Method:
        """Make a baseline."""
        made = make()
        return Method(BASELINE, name, made, made.close, made.capturable, self.arrays)

    def add(self, kind: str, name: str, make: Callable[[], Method]) -> None:
        """Make and check a method, or keep a row with the reason of its absence."""
        self._order.append(name)
        method, error = attempt(self.comm, make)
        if method is not None:
            if "path" in method.found:
                method.found["path"] = self._agreed(method.found["path"])
            _, error = attempt(self.comm, partial(self.check, method, method.call))
            if error is None:
                self.made.append(method)
                return
            attempt(self.comm, method.close)
        self.refused.append(self._refused(kind, name, error or HaloxError("nothing was made")))

    def _agreed(self, taken: str) -> str:
        """Return the paths of all ranks, which may take different paths to their neighbours."""
        said = {path for found in self.comm.allgather(taken) for path in found.split(", ")}
        return ", ".join(sorted(filter(None, said)))

    def close(self) -> None:
        """Release all methods."""
        self.stage.settle()
        while self.made:
            self.made.pop().close()

    def rows(self) -> list[Row]:
        """Measure every method; return all rows, of refused methods too."""
        streamed = self.bench.clock.measure({method.name: method.call for method in self.made})
        found = [self.measured(method, STREAM, streamed[method.name]) for method in self.made]
        if self.stage.device is not None and self.bench.options.graph:
            found += self._in_graphs()
        found += self.refused
        found.sort(key=lambda row: (row.mode == GRAPH, self._order.index(row.name)))
        return beside(found)

    def measured(self, method: Method, mode: str, us: float) -> Row:
        """Return the row of a timed method."""
        row = self.blank(method.kind, method.name)
        return row.with_(**method.found, mode=mode, us=us, checked=True)

    def _refused(self, kind: str, name: str, error: Exception, mode: str = STREAM) -> Row:
        fine = isinstance(error, NOT_POSSIBLE)
        fine = fine or (mode == GRAPH and not isinstance(error, WrongResult))
        said = str(error) if fine else f"{type(error).__name__}: {error}"
        return self.blank(kind, name).with_(mode=mode, error=said, failed=not fine)

    def _in_graphs(self) -> list[Row]:
        found: list[Row] = []
        replays: dict[str, Callable[[], None]] = {}
        for method in self.made:
            if not method.capturable:
                continue
            replay, error = attempt(
                self.comm, partial(self.stage.captured, method.call, self.graph_calls)
            )
            if replay is not None:
                _, error = attempt(self.comm, partial(self.check, method, replay))
            if replay is None or error is not None:
                why = error or HaloxError("no graph")
                row = self._refused(method.kind, method.name, why, GRAPH)
                found.append(row.with_(**method.found))
                continue
            replays[method.name] = replay
        times = self.bench.clock.measure(replays)
        found += [
            self.measured(method, GRAPH, times[method.name] / self.graph_calls)
            for method in self.made
            if method.name in times
        ]
        return found


def paths_taken(rows: Iterable[Any], without: int | None = None) -> str:
    """Return the paths and protocols in rows of ``explain()``, except to one rank."""
    return ", ".join(sorted({f"{row.path}/{row.protocol}" for row in rows if row.peer != without}))
