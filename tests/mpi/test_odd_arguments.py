"""An odd argument on one rank only: all ranks raise, and none waits for another."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import datatypes as dt
from halox.errors import ExchangeTimeoutError, FieldError, HaloxError
from tests.unit.odd_values import ODD

World = MPI.Intracomm


class _Ranks:
    """Objects that the calls need, on all ranks."""

    def __init__(self, comm: World) -> None:
        self.comm = comm
        self.grid = halox.Grid((4 * comm.size, 5), comm=comm, device="cpu", periodic=True)
        self.turned = halox.Grid((5, 4 * comm.size), comm=comm, device="cpu", proc_shape=(1, 0))
        self.transpose = halox.Transpose(self.grid, self.turned, axes=(1, 0))
        self.reduce = halox.Allreduce(comm, 3, "f8", device="cpu")
        self.u, self.v = self.grid.ones(), self.turned.ones()
        self.plan = self.grid.plan(self.u)

    def close(self) -> None:
        for part in (self.plan, self.transpose, self.reduce, self.turned, self.grid):
            part.close()


def closed(made: Any) -> None:
    made.close()


def typed(r: _Ranks, **odd: Any) -> None:
    """Exchange around the ring, with some of a send's options."""
    size, rank = r.comm.size, r.comm.rank
    send: dict[str, Any] = {"array": np.zeros(4), "datatype": "f8", "dest": (rank + 1) % size}
    receive = halox.Recv(np.zeros(4), "f8", (rank - 1) % size)
    closed(halox.Exchange([halox.Send(**send | odd)], [receive], comm=r.comm))


def plain_grid(r: _Ranks, **odd: Any) -> None:
    closed(halox.Grid(**{"grid_shape": (8, 6), "device": "cpu"} | odd, comm=r.comm))


def allreduce(r: _Ranks, **odd: Any) -> None:
    closed(halox.Allreduce(r.comm, **{"shape": 3, "dtype": "f8", "device": "cpu"} | odd))


def exchange(r: _Ranks, **odd: Any) -> None:
    closed(halox.Exchange(**{"sends": [], "receives": []} | odd, comm=r.comm))


def transpose(r: _Ranks, **odd: Any) -> None:
    closed(halox.Transpose(r.grid, r.turned, **{"axes": (1, 0)} | odd))


CALLS: list[tuple[Callable[..., Any], str]] = [
    (plain_grid, "grid_shape halo periodic proc_shape blocks corners placement path device"),
    (lambda r, **odd: r.grid.zeros(**odd), "dtype components components_after staggered halo"),
    (lambda r, field, **odd: r.grid.exchange(field, **odd), "field corners"),
    (lambda r, field, **odd: r.grid.accumulate(field, **odd), "field corners"),
    (lambda r, field, **odd: closed(r.grid.plan(field, **odd)), "field corners path"),
    (lambda r, **odd: r.plan.measure(**{"repeats": 1} | odd), "repeats"),
    (lambda r, field: r.grid.gather(field), "field"),
    (lambda r, field: r.grid.sum(field), "field"),
    (lambda r, **odd: r.grid.allreduce(**{"array": np.zeros(3)} | odd), "array op"),
    (allreduce, "shape dtype op algorithm"),
    (lambda r, **odd: r.reduce(**{"array": np.zeros(3)} | odd), "array"),
    (exchange, "sends receives path"),
    (typed, "array datatype dest count tag"),
    (transpose, "axes path"),
    (lambda r, field: r.transpose.forward(field, r.v), "field"),
]
"""Functions, and the names of their arguments."""


