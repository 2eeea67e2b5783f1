"""Transposes between random divisions, compared with the whole field; values encode the global cell."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import halox
from halox.errors import (
    ClosedError,
    DecompositionError,
    FieldError,
    HaloxError,
    MismatchError,
    PathError,
)
from tests.mpi.bad_input import Table, check_error, read_only
from tests.mpi.conftest import agree
from tests.oracle import (
    RECORD,
    Case,
    Field,
    allocated,
    expected,
    factorisations,
    host,
    poison,
    same_values,
    whole_values,
)
from tests.strategies import SELDOM, WAYS, components, divided, on_ranks
from tests.support import trials

World = MPI.Intracomm
SEED = 20261120
OUT_OF_ORDER = np.dtype({"names": ["a", "b"], "formats": ["f8", "f4"], "offsets": [8, 0]})
DTYPES = ["c16", "f8", "f4", "c8", "i1", "i8", "u2", "?", RECORD, OUT_OF_ORDER]
ALLOCATIONS = ["grid", "C", "F", "turned", "backwards", "part"]


@dataclass
class Turn:
    """A field on two grids; axis k of b is axis ``axes[k]`` of a."""

    a: Case
    b: Case
    axes: tuple[int, ...]
    allocations: tuple[str, str]

    def turned(self, whole: np.ndarray) -> np.ndarray:
        """Return the values of b's whole field, from the values of a's."""
        ndim, first = len(self.axes), len(self.a.fields[0].before)
        behind = np.moveaxis(whole, range(first, first + ndim), range(-ndim, 0))
        extents = behind.ndim - ndim
        behind = behind.transpose(*range(extents), *(extents + axis for axis in self.axes))
        before = len(self.b.fields[0].before)
        return np.moveaxis(behind, range(-ndim, 0), range(before, before + ndim))


@st.composite
def turns(draw: st.DrawFn, ranks: int, dtypes: Sequence[Any] = DTYPES) -> Turn:
    ndim = draw(st.integers(1, 4))
    axes = tuple(draw(st.permutations(range(ndim))))
    procs_a, procs_b = (draw(st.sampled_from(factorisations(ranks, ndim))) for _ in "ab")
    least = [
        max(procs_a[axis], procs_b[k]) for k, axis in sorted(enumerate(axes), key=lambda p: p[1])
    ]
    most = (60, 20, 9, 5)[ndim - 1]
    shape = [draw(st.integers(n, max(n, most))) for n in least]
    periodic, staggered = ([draw(one) for _ in shape] for one in (st.booleans(), SELDOM))
    dtype, extents = draw(st.sampled_from(dtypes)), sum(draw(components(ndim)), ())
    way = draw(WAYS)

    def side(procs: tuple[int, ...], order: Sequence[int]) -> Case:
        blocks = draw(divided([shape[axis] for axis in order], procs))
        # The high halo is one cell narrower, since a staggered field needs room for its shared point.
        halo = tuple(
            (draw(st.integers(0, min(*sizes, 2))), draw(st.integers(0, min(*sizes, 3) - 1)))
            for sizes in blocks
        )
        first = draw(st.integers(0, len(extents)))
        turned = tuple(staggered[axis] for axis in order)
        field = Field(dtype, halo, extents[:first], extents[first:], turned)
        return Case(blocks, tuple(periodic[axis] for axis in order), [field], way=way)

    kinds = st.sampled_from(ALLOCATIONS)
    return Turn(side(procs_a, range(ndim)), side(procs_b, axes), axes, (draw(kinds), draw(kinds)))


def field_of(case: Case, grid: halox.Grid, allocation: str) -> Any:
    f = case.fields[0]
    field = grid.empty(f.dtype, **f.options())
    if allocation == "grid":
        return field
    return grid.declare(allocated(grid, field, allocation), **f.options())


def check(case: Turn, comm: World, device: str = "cpu") -> None:
    """Transpose forward and backward with three sets of values, by calls and by a plan."""
    a, b = case.a, case.b
    axes = None if case.axes == tuple(sorted(case.axes)) else case.axes
    right = []
    with (
        a.grid(comm, device) as of_a,
        b.grid(comm, device) as of_b,
        halox.Transpose(of_a, of_b, axes=axes) as t,
    ):
        u, v = field_of(a, of_a, case.allocations[0]), field_of(b, of_b, case.allocations[1])
        plan = t.plan(u, v)
        for salt in range(3):
            whole = whole_values(a, a.fields[0], salt)
            full_u = expected(a, a.fields[0], of_a.proc_coords, whole).before
            full_v = expected(b, b.fields[0], of_b.proc_coords, case.turned(whole)).before
            empty_u, empty_v = (poison(one.shape, one.dtype) for one in (full_u, full_v))
            right += [not same_values(empty_v, full_v)]  # else nothing would be moved
            u[...], v[...] = of_a.xp.asarray(full_u), of_b.xp.asarray(empty_v)
            comm.Barrier()
            if salt == 1:
                plan.start()
                plan.finish()
            else:
                t.forward(u, v)
            right += [same_values(host(v), full_v), same_values(host(u), full_u)]
            u[...] = of_a.xp.asarray(empty_u)
            comm.Barrier()
            t.backward(v, u)
            right += [same_values(host(v), full_v), same_values(host(u), full_u)]
    assert all(right), right


@pytest.mark.geometry
@on_ranks(turns, trials(80), part=4)
def test_random_divisions(case: Turn, comm: World) -> None:
    check(case, comm)


def pencils(shape: tuple[int, ...], comm: World, **options: Any) -> list[halox.Grid]:
    """Return three grids of the same cells: undivided along x, along y, and along z."""
    p, q = sorted(MPI.Compute_dims(comm.size, 2))
    return [
        halox.Grid(shape, halo=0, proc_shape=procs, comm=comm, **({"device": "cpu"} | options))
        for procs in ((1, p, q), (p, 1, q), (p, q, 1))
    ]


@pytest.mark.geometry
def test_slabs_send_one_message_to_each_rank(comm: World) -> None:
    n = comm.size
    with (
        halox.Grid((2 * n, 3 * n, 5), halo=1, proc_shape=(n, 1, 1), comm=comm, device="cpu") as a,
        halox.Grid((2 * n, 3 * n, 5), halo=0, proc_shape=(1, n, 1), comm=comm, device="cpu") as b,
        halox.Transpose(a, b) as t,
    ):
        plan = t.plan(a.zeros("f4"), b.zeros("f4"))
        assert plan.messages_sent == n - 1
        assert plan.bytes_sent == (n - 1) * 2 * 3 * 5 * 4
        rows = plan.explain().rows
        assert sorted(r.peer for r in rows if r.direction == "send") == list(range(n))
        assert {r.path for r in rows} == ({"local", "host"} if n > 1 else {"local"})


@pytest.mark.ranks(2, 4)
@pytest.mark.usually(2)
@pytest.mark.parametrize("axes, own", [((0, 1, 2), False), ((1, 2, 0), False), ((2, 1, 0), True)])
def test_large_fields_are_read_in_place(comm: World, axes: tuple[int, ...], own: bool) -> None:
    """Large fields of a grid are read in place, in tiles if the axes are permuted; a user's array is packed."""
    shape, n = (136, 34, 65), comm.size  # runs of 34 x 8 bytes or more
    turned = tuple(shape[axis] for axis in axes)
    procs = [(n, 1, 1), tuple((1, n, 1)[axis] for axis in axes)]
    whole = np.arange(np.prod(shape), dtype="f8").reshape(shape)
    with (
        halox.Grid(shape, halo=0, proc_shape=procs[0], comm=comm, device="cpu") as a,
        halox.Grid(turned, halo=0, proc_shape=procs[1], comm=comm, device="cpu") as b,
        halox.Transpose(a, b, axes=axes) as t,
    ):
        u, v = a.zeros("f8"), np.zeros(b.padded_shape) if own else b.zeros("f8")
        u[...] = whole[a.owned]
        plans = [t.plan(u, v), t.plan(u, v, backward=True)]
        ways = [{row.protocol for row in plan.explain().rows} for plan in plans]
        assert ways[0] == {"copy", "direct"}
        # Other ranks cannot read a user's array in place.
        assert ("direct" in ways[1]) == (not own)
        for _ in range(2):
            v[...], before = -1, u.copy()
            plans[0]()
            forth = np.array_equal(v, whole.transpose(axes)[b.owned])
            u[...] = -1
            plans[1]()
            assert agree(forth and np.array_equal(u, before), comm)
            u += comm.size
            whole = whole + comm.size


