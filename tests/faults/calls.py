"""The collective calls of halox: how a test prepares and makes each, checks the result, and names it in errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

import halox
from halox import Recv, Send
from halox import datatypes as dt

CPU_PATHS = ("host/shared", "host/mpi", "host/direct", "scatter_gather/process_vm")
GPU_PATHS = ("ipc", "staged/shared", "staged/mpi")
"""Paths between ranks that share a GPU."""

PEER_PATHS = ("peer/ll", "peer/staging", "peer/direct", "nccl", "cuda_aware")
"""Paths that need a GPU per rank, or an MPI that takes device pointers."""

_PLACES = (9973, 331, 7)
_INNER = 150  # runs of 1200 bytes, long enough to read in place although those of edges are short


class Scene:
    """Setting of a story: a communicator, a path, and the objects made there.

    The objects stay until the process ends: other ranks may not take part in a release.
    """

    def __init__(self, comm: Any, path: str) -> None:
        self.comm, self.path = comm, path
        self.rank, self.size = comm.rank, comm.size
        self.device = "cpu" if path in CPU_PATHS else "gpu"
        self.made = SimpleNamespace()

    def grid(self, axis: int = 0, **options: Any) -> halox.Grid:
        """A periodic grid, divided along one axis."""
        shape, procs = [4 * self.size, 4 * self.size, _INNER], [1, 1, 1]
        procs[axis] = self.size
        options = {"periodic": True, "proc_shape": procs, "path": self.path} | options
        return halox.Grid(shape, comm=self.comm, device=self.device, **options)

    def field(self, grid: halox.Grid, step: int = 0) -> Any:
        """Return a field whose values encode cell and step, with a poisoned halo."""
        # host/direct reads fields that the grid has allocated; host/shared packs all others.
        is_own = self.path in ("host/shared", "scatter_gather/process_vm")
        u = np.empty(grid.padded_shape) if is_own else grid.empty()
        self.fill(grid, u, step)
        return u

    @staticmethod
    def fill(grid: halox.Grid, u: Any, step: int) -> None:
        u[...] = -1.0
        grid.interior(u)[...] = coded(grid, step)


def coded(grid: halox.Grid, step: int, halo: bool = False) -> Any:
    """Return the values of this rank's cells at a step."""
    return _places(grid.indices(halo=halo), grid.grid_shape) + 1e6 * step


def coded_whole(grid: halox.Grid, step: int) -> np.ndarray:
    """Return the values of all ranks' cells at a step."""
    return _places(np.ix_(*map(np.arange, grid.grid_shape)), grid.grid_shape) + 1e6 * step


def _places(indices: Any, shape: tuple[int, ...]) -> Any:
    return sum((i % n) * (1.0 * p) for i, n, p in zip(indices, shape, _PLACES, strict=True))


def host(values: Any) -> np.ndarray:
    """Return values of NumPy or CuPy in host memory."""
    return np.asarray(values.get() if hasattr(values, "get") else values)


@dataclass(frozen=True)
class Call:
    """A collective call.

    Attributes
    ----------
    words : str
        Pattern of the call's name in errors.
    prepare : callable
        Makes the objects that the call needs, on all ranks.
    act : callable
        Makes the call.
    right : callable
        Checks a rank's result.
    again : callable
        Later call, the same or on the object that the first call made; it fails if a rank is gone.
    other : callable
        Different call, which one rank makes instead.
    other_words : str
        Pattern of the name of that call.
    may_return : bool
        Whether the call may succeed though a rank is gone.
    refused : str
        Class of the error of `again` after a failure; empty if tests do not check it.
    """

    words: str
    prepare: Callable[[Scene], None]
    act: Callable[[Scene], Any]
    right: Callable[[Scene, Any], bool]
    again: Callable[[Scene], Any]
    other: Callable[[Scene], Any]
    other_words: str
    may_return: bool = False
    refused: str = ""


def _nothing(s: Scene) -> None:
    pass


def _grid(s: Scene) -> None:
    s.made.g = s.grid()


def _grid_and_field(s: Scene) -> None:
    s.made.g = s.grid()
    s.made.u = s.field(s.made.g)