def outcome(call: Callable[[], Any]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except ExchangeTimeoutError:
        return "waited"
    except (HaloxError, MemoryError) as error:
        # The class is the same on all ranks, also if one rank detects its mistake before the comparison.
        return type(error).__name__
    return "done"


@pytest.mark.ranks(2)
def test_an_odd_argument_on_one_rank(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_TIMEOUT", "60")
    ranks = _Ranks(comm)
    odd_rank, unlike, more = comm.size - 1, [], itertools.count()
    for number, (call, arguments) in enumerate(CALLS):
        for changed in arguments.split():
            for kind, odd in ODD.items():
                # New strides each time: a layout with a cached plan would skip the comparison of the ranks.
                *shape, last = ranks.grid.padded_shape
                field = np.ones((*shape, last + next(more)))[..., :last]
                given: dict[str, Any] = {"field": field} if "field" in arguments else {}
                if comm.rank == odd_rank:
                    given[changed] = odd
                found = comm.allgather(outcome(lambda: call(ranks, **given)))  # noqa: B023
                if len(set(found)) > 1 or "waited" in found:
                    unlike.append(f"call {number} ({changed}={kind}): {found}")
    ranks.grid.exchange(ranks.u)
    ranks.close()
    assert not unlike, f"{len(unlike)} calls:\n" + "\n".join(unlike[:100])


@pytest.mark.ranks(1, 2)
def test_a_column_of_an_array(comm: World) -> None:
    """A view with gaps is refused, or sent by a datatype that describes its elements."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    matrix = 100 * comm.rank + np.arange(24.0).reshape(4, 6)
    target = np.full((4, 6), -1.0)
    column, into = matrix[:, 1], target[:, 2]
    four = dt.contiguous(4, "f8")
    for sends, receives, name in (
        (
            [halox.Send(column, "f8", right, count=4)],
            [halox.Recv(np.zeros(4), four, left)],
            "sends",
        ),
        (
            [halox.Send(np.zeros(4), four, right)],
            [halox.Recv(into, "f8", left, count=4)],
            "receives",
        ),
    ):
        with pytest.raises(FieldError, match=rf"{name}\[0\]\.array is a view of shape \(4,\)"):
            halox.Exchange(sends, receives, comm=comm)
    assert (target == -1).all()
    sent = dt.slab(column.shape, column.strides, (0,), column.shape, "f8")
    received = dt.vector(4, 1, 6, "f8")
    with halox.Exchange(
        [halox.Send(column, sent, right)], [halox.Recv(into, received, left)], comm=comm
    ) as exchange:
        exchange()
    wanted = np.full((4, 6), -1.0)
    wanted[:, 2] = 100 * left + np.arange(24.0).reshape(4, 6)[:, 1]
    np.testing.assert_array_equal(target, wanted)


def operator(x: Any) -> Any:
    pytest.importorskip("scipy")
    with halox.Grid(4, device="cpu", comm=MPI.COMM_SELF) as grid:
        return grid.linear_operator(lambda v, out: np.copyto(out, v), grid.ones()).matvec(x)


MASKED: dict[str, tuple[str, Callable[[halox.Grid, Any, Any], Any]]] = {
    # The argument, and a call with a masked array, or with an array without mask; the other array is a field.
    "exchange": ("field", lambda grid, m, u: grid.exchange(m(u))),
    "allreduce": ("array", lambda grid, m, u: grid.allreduce(m(np.ones(3)))),
    "many elements": ("array", lambda grid, m, u: grid.allreduce(m(np.ones(9000)))),
    "a scalar of allreduce": ("array", lambda grid, m, u: grid.allreduce(m(np.float64(1)))),
    "points": ("indices", lambda grid, m, u: halox.Points(grid, m([[1.0, 2.0]]))),
    "bins": ("bins", lambda grid, m, u: grid.histogram(u, m([0.0, 1.0, 2.0]))),
    "range": ("range", lambda grid, m, u: grid.histogram(u, 2, m([0.0, 1.0]))),
    "a scalar": ("s", lambda grid, m, u: grid.sum("s * u", s=m(np.float64(2)), u=u)),
    "a field of an expression": ("v", lambda grid, m, u: grid.sum("v + u", v=m(u), u=u)),
    "coords": ("x", lambda grid, m, u: grid.locate([[1, 2]], coords={"x": m(np.arange(6.0))})),
    "points to locate": ("points", lambda grid, m, u: grid.locate(m([[1.0, 2.0]]))),
    "sources": ("values", lambda grid, m, u: halox.Points(grid, [[1, 2]]).add(u, m([1.0]))),
    "a boundary": ("boundary", lambda grid, m, u: grid.ones(boundary=("constant", m(2.0)[()]))),
    "an operator": ("x", lambda grid, m, u: operator(m(np.ones(4)))),
    "displacements": ("displacements", lambda grid, m, u: dt.indexed([1], m([1]), "f8")),
}
LOCAL = ("exchange", "coords", "points to locate", "sources", "an operator", "displacements")


@pytest.mark.parametrize("name", MASKED)
def test_a_masked_array_is_refused_on_all_ranks(name: str, comm: World) -> None:
    """A mask that was dropped would turn missing values into numbers; the same call without mask works."""
    argument, call = MASKED[name]
    has_mask = name in LOCAL or comm.rank == comm.size - 1

    def masked(values: Any) -> Any:
        return np.ma.masked if np.ndim(values) == 0 else np.ma.array(values, mask=True)

    with halox.Grid((6, 5), device="cpu", comm=comm) as grid:
        u = grid.ones()
        call(grid, np.asarray, u)
        with pytest.raises(FieldError, match=argument):
            call(grid, masked if has_mask else np.asarray, u)