@pytest.mark.geometry
def test_one_array_into_many_and_one_way_only(comm: World) -> None:
    """Rank 0 owns nearly all cells before, the last rank afterwards: most messages go one way."""
    n, size = 64, comm.size
    ones = (1,) * (size - 1)
    with (
        halox.Grid(
            (n, 50), halo=0, blocks=[(n - size + 1, *ones), None], comm=comm, device="cpu"
        ) as a,
        halox.Grid(
            (n, 50), halo=0, blocks=[(*ones, n - size + 1), None], comm=comm, device="cpu"
        ) as b,
        halox.Transpose(a, b) as t,
    ):
        u, v = a.zeros("f8"), b.zeros("f8")
        for step in range(10):
            whole = np.arange(n * 50.0).reshape(n, 50) + step
            u[...] = whole[a.owned]
            t.forward(u, v)
            assert np.array_equal(v, whole[b.owned]), step


def test_plans_are_found_again_and_die_with_their_arrays(comm: World) -> None:
    a, b, _ = pencils((8, 8, 8), comm)
    with a, b, halox.Transpose(a, b) as t:
        state, v = np.zeros((3, *a.padded_shape)), b.zeros()
        for step in range(3):
            for k in range(3):
                state[k] = step + k
                t.forward(state[k], v)  # a new view each time
                assert agree(bool((v == step + k).all()), comm)
        alive = weakref.ref(state)
        del state
        gc.collect()
        assert alive() is None
        t.forward(a.ones(), v)
        assert agree(bool((v == 1).all()), comm)


