"""Several methods for one case on all ranks: each made, checked and timed in turns, in a stream and in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

import halox
from halox.errors import DeviceError, HaloxError, MissingPackageError, PathError
from halox.paths import PATHS
from halox_bench.clock import Call, Clock, EventClock, Stage, Timing
from halox_bench.kernels import copy
from halox_bench.nccl import Nccl, nccl_between
from halox_bench.rows import BASELINE, GRAPH, SELECTED, STREAM, Row

NAMED = "named"
"""Kind of the methods of halox that are chosen by name."""

NOT_POSSIBLE = (PathError, MissingPackageError)
"""Errors of methods that this machine or case does not allow, which are not failures."""

KIB, MIB = 1 << 10, 1 << 20
CHECKS = 3
_FREE_SHARE, _MOST_HOST_BYTES = 0.4, 1 << 30

Found = TypeVar("Found")


class WrongResult(HaloxError):
    """A result differs from the expected one."""


@dataclass
class Method:
    """A method that was made: runs once by ``call``, and frees its resources by ``close``; both are collective."""

    call: Call
    close: Call = lambda: None
    captures: bool = False  # whether to try to capture it in a CUDA graph
    arrays: Any = None  # that it reads and writes
    parts: tuple[Call, ...] = ()  # its steps, where the check looks at the arrays after each
    found: dict[str, Any] = field(default_factory=dict)  # further attributes of its rows


class Plan(NamedTuple):
    """A method to be made: its kind and name, and a function that makes it, or raises its reason against it."""

    kind: str
    name: str
    make: Callable[[], Method]


Check = Callable[[Method, Call], int]
"""Makes some calls, of the method or of the replay of its graph, and returns the number of wrong values."""


def attempt(comm: Any, work: Callable[[], Found]) -> tuple[Found | None, Exception | None]:
    """Call a function on all ranks, and return its result or an error; an error of one rank is an error on all."""
    result: Found | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    said = comm.allgather(error and f"{type(error).__name__}: {error}")
    first = next(((rank, text) for rank, text in enumerate(said) if text), None)
    if first is None:
        return result, None
    return None, error or RuntimeError("rank {}: {}".format(*first))


class Bench:
    """The ranks of a communicator with what their cases share; all methods are collective.

    With ``device="gpu"`` each rank takes the GPU that a grid takes there; ``shared_gpu`` tells whether two ranks use
    one GPU.
    """

    def __init__(self, comm: Any, device: Literal["cpu", "gpu"], timing: Timing) -> None:
        self.comm, self.device = comm, device
        number = None
        if device == "gpu":
            with halox.Grid(comm.size, halo=0, comm=comm, device=device) as grid:
                number = grid.device_id
        self.stage = Stage(number)
        self.clock = Clock(comm, self.stage, timing)
        place: Any = comm.rank
        if number is not None:
            place = bytes(self.stage.xp.cuda.runtime.getDeviceProperties(number)["uuid"])
        self.shared_gpu = len(set(comm.allgather(place))) < comm.size

    @property
    def on_gpu(self) -> bool:
        return self.stage.device is not None

    def nccl(self) -> Nccl:
        """Return NCCL between these ranks; `PathError` on all ranks if it is missing."""
        return nccl_between(self.comm, shared_gpu=self.shared_gpu)

    def paths(self, asked: Sequence[str] | None) -> tuple[str, ...]:
        """Return the paths to name: of a command line, by default all for the arrays' memory; none on one rank."""
        memory: Literal["host", "gpu"] = "gpu" if self.on_gpu else "host"
        known = (name for name, path in PATHS.items() if path.moves(memory) and not path.to_self)
        if self.comm.size == 1:
            return ()
        return tuple(known) if asked is None else tuple(asked)

    @cached_property
    def peer_bytes_per_us(self) -> float | None:
        """Speed of a large copy to another GPU, None if the first rank has none that it reaches."""
        speed = None
        if self.comm.rank == 0 and self.on_gpu:
            with suppress(Exception):
                speed = _peer_speed(self.stage)
        return self.comm.bcast(speed)  # type: ignore[no-any-return]

    def fits(self, nbytes: int) -> bool:
        """Whether every rank has memory for so many bytes of arrays."""
        most: float = _MOST_HOST_BYTES
        if self.on_gpu:
            most = _FREE_SHARE * self.stage.xp.cuda.runtime.memGetInfo()[0]
            most /= self.comm.size if self.shared_gpu else 1
        return all(self.comm.allgather(nbytes <= most))

    def free(self) -> None:
        if self.on_gpu:
            self.stage.xp.get_default_memory_pool().free_all_blocks()

    def users(self, arrays: Sequence[Any]) -> list[Any]:
        """Return arrays for baselines: NumPy's own, not halox's shared memory, which slows MPI down."""
        if self.on_gpu:
            return list(arrays)
        return [np.empty(array.shape, array.dtype) for array in arrays]

    def expect(self, wrong: int, what: str = "values") -> None:
        """Raise `WrongResult` on all ranks if any rank counts wrong values."""
        total = self.comm.allreduce(int(wrong))
        if total:
            raise WrongResult(f"wrong result: {total} {what}")

    def left_out(self, case: Any, why: str) -> list[Row]:
        return [Row(case.name, SELECTED, SELECTED, error=f"left out: {why}", details=case.details)]