def _exchanged(s: Scene) -> None:
    _grid_and_field(s)
    for _ in range(2):
        s.made.g.exchange(s.made.u)
    _refill(s)


def _refill(s: Scene) -> None:
    s.fill(s.made.g, s.made.u, 1)
    rows = s.made.g.explain(s.made.u).rows
    taken = {f"{row.path}/{row.protocol}" for row in rows if row.peer != s.rank}
    assert all(s.path in (path, path.partition("/")[0]) for path in taken), taken


def _halo_right(s: Scene, step: int) -> bool:
    g = s.made.g
    return bool(np.array_equal(host(s.made.u), host(coded(g, step, halo=True))))


def _sum(s: Scene) -> Any:
    return s.made.g.sum(s.made.u)


def _exchange(s: Scene) -> Any:
    return s.made.g.exchange(s.made.u)


# Functions of single calls


def _make_grid(s: Scene) -> Any:
    s.made.g = s.grid()


def _zeros_of_made(s: Scene) -> Any:
    return s.made.g.zeros()


def _zeros(s: Scene) -> Any:
    s.made.u = s.made.g.zeros(components=2)
    return s.made.u


def _zeros_right(s: Scene, u: Any) -> bool:
    return u.shape == (2, *s.made.g.padded_shape) and not host(u).any()


def _plan(s: Scene) -> Any:
    s.made.plan = s.made.g.plan(s.made.u)


def _plan_right(s: Scene, _: Any) -> bool:
    s.made.plan()
    return _halo_right(s, 0)


def _planned(s: Scene) -> None:
    _grid_and_field(s)
    _plan(s)
    s.made.plan()
    s.fill(s.made.g, s.made.u, 1)


def _started_and_finished(s: Scene) -> Any:
    s.made.plan.start()
    s.made.plan.finish()


def _started(s: Scene) -> None:
    _planned(s)
    s.made.plan.start()


def _finished(s: Scene) -> Any:
    s.made.plan.finish()


def _accumulate(s: Scene) -> Any:
    return s.made.g.accumulate(s.made.u)


def _ones(s: Scene) -> None:
    s.made.g = s.grid()
    s.made.u = s.field(s.made.g)
    s.made.u[...] = 1.0


def _accumulated(s: Scene) -> None:
    _ones(s)
    _accumulate(s)
    s.made.u[...] = 1.0


def _accumulated_right(s: Scene, _: Any) -> bool:
    """Whether each cell holds 1 and another 1 per halo that contains it, and the halos are zero."""
    wanted = np.ones(())
    for cells in s.made.g.rank_shape:
        times = np.ones(cells)
        times[0] += 1
        times[-1] += 1
        wanted = np.multiply.outer(wanted, times)
    found = host(s.made.u)
    return bool(np.array_equal(found[1:-1, 1:-1, 1:-1], wanted)) and found.sum() == wanted.sum()


def _summed(s: Scene) -> None:
    _grid_and_field(s)
    for _ in range(2):
        _sum(s)


def _sum_right(s: Scene, found: Any) -> bool:
    return float(found) == coded_whole(s.made.g, 0).sum()


def _four(s: Scene) -> Any:
    return s.made.g.xp.arange(4.0) + s.rank


def _four_right(s: Scene, found: Any) -> bool:
    wanted = np.arange(4.0) * s.size + sum(range(s.size))
    return bool(np.array_equal(host(found), wanted))


def _grid_allreduce(s: Scene) -> Any:
    return s.made.g.allreduce(_four(s))


def _reduced(s: Scene) -> None:
    _grid_and_field(s)
    _grid_allreduce(s)


def _gather(s: Scene) -> Any:
    return s.made.g.gather(s.made.u)


def _gather_right(s: Scene, whole: Any) -> bool:
    if s.rank:
        return whole is None
    return bool(np.array_equal(whole, coded_whole(s.made.g, 0)))