@pytest.mark.usually(3)
def test_plans_release_their_memory(comm: World) -> None:
    a, b, _ = pencils((8, 8, 8), comm)
    with a, b:
        u, v = a.zeros(), b.zeros()
        for number in range(30):
            with halox.Transpose(a, b) as t:
                t.forward(u, v)
                kept = t.plan(u, v, backward=bool(number % 2))
            with pytest.raises(ClosedError, match="closed"):
                kept()
        assert a.domain.context.arena.segments <= 4


def test_a_grid_exchanges_while_a_transpose_is_under_way(comm: World) -> None:
    """Plans of the same grid do not receive each other's messages."""
    n = comm.size
    options: dict[str, Any] = {"comm": comm, "device": "cpu"}
    with (
        halox.Grid((4 * n, 4 * n), halo=1, periodic=True, proc_shape=(n, 1), **options) as a,
        halox.Grid((4 * n, 4 * n), halo=1, proc_shape=(1, n), **options) as b,
        halox.Transpose(a, b) as t,
    ):
        u, v, other = a.zeros(), b.zeros(), a.zeros()
        plan = t.plan(u, v)
        whole = np.arange(16.0 * n * n).reshape(4 * n, 4 * n)
        for step in range(5):
            a.interior(u)[...] = whole[a.owned] + step
            a.interior(other)[...] = -whole[a.owned] - step
            plan.start()
            a.exchange(other)
            plan.finish()
            i, j = a.indices(halo=True)
            right = np.array_equal(b.interior(v), whole[b.owned] + step)
            right &= np.array_equal(other, -whole[i % (4 * n), j % (4 * n)] - step)
            assert agree(bool(right), comm), step


# Errors


def two(ranks: World, **options: Any) -> tuple[halox.Grid, halox.Grid]:
    n = ranks.size
    a = halox.Grid((3 * n, 4 * n), halo=1, proc_shape=(n, 1), comm=ranks, device="cpu")
    settings: dict[str, Any] = {"halo": 0, "proc_shape": (1, n), "comm": ranks, "device": "cpu"}
    settings |= options
    return a, halox.Grid(settings.pop("shape", (3 * n, 4 * n)), **settings)


def making(
    change: Callable[[World], dict[str, Any]] = lambda comm: {}, **options: Any
) -> Callable[[World], None]:
    """Return a call that makes a transpose; ``change`` has a rank's arguments."""

    def call(comm: World) -> None:
        a, b = two(comm, **options)
        with a, b:
            arguments = {"grid_a": a, "grid_b": b} | change(comm)
            halox.Transpose(arguments.pop("grid_a"), arguments.pop("grid_b"), **arguments)

    return call


def moving(
    make: Callable[[halox.Grid, halox.Grid], Any], direction: str = "forward"
) -> Callable[[World], None]:
    def call(comm: World) -> None:
        a, b = two(comm)
        with a, b, halox.Transpose(a, b) as t:
            u, v = make(a, b)
            if direction == "forward":
                t.forward(u, v)
            else:
                t.backward(v, u)

    return call


def other_order(comm: World) -> None:
    turned = comm.Split(0, -comm.rank)
    a, b = two(comm, comm=turned)
    try:
        halox.Transpose(a, b)
    finally:
        b.close()
        a.close()
        turned.Free()


def alone(comm: World) -> None:
    a, _ = two(comm)
    with a, halox.Grid(a.grid_shape, comm=MPI.COMM_SELF, device="cpu") as b:
        halox.Transpose(a, b)


def axes_differ(comm: World) -> None:
    with halox.Grid((comm.size,) * 2, comm=comm, device="cpu") as a:
        halox.Transpose(a, a, axes=(1, 0) if comm.rank == comm.size - 1 else None)


def closing(close: Callable[[halox.Transpose], None]) -> Callable[[World], None]:
    """Return a call of a transpose after it, or one of its grids, was closed."""

    def call(comm: World) -> None:
        a, b = two(comm)
        with a, b:
            t = halox.Transpose(a, b)
            u, v = a.zeros(), b.zeros()
            t.forward(u, v)
            close(t)
            t.forward(u, v)

    return call


