"""Several ways to do one thing on all ranks: each made and checked, all timed in turns, in streams and in graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from halox.cli.bench.ranks_bench import RanksBench
from halox.cli.bench.ranks_clock import attempt
from halox.errors import HaloxError, MissingPackageError, PathError

SELECTED = "selected"
BASELINE = "baseline"
STREAM = "stream"
GRAPH = "graph"

NOT_POSSIBLE = (PathError, MissingPackageError)
"""What says that something cannot be had here, which is no failure."""


class WrongResult(HaloxError):
    """A benchmark's result differs from what it should be."""


class TimedRow(Protocol):
    """What the rows of all benchmarks on several ranks have; frozen dataclasses.

    Attributes
    ----------
    kind : str
        `SELECTED`, `BASELINE`, or what can be named.
    name : str
        Of the way.
    mode : {"stream", "graph"}
        ``"stream"``: back to back, waited for at the end; for NumPy arrays, back to back. ``"graph"``: the same
        inside a replayed CUDA graph.
    us : float or None
        Wall time of one call on the slowest rank, median of batches.
    checked : bool
        Whether every value was compared; no figure without.
    beside : dict
        Microseconds of each baseline in the same run and mode, in a stream where it cannot be captured.
    error : str
        Why there is no figure.
    failed : bool
        Whether the error is one that should not be.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def kind(self) -> str: ...  # noqa: D102 - see the class
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def mode(self) -> str: ...  # noqa: D102
    @property
    def us(self) -> float | None: ...  # noqa: D102
    @property
    def beside(self) -> dict[str, float]: ...  # noqa: D102
    @property
    def error(self) -> str: ...  # noqa: D102
    @property
    def failed(self) -> bool: ...  # noqa: D102


Row = TypeVar("Row", bound=TimedRow)


@dataclass
class Way:
    """One way, made and checked.

    Attributes
    ----------
    kind, name : str
        As of `TimedRow`.
    call : callable
        Does it once.
    close : callable
        Gives back what it holds; collective.
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


class Ways(ABC, Generic[Row]):
    """The ways to do one case that gave the right result.

    Parameters
    ----------
    bench : RanksBench
    graph_calls : int
        Calls in a captured graph; 0 leaves graphs out.

    Attributes
    ----------
    ways : list of Way
    refused : list of TimedRow
        Rows of those that cannot be had, or are wrong.

    Notes
    -----
    All methods are collective.
    """

    def __init__(self, bench: RanksBench, graph_calls: int) -> None:
        self.bench = bench
        self.comm, self.stage = bench.comm, bench.stage
        self.ways: list[Way] = []
        self.refused: list[Row] = []
        self._order: list[str] = []
        self._graph_calls = graph_calls

    @abstractmethod
    def blank(self, kind: str, name: str) -> Row:
        """Return a way's row without a figure."""

    @abstractmethod
    def check(self, call: Callable[[], Any], arrays: Any) -> None:
        """Call several times, each time with other values, and compare all results.

        Raises
        ------
        WrongResult
            On all ranks, if any value is wrong on any.
        """

    def add(self, kind: str, name: str, make: Callable[[], Way]) -> None:
        """Make and check a way; or keep a row that says why there is none."""
        self._order.append(name)
        way, error = attempt(self.comm, make)
        if way is not None:
            self.settle_details(way)
            call, arrays = way.call, way.arrays
            _, error = attempt(self.comm, lambda: self.check(call, arrays))
            if error is None:
                self.ways.append(way)
                return
            attempt(self.comm, way.close)
        self.refused.append(self._refused(kind, name, error or HaloxError("nothing was made")))

    def settle_details(self, way: Way) -> None:
        """Bring together what ranks may know differently of a way."""

    def close(self) -> None:
        """Give everything back."""
        self.stage.settle()
        while self.ways:
            self.ways.pop().close()

    def rows(self) -> list[Row]:
        """Measure every way and return the rows, those without a figure included."""
        streamed = self.bench.clock.measure({way.name: way.call for way in self.ways})
        found = [self.measured(way, STREAM, streamed[way.name]) for way in self.ways]
        if self.stage.device is not None and self._graph_calls:
            found += self._in_graphs()
        found += self.refused
        found.sort(key=lambda row: (row.mode == GRAPH, self._order.index(row.name)))
        return beside(found)

    def measured(self, way: Way, mode: str, us: float) -> Row:
        """Return the row of a way that was timed."""
        row = self.blank(way.kind, way.name)
        return replace(row, **way.details, mode=mode, us=us, checked=True)

    def _refused(self, kind: str, name: str, error: Exception, mode: str = STREAM) -> Row:
        fine = isinstance(error, NOT_POSSIBLE) or mode == GRAPH
        said = str(error) if fine else f"{type(error).__name__}: {error}"
        return replace(self.blank(kind, name), mode=mode, error=said, failed=not fine)

    def _in_graphs(self) -> list[Row]:
        found: list[Row] = []
        replays: dict[str, Callable[[], None]] = {}
        for way in self.ways:
            if not way.capturable:
                continue
            replay, error = self._replay(way)
            if replay is None:
                row = self._refused(way.kind, way.name, error or HaloxError("no graph"), GRAPH)
                failed = isinstance(error, WrongResult)
                found.append(replace(row, **way.details, failed=failed))
                continue
            replays[way.name] = replay
        times = self.bench.clock.measure(replays)
        found += [
            self.measured(way, GRAPH, times[way.name] / self._graph_calls)
            for way in self.ways
            if way.name in times
        ]
        return found

    def _replay(self, way: Way) -> tuple[Callable[[], None] | None, Exception | None]:
        """Capture a way, check what the graph gives, and return what replays it; or why not."""
        calls = self._graph_calls
        replay, error = attempt(self.comm, lambda: self.stage.captured(way.call, calls))
        if replay is None:
            return None, error
        found = replay
        _, error = attempt(self.comm, lambda: self.check(found, way.arrays))
        return (None, error) if error is not None else (found, None)


def beside(rows: list[Row]) -> list[Row]:
    """Put the baselines' times beside each figure: those of the same mode, else in a stream."""
    theirs = [row for row in rows if row.kind == BASELINE and row.us is not None]
    finished = []
    for row in rows:
        near = {r.name: r.us for r in theirs if r.mode == STREAM and r.us is not None}
        near |= {r.name: r.us for r in theirs if r.mode == row.mode and r.us is not None}
        finished.append(replace(row, beside=near) if row.us is not None else row)
    return finished
