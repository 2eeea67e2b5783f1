"""Several methods to do one thing on all ranks: each made and checked, all timed in turns, in streams and in graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from halox.errors import HaloxError, MissingPackageError, PathError
from halox_bench.common.attempt import attempt
from halox_bench.ranks.bench import RanksBench
from halox_bench.ranks.rows import BASELINE, GRAPH, PATH, SELECTED, STREAM, MethodRow, beside

NOT_POSSIBLE = (PathError, MissingPackageError)
"""Errors of methods that are impossible here, which is no failure."""

Row = TypeVar("Row", bound=MethodRow)


class WrongResult(HaloxError):
    """A benchmark's result differs from what it should be."""


class Baseline(ABC):
    """A hand-written counterpart of what halox does with the same arrays.

    Attributes
    ----------
    capturable : bool
        Whether it may be tried to capture it in a CUDA graph.
    """

    name = ""
    capturable = False

    @abstractmethod
    def __call__(self) -> None:
        """Do it once; all ranks call."""

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release its resources; collective."""


@dataclass
class Method:
    """One method, made and checked.

    Attributes
    ----------
    kind, name : str
        The same as in `MethodRow`.
    call : callable
        Does it once.
    close : callable
        Releases its resources; collective.
    capturable : bool
        Whether it may be tried to capture it in a CUDA graph.
    arrays : sequence of array
        What it works on.
    details : dict
        Further attributes of its rows.
    """

    kind: str
    name: str
    call: Callable[[], Any]
    close: Callable[[], None]
    capturable: bool
    arrays: Any
    details: dict[str, Any] = field(default_factory=dict)


class Methods(ABC, Generic[Row]):
    """The methods for one case that gave the right result.

    Parameters
    ----------
    arrays : sequence of array
        What baselines work on.
    graph_calls : int
        Calls in a captured graph.

    Attributes
    ----------
    refused : list of MethodRow
        Rows of those that are impossible, or wrong.

    Notes
    -----
    All methods are collective.
    """

    named: ClassVar[str] = PATH
    """Kind of what is named one by one."""

    def __init__(self, bench: RanksBench[Any], arrays: Any, graph_calls: int) -> None:
        self.bench, self.arrays = bench, arrays
        self.comm, self.stage = bench.comm, bench.stage
        self.made: list[Method] = []
        self.refused: list[Row] = []
        self._order: list[str] = []
        self._graph_calls = graph_calls

    @abstractmethod
    def blank(self, kind: str, name: str) -> Row:
        """Return a method's row without a figure."""

    @abstractmethod
    def own(self, kind: str, name: str, chosen: str | None) -> Method:
        """Make halox's own by the path or the algorithm chosen, or by what it selects."""

    @abstractmethod
    def baselines(self) -> Mapping[str, Callable[[], Baseline]]:
        """Return the factory of each baseline, by name.

        Each raises `PathError` if its baseline is impossible here.
        """

    @abstractmethod
    def check(self, method: Method, call: Callable[[], Any]) -> None:
        """Call several times, each time with other values, and compare all results.

        Parameters
        ----------
        call : callable
            The method's own, or the replay of a graph of it.

        Raises
        ------
        WrongResult
            On all ranks, if any value is wrong on any.
        """

    def expect(self, wrong: int, what: str) -> None:
        """Compare the number of wrong values on all ranks with none.

        Raises
        ------
        WrongResult
        """
        self.stage.synchronize()
        total = self.comm.allreduce(wrong)
        if total:
            raise WrongResult(f"wrong result: {total} {what}")

    def make(self) -> None:
        """Make and check what halox selects, all that is named, and the baselines."""
        self.add(SELECTED, SELECTED, partial(self.own, SELECTED, SELECTED, None))
        for name in self.bench.names():
            self.add(self.named, name, partial(self.own, self.named, name, name))
        wanted = self.bench.options.baselines
        for name, make in self.baselines().items():
            if wanted is None or name in wanted:
                self.add(BASELINE, name, partial(self.by_hand, name, make))

    def by_hand(self, name: str, make: Callable[[], Baseline]) -> Method:
        """Make a baseline."""
        made = make()
        return Method(BASELINE, name, made, made.close, made.capturable, self.arrays)

    def add(self, kind: str, name: str, make: Callable[[], Method]) -> None:
        """Make and check a method; or keep a row that says why there is none."""
        self._order.append(name)
        method, error = attempt(self.comm, make)
        if method is not None:
            if "path" in method.details:
                method.details["path"] = self._agreed(method.details["path"])
            _, error = attempt(self.comm, partial(self.check, method, method.call))
            if error is None:
                self.made.append(method)
                return
            attempt(self.comm, method.close)
        self.refused.append(self._refused(kind, name, error or HaloxError("nothing was made")))

    def _agreed(self, taken: str) -> str:
        """Return what any rank takes: ranks may take different paths to their neighbours."""
        said = {path for found in self.comm.allgather(taken) for path in found.split(", ")}
        return ", ".join(sorted(filter(None, said)))

    def close(self) -> None:
        """Give everything back."""
        self.stage.settle()
        while self.made:
            self.made.pop().close()

    def rows(self) -> list[Row]:
        """Measure every method and return the rows, those without a figure included."""
        streamed = self.bench.clock.measure({method.name: method.call for method in self.made})
        found = [self.measured(method, STREAM, streamed[method.name]) for method in self.made]
        if self.stage.device is not None and self.bench.options.graph:
            found += self._in_graphs()
        found += self.refused
        found.sort(key=lambda row: (row.mode == GRAPH, self._order.index(row.name)))
        return beside(found)

    def measured(self, method: Method, mode: str, us: float) -> Row:
        """Return the row of a method that was timed."""
        row = self.blank(method.kind, method.name)
        return replace(row, **method.details, mode=mode, us=us, checked=True)

    def _refused(self, kind: str, name: str, error: Exception, mode: str = STREAM) -> Row:
        fine = isinstance(error, NOT_POSSIBLE) or mode == GRAPH
        said = str(error) if fine else f"{type(error).__name__}: {error}"
        return replace(self.blank(kind, name), mode=mode, error=said, failed=not fine)

    def _in_graphs(self) -> list[Row]:
        found: list[Row] = []
        replays: dict[str, Callable[[], None]] = {}
        for method in self.made:
            if not method.capturable:
                continue
            replay, error = self._replay(method)
            if replay is None:
                row = self._refused(
                    method.kind, method.name, error or HaloxError("no graph"), GRAPH
                )
                failed = isinstance(error, WrongResult)
                found.append(replace(row, **method.details, failed=failed))
                continue
            replays[method.name] = replay
        times = self.bench.clock.measure(replays)
        found += [
            self.measured(method, GRAPH, times[method.name] / self._graph_calls)
            for method in self.made
            if method.name in times
        ]
        return found

    def _replay(self, method: Method) -> tuple[Callable[[], None] | None, Exception | None]:
        """Capture a method, check what the graph gives, and return what replays it; or why not."""
        calls = self._graph_calls
        replay, error = attempt(self.comm, lambda: self.stage.captured(method.call, calls))
        if replay is None:
            return None, error
        _, error = attempt(self.comm, partial(self.check, method, replay))
        return (None, error) if error is not None else (replay, None)


def paths_taken(rows: Iterable[Any], without: int | None = None) -> str:
    """Return the paths and protocols in rows of ``explain()``, those to one rank left out."""
    return ", ".join(sorted({f"{row.path}/{row.protocol}" for row in rows if row.peer != without}))