def of_closed_grid(comm: World) -> None:
    a, b = two(comm)
    b.close()
    with a:
        halox.Transpose(a, b)


def in_place(comm: World) -> None:
    a, _ = two(comm)
    with a, halox.Transpose(a, a) as t:
        u = a.zeros()
        t.forward(u, u)


def is_last(grid: halox.Grid) -> bool:
    return bool(grid.rank == grid.size - 1)


def of_dtypes(a: halox.Grid, b: halox.Grid) -> Any:
    return [grid.zeros("f4" if is_last(a) else "f8") for grid in (a, b)]


def of_components(a: halox.Grid, b: halox.Grid) -> Any:
    """Arrays of equal size and different components, which the handshake alone could not distinguish."""
    return [grid.zeros(components=(3, 2) if is_last(a) else (2, 3)) for grid in (a, b)]


TABLE: Table = {
    "what is no grid": (making(lambda c: {"grid_a": 3}), HaloxError, "grid_a"),
    "no grid on one rank >1": (
        making(lambda c: {"grid_b": None} if c.rank == 1 else {}),
        HaloxError,
        "grid_b",
    ),
    "other cells": (making(shape=(40, 41)), DecompositionError, "grid_b"),
    "other numbers of axes": (
        making(shape=(40,), proc_shape=None),
        DecompositionError,
        "grid_b",
    ),
    "no permutation": (making(lambda c: {"axes": (0, 2)}), DecompositionError, "axes"),
    "axes of other lengths": (making(lambda c: {"axes": (1, 0)}), DecompositionError, "axes"),
    "axes that differ between ranks >1": (axes_differ, MismatchError, "axes"),
    "other ranks >1": (alone, MismatchError, "grid_b"),
    "ranks in another order >1": (other_order, MismatchError, "grid_a"),
    "path": (making(lambda c: {"path": "pigeon"}), PathError, "path"),
    "a closed grid": (of_closed_grid, ClosedError, "closed"),
    "a closed transpose": (closing(lambda t: t.close()), ClosedError, "the transpose is closed"),
    "a grid closed later": (closing(lambda t: t.grid_a.close()), ClosedError, "closed"),
    "shape": (moving(lambda a, b: (np.zeros((9, 9, 9)), b.zeros())), FieldError, "grid_a"),
    "a list": (moving(lambda a, b: (a.zeros(), [[0.0]])), FieldError, "grid_b"),
    "a list on one rank >1": (
        moving(lambda a, b: (a.zeros(), [[0.0]] if a.rank == 1 else np.zeros(b.padded_shape))),
        FieldError,
        "grid_b",
    ),
    "dtype": (moving(lambda a, b: (a.zeros("f8"), b.zeros("c16"))), FieldError, "dtype"),
    "components": (
        moving(lambda a, b: (a.zeros(components=3), b.zeros(components=2))),
        FieldError,
        "component",
    ),
    "staggering": (
        moving(lambda a, b: (a.zeros(staggered=0), b.zeros(staggered=1))),
        FieldError,
        "staggered",
    ),
    "in place": (in_place, FieldError, "u and v share memory"),
    "read-only": (moving(lambda a, b: (a.zeros(), read_only(b))), FieldError, "read-only"),
    "read-only, backward": (
        moving(lambda a, b: (read_only(a), b.zeros()), "backward"),
        FieldError,
        "read-only",
    ),
    "dtypes that differ >1": (moving(of_dtypes), MismatchError, "dtype"),
    "components that differ >1": (moving(of_components), MismatchError, "layout"),
}


@pytest.mark.usually(3)
@pytest.mark.parametrize("name", TABLE)
def test_bad_input(name: str, comm: World) -> None:
    check_error(TABLE, name, comm)


def test_in_place_is_refused_whatever_the_view(comm: World) -> None:
    """A transpose in place is refused for any view, also on one rank; interleaved fields are accepted."""
    with (
        halox.Grid((4, 4 * comm.size), halo=0, comm=comm, device="cpu") as a,
        halox.Grid((4, 4 * comm.size), halo=0, comm=comm, device="cpu") as b,
        halox.Transpose(a, b) as t,
    ):
        memory = np.zeros((2, *a.padded_shape, 2))
        for u, v in ((memory[0], memory[0]), (memory[0], memory[0, ::-1]), (memory[..., 0],) * 2):
            with pytest.raises(FieldError):
                t.forward(u, v)
        memory[0, ..., 0] = a.indices()[1]
        t.forward(memory[0, ..., 0], memory[0, ..., 1])
        t.forward(memory[0, ..., 0], memory[1, ..., 0])
        assert np.array_equal(memory[0, ..., 1], memory[0, ..., 0])
        assert np.array_equal(memory[1, ..., 0], memory[0, ..., 0])