def _ring(s: Scene) -> Any:
    """Make an exchange that sends every second element to the right neighbour, around a ring."""
    xp = np
    if s.device == "gpu":
        import cupy as xp
    right, left = (s.rank + 1) % s.size, (s.rank - 1) % s.size
    s.made.sent, s.made.received = xp.arange(16.0) + 100 * s.rank, xp.full(8, -1.0)
    path = None if s.path == "host/direct" else s.path
    return halox.Exchange(
        [Send(s.made.sent, dt.vector(8, 1, 2, "f8"), right)],
        [Recv(s.made.received, dt.contiguous(8, "f8"), left)],
        comm=s.comm,
        path=path,
    )


def _make_ring(s: Scene) -> Any:
    s.made.e = _ring(s)


def _ringed(s: Scene) -> None:
    _make_ring(s)
    s.made.e()
    s.made.received[...] = -1.0


def _run_ring(s: Scene) -> Any:
    return s.made.e()


def _ring_made_right(s: Scene, _: Any) -> bool:
    s.made.e()
    return _ring_right(s, None)


def _ring_right(s: Scene, _: Any) -> bool:
    wanted = np.arange(0.0, 16.0, 2) + 100 * ((s.rank - 1) % s.size)
    return bool(np.array_equal(host(s.made.received), wanted))


def _make_allreduce(s: Scene) -> Any:
    s.made.r = halox.Allreduce(s.comm, 4, "f8", device=s.device)


def _call_allreduce(s: Scene) -> Any:
    xp = np
    if s.device == "gpu":
        import cupy as xp
    return s.made.r(xp.arange(4.0) + s.rank)


def _allreduced(s: Scene) -> None:
    _make_allreduce(s)
    _call_allreduce(s)


def _allreduce_made_right(s: Scene, _: Any) -> bool:
    return _four_right(s, _call_allreduce(s))


def _two_grids(s: Scene) -> None:
    _grid_and_field(s)
    s.made.h = s.grid(axis=1, halo=0)
    s.made.v = s.made.h.zeros()


def _make_transpose(s: Scene) -> Any:
    path = None if s.path == "host/direct" else s.path
    s.made.t = halox.Transpose(s.made.g, s.made.h, path=path)


def _transposer(s: Scene) -> None:
    _two_grids(s)
    _make_transpose(s)


def _forward(s: Scene) -> Any:
    s.made.t.forward(s.made.u, s.made.v)


def _transposed(s: Scene) -> None:
    _transposer(s)
    for _ in range(2):
        _forward(s)
    s.made.v[...] = -1.0


def _forward_right(s: Scene, _: Any) -> bool:
    return bool(np.array_equal(host(s.made.v), host(coded(s.made.h, 0))))


def _transpose_made_right(s: Scene, _: Any) -> bool:
    _forward(s)
    return _forward_right(s, None)


def _close(s: Scene) -> Any:
    s.made.g.close()


def _closed_right(s: Scene, _: Any) -> bool:
    return bool(np.array_equal(host(s.made.g.interior(s.made.u)), host(coded(s.made.g, 1))))


_EXCHANGE = r"\bexchange\b"
_SUM = r"\bsum\b"
_GRID = r"\bGrid\b|making of a grid|making a grid"
_ZEROS = r"\bzeros\b"
_ACCUMULATE = r"\baccumulate\b"
_ALLREDUCE = r"\b[Aa]llreduce\b"
_PLAN = r"\bplan\b"
_GATHER = r"\bgather\b"
_MAKING_EXCHANGE = r"\bExchange\b"
_MAKING_TRANSPOSE = r"\b[Tt]ranspose\b"
_TRANSPOSE = r"\b[Tt]ranspose\b|\bforward\b"
_CLOSE = r"\bclose\b|\bclosing\b"

_BESIDE_SUM = (_sum, _SUM)
_BESIDE_EXCHANGE = (_exchange, _EXCHANGE)


def _call(
    words: str,
    play: tuple[Callable[[Scene], None], Callable[[Scene], Any], Callable[[Scene, Any], bool]],
    other: tuple[Callable[[Scene], Any], str],
    again: Callable[[Scene], Any] | None = None,
    **options: Any,
) -> Call:
    prepare, act, right = play
    return Call(words, prepare, act, right, again or act, *other, **options)