def _peer_speed(stage: Stage) -> float | None:
    """Return the bytes that a copy of 64 MiB to another GPU moves in a microsecond."""
    cp, here, nbytes = stage.xp, stage.device or 0, 64 * MIB
    for other in range(cp.cuda.runtime.getDeviceCount()):
        if other == here or not cp.cuda.runtime.deviceCanAccessPeer(here, other):
            continue
        with suppress(cp.cuda.runtime.CUDARuntimeError):  # enabled before
            cp.cuda.runtime.deviceEnablePeerAccess(other)
        source = cp.empty(nbytes, "u1")
        with cp.cuda.Device(other):
            target = cp.empty(nbytes, "u1")
            cp.cuda.Device(other).synchronize()
        ends = int(source.data.ptr), int(target.data.ptr)
        copied = partial(copy, *ends, nbytes, stage.stream.ptr)
        us, _ = EventClock(stage).measure(copied, graph=False)
        return nbytes / us
    return None


@contextmanager
def made(
    bench: Bench, blank: Row, plans: Sequence[Plan], check: Check
) -> Iterator[tuple[dict[str, Method], dict[str, Row]]]:
    """Make and check methods; yield those with right results, and a row for every one, until the block ends.

    The rows of methods that are impossible here, or wrong, have the reason.
    """
    methods: dict[str, Method] = {}
    rows: dict[str, Row] = {}
    with bench.stage.current():
        bench.stage.settle()
        for kind, name, make in plans:
            row = blank.with_(kind=kind, name=name)
            method, error = attempt(bench.comm, make)
            if method is not None:
                row = row.with_(**method.found)
                said = {path for one in bench.comm.allgather(row.path) for path in one.split(", ")}
                row = row.with_(path=", ".join(sorted(filter(None, said))))
                _, error = attempt(bench.comm, partial(_verify, bench, method, method.call, check))
                if error is None:
                    methods[name] = method
                else:
                    attempt(bench.comm, method.close)
            rows[name] = row if error is None else refused(row, error)
        yield methods, rows
        # Not after an exception: other ranks may not take part then.
        bench.stage.settle()
        for method in methods.values():
            method.close()


def _verify(bench: Bench, method: Method, call: Call, check: Check) -> None:
    wrong = check(method, call)
    bench.stage.synchronize()
    bench.expect(wrong)


def refused(row: Row, error: Exception) -> Row:
    """Return the row of a method with its error; a failed capture is no failure."""
    fine = isinstance(error, NOT_POSSIBLE)
    fine = fine or (row.mode == GRAPH and not isinstance(error, WrongResult))
    said = str(error) if fine else f"{type(error).__name__}: {error}"
    return row.with_(error=said, failed=not fine)


def timed(
    bench: Bench,
    case: Any,
    plans: Sequence[Plan],
    check: Check,
    *,
    graph: bool = True,
    graph_calls: int = 20,
    further: Mapping[str, Call] | None = None,
    **details: Any,
) -> list[Row]:
    """Make, check and time methods for a case; return the rows of all, of refused methods too.

    On a GPU ``graph`` measures graphs of ``graph_calls`` calls as well. ``further`` are calls to measure in the same
    turns, without a check, as baselines.
    """
    blank = Row(case.name, "", "", details={**case.details, **details})
    found: list[Row] = []
    with made(bench, blank, plans, check) as (methods, rows):
        calls = {name: method.call for name, method in methods.items()}
        times = bench.clock.measure({**calls, **(further or {})})
        for name in further or {}:
            rows[name] = blank.with_(kind=BASELINE, name=name)
        found += [row.with_(us=times.get(name)) for name, row in rows.items()]
        if bench.on_gpu and graph:
            found += _in_graphs(bench, methods, rows, check, graph_calls)
    return found


def _in_graphs(
    bench: Bench, methods: Mapping[str, Method], rows: Mapping[str, Row], check: Check, calls: int
) -> list[Row]:
    found: dict[str, Row] = {}
    replays: dict[str, Call] = {}
    for name, method in methods.items():
        if not method.captures:
            continue
        found[name] = rows[name].with_(mode=GRAPH)
        replay, error = attempt(bench.comm, partial(bench.stage.captured, method.call, calls))
        if replay is not None:
            _, error = attempt(bench.comm, partial(_verify, bench, method, replay, check))
        if replay is None or error is not None:
            found[name] = refused(found[name], error or DeviceError("no graph"))
        else:
            replays[name] = replay
    times = bench.clock.measure(replays)
    return [
        row.with_(us=times[name] / calls if name in times else None) for name, row in found.items()
    ]


def paths_taken(rows: Sequence[Any], without: int | None = None) -> str:
    return ", ".join(sorted({f"{row.path}/{row.protocol}" for row in rows if row.peer != without}))


def rows_of_times(
    case: Any, times: Mapping[str, float], selected: str, **details: Any
) -> list[Row]:
    """Return rows of calls that were measured together; all but ``selected`` are baselines."""
    return [
        Row(
            case.name,
            SELECTED if name == selected else BASELINE,
            SELECTED if name == selected else name,
            STREAM,
            us,
            details={**case.details, **details},
        )
        for name, us in times.items()
    ]