def _halo_of(step: int) -> Callable[[Scene, Any], bool]:
    return lambda s, _: _halo_right(s, step)


_BROKEN: dict[str, Any] = {"refused": "StateError"}

CALLS: dict[str, Call] = {
    "Grid": _call(
        _GRID,
        (_nothing, _make_grid, lambda s, _: s.made.g.size == s.size),
        (_make_allreduce, _ALLREDUCE),
        _zeros_of_made,
    ),
    "zeros": _call(_ZEROS, (_grid, _zeros, _zeros_right), (_grid_allreduce, _ALLREDUCE)),
    "exchange, first": _call(_EXCHANGE, (_grid_and_field, _exchange, _halo_of(0)), _BESIDE_SUM),
    "exchange, cached": _call(
        _EXCHANGE, (_exchanged, _exchange, _halo_of(1)), _BESIDE_SUM, **_BROKEN
    ),
    "plan": _call(
        _PLAN,
        (_grid_and_field, _plan, _plan_right),
        _BESIDE_SUM,
        lambda s: s.made.plan(),
    ),
    "plan.start, plan.finish": _call(
        rf"{_PLAN}|{_EXCHANGE}|\bfinish\b",
        (_planned, _started_and_finished, _halo_of(1)),
        _BESIDE_SUM,
        **_BROKEN,
    ),
    "plan.finish": _call(
        rf"{_PLAN}|{_EXCHANGE}|\bfinish\b",
        (_started, _finished, _halo_of(1)),
        _BESIDE_SUM,
        lambda s: s.made.plan(),
        **_BROKEN,
    ),
    "accumulate, first": _call(
        _ACCUMULATE, (_ones, _accumulate, _accumulated_right), _BESIDE_EXCHANGE
    ),
    "accumulate, cached": _call(
        _ACCUMULATE,
        (_accumulated, _accumulate, _accumulated_right),
        _BESIDE_EXCHANGE,
        **_BROKEN,
    ),
    "sum, first": _call(_SUM, (_grid_and_field, _sum, _sum_right), _BESIDE_EXCHANGE),
    "sum, cached": _call(_SUM, (_summed, _sum, _sum_right), _BESIDE_EXCHANGE),
    "grid.allreduce, first": _call(
        _ALLREDUCE, (_grid_and_field, _grid_allreduce, _four_right), _BESIDE_SUM
    ),
    "grid.allreduce, cached": _call(
        _ALLREDUCE, (_reduced, _grid_allreduce, _four_right), _BESIDE_SUM
    ),
    "gather": _call(_GATHER, (_grid_and_field, _gather, _gather_right), _BESIDE_SUM),
    "Exchange": _call(
        _MAKING_EXCHANGE,
        (_nothing, _make_ring, _ring_made_right),
        (_make_grid, _GRID),
        _run_ring,
    ),
    "Exchange()": _call(
        rf"{_EXCHANGE}|\bExchange\b",
        (_ringed, _run_ring, _ring_right),
        (lambda s: s.made.e.measure(2), r"\bmeasure\b"),
        **_BROKEN,
    ),
    "Allreduce": _call(
        _ALLREDUCE,
        (_nothing, _make_allreduce, _allreduce_made_right),
        (_make_grid, _GRID),
        _call_allreduce,
    ),
    "Allreduce()": _call(
        _ALLREDUCE,
        (_allreduced, _call_allreduce, _four_right),
        (lambda s: s.made.r.close(), _CLOSE),
    ),
    "Transpose": _call(
        _MAKING_TRANSPOSE,
        (_two_grids, _make_transpose, _transpose_made_right),
        _BESIDE_SUM,
        _forward,
    ),
    "Transpose.forward, first": _call(
        _TRANSPOSE, (_transposer, _forward, _forward_right), _BESIDE_SUM
    ),
    "Transpose.forward, cached": _call(
        _TRANSPOSE, (_transposed, _forward, _forward_right), _BESIDE_SUM, **_BROKEN
    ),
    "close": _call(_CLOSE, (_exchanged, _close, _closed_right), _BESIDE_SUM, may_return=True),
}
"""Collective calls by name."""
