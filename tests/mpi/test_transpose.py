"""Transposes between random divisions, compared with the whole field; values encode the global cell."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import (
    ClosedError,
    DecompositionError,
    ExchangeTimeoutError,
    FieldError,
    HaloxError,
    MismatchError,
    PathError,
)
from tests.mpi.bad_input import Table, check_error, read_only
from tests.mpi.conftest import agree
from tests.mpi.limits import short_waits
from tests.oracle import (
    RECORD,
    allocated,
    cast,
    divide,
    factorisations,
    host,
    poison,
    same_values,
)
from tests.support import trials

World = MPI.Intracomm
SEED = 20261120
DTYPES = ["c16", "f8", "f4", "c8", "i1", "i8", "u2", "?", RECORD]
ALLOCATIONS = ["grid", "C", "F", "turned", "backwards", "part"]


@dataclass
class Side:
    """One grid of a case, and the layout of its arrays."""

    procs: tuple[int, ...]
    blocks: list[tuple[int, ...] | None]
    halo: tuple[tuple[int, int], ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    allocation: str


@dataclass
class Case:
    """A field on two grids; axis k of b is axis ``axes[k]`` of a."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    periodic: tuple[bool, ...]
    staggered: tuple[int, ...]
    dtype: np.dtype[Any]
    a: Side
    b: Side

    @property
    def back(self) -> tuple[int, ...]:
        return tuple(np.argsort(self.axes).tolist())


def random_case(rng: np.random.Generator, ranks: int, dtypes: list[Any]) -> Case:
    ndim = int(rng.integers(1, 5))
    choices = factorisations(ranks, ndim)
    procs_a, procs_b = (choices[int(rng.integers(len(choices)))] for _ in "ab")
    natural = tuple(range(ndim))
    axes = tuple(int(k) for k in rng.permutation(ndim)) if rng.integers(2) else natural
    back = np.argsort(axes)
    most = {1: 60, 2: 20, 3: 9, 4: 5}[ndim]
    least = [max(procs_a[i], procs_b[back[i]]) for i in natural]
    shape = tuple(int(rng.integers(n, max(n, most) + 1)) for n in least)
    periodic = tuple(bool(b) for b in rng.integers(2, size=ndim))
    staggered = tuple(i for i in natural if rng.integers(4) == 0)
    components = tuple(int(n) for n in rng.integers(1, 4, size=int(rng.integers(0, 3))))

    def side(procs: tuple[int, ...], cells: list[int]) -> Side:
        blocks: list[tuple[int, ...] | None] = []
        for n, p in zip(cells, procs, strict=True):
            bounds = np.sort(rng.permutation(np.arange(1, n))[: p - 1])
            sizes = tuple(int(m) for m in np.diff([0, *bounds, n]))
            blocks.append(sizes if rng.integers(2) else None)
        smallest = [min(s) if s else n // p for n, p, s in zip(cells, procs, blocks, strict=True)]
        # The high halo is one cell narrower, since a staggered field needs room for its shared point.
        halo = tuple(
            (int(rng.integers(0, min(s, 2) + 1)), int(rng.integers(0, min(s, 3)))) for s in smallest
        )
        first = int(rng.integers(0, len(components) + 1))
        allocation = ALLOCATIONS[int(rng.integers(len(ALLOCATIONS)))]
        return Side(procs, blocks, halo, components[:first], components[first:], allocation)

    dtype = np.dtype(dtypes[int(rng.integers(len(dtypes)))])
    a, b = side(procs_a, list(shape)), side(procs_b, [shape[axis] for axis in axes])
    return Case(shape, axes, periodic, staggered, dtype, a, b)


def make_grid(
    case: Case, side: Side, axes: tuple[int, ...], comm: World, device: str
) -> halox.Grid:
    return halox.Grid(
        [case.shape[axis] for axis in axes],
        halo=side.halo,
        periodic=[case.periodic[axis] for axis in axes],
        proc_shape=side.procs,
        blocks=side.blocks,
        comm=comm,
        device=device,
    )


def make_field(case: Case, grid: halox.Grid, side: Side, axes: tuple[int, ...]) -> Any:
    options = {
        "components": side.before,
        "components_after": side.after,
        "staggered": tuple(k for k, axis in enumerate(axes) if axis in case.staggered),
    }
    field = grid.empty(case.dtype, **options)
    if side.allocation == "grid":
        return field
    return grid.declare(allocated(grid, field, side.allocation), **options)


def before_and_after(
    case: Case, grid: halox.Grid, side: Side, axes: tuple[int, ...], salt: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's array, all poison, and a copy with the values of the cells that it owns."""
    components = side.before + side.after
    points = [n + (i in case.staggered and not case.periodic[i]) for i, n in enumerate(case.shape)]
    ids = np.arange(math.prod(components) * math.prod(points)).reshape(*components, *points)
    whole = cast(ids * 7 + salt, case.dtype)
    whole = whole.transpose(*range(len(components)), *(len(components) + axis for axis in axes))
    shape, interior, index = [], [], []
    for k, axis in enumerate(axes):
        n, (low, high) = case.shape[axis], side.halo[k]
        sizes = side.blocks[k] or divide((n,), (side.procs[k],))[0]
        part = grid.coords[k]
        start, stop = sum(sizes[:part]), sum(sizes[: part + 1])
        extra = axis in case.staggered
        closes = part == side.procs[k] - 1 and not case.periodic[axis]
        owned = stop - start + (extra and closes)
        shape.append(low + stop - start + extra + high)
        interior.append(slice(low, low + owned))
        index.append(slice(start, start + owned))
    first = len(side.before)
    piece = whole[(slice(None),) * len(components) + tuple(index)]
    # Move the components that belong behind the grid axes.
    behind = range(first, len(components))
    piece = piece.transpose(*range(first), *range(len(components), piece.ndim), *behind)
    empty = poison((*side.before, *shape, *side.after), case.dtype)
    full = empty.copy()
    full[(slice(None),) * first + tuple(interior)] = piece
    return empty, full


def check(case: Case, comm: World, device: str = "cpu") -> None:
    """Transpose forward and backward with three sets of values, by calls and by a plan."""
    natural = tuple(range(len(case.shape)))
    with (
        make_grid(case, case.a, natural, comm, device) as a,
        make_grid(case, case.b, case.axes, comm, device) as b,
        halox.Transpose(a, b, axes=None if case.axes == natural else case.axes) as t,
    ):
        u, v = make_field(case, a, case.a, natural), make_field(case, b, case.b, case.axes)
        plan = t.plan(u, v)
        for salt in range(3):
            empty_u, full_u = before_and_after(case, a, case.a, natural, salt)
            empty_v, full_v = before_and_after(case, b, case.b, case.axes, salt)
            assert agree(u.shape == empty_u.shape and v.shape == empty_v.shape, comm), case
            assert not same_values(empty_v, full_v), "nothing is to be moved"
            u[...], v[...] = a.xp.asarray(full_u), b.xp.asarray(empty_v)
            comm.Barrier()
            if salt == 1:
                plan.start()
                plan.finish()
            else:
                t.forward(u, v)
            right = same_values(host(v), full_v) and same_values(host(u), full_u)
            assert agree(right, comm), (SEED, case, salt, "forward")
            u[...] = a.xp.asarray(empty_u)
            comm.Barrier()
            t.backward(v, u)
            right = same_values(host(v), full_v) and same_values(host(u), full_u)
            assert agree(right, comm), (SEED, case, salt, "backward")


@pytest.mark.geometry
@pytest.mark.parametrize("number", range(trials(60)))
def test_random_divisions(number: int, comm: World) -> None:
    rng = np.random.default_rng([SEED, 17, comm.size, number])
    check(random_case(rng, comm.size, DTYPES), comm)


@pytest.mark.geometry
@pytest.mark.parametrize("number", range(20))
def test_without_shared_memory(number: int, comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each rank as a separate node, all messages use MPI requests."""
    monkeypatch.setenv("HALOX_NODE", "rank")
    rng = np.random.default_rng([SEED, 19, comm.size, number])
    check(random_case(rng, comm.size, DTYPES), comm)


def pencils(shape: tuple[int, ...], comm: World, **options: Any) -> list[halox.Grid]:
    """Return three grids of the same cells: undivided along x, along y, and along z."""
    p, q = sorted(MPI.Compute_dims(comm.size, 2))
    return [
        halox.Grid(shape, halo=0, proc_shape=procs, comm=comm, **({"device": "cpu"} | options))
        for procs in ((1, p, q), (p, 1, q), (p, q, 1))
    ]


def owned_part(grid: halox.Grid, whole: np.ndarray) -> np.ndarray:
    return whole[grid.owned]


@pytest.mark.geometry
def test_pencils_round_a_ring_of_three(comm: World) -> None:
    """From x to y to z to x: every transpose is right, and the third restores the first field."""
    shape = (9, 10, 11)
    whole = (np.arange(990.0) + 0.5j).reshape(shape)
    grids = pencils(shape, comm)
    fields = [grid.zeros("c16") for grid in grids]
    fields[0][...] = owned_part(grids[0], whole)
    for step in range(3):
        source, target = step, (step + 1) % 3
        fields[target][...] = -1
        comm.Barrier()
        with halox.Transpose(grids[source], grids[target]) as t:
            t.forward(fields[source], fields[target])
        right = np.array_equal(fields[target], owned_part(grids[target], whole))
        assert agree(bool(right), comm), step
    for grid in grids:
        grid.close()


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


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 2, 1), (1, 2, 0), (2, 1, 0)])
@pytest.mark.parametrize("own", [False, True])
def test_large_fields_are_read_in_place(comm: World, axes: tuple[int, ...], own: bool) -> None:
    """Large fields of a grid are read in place, in tiles if the axes are permuted; a user's array is packed."""
    shape, n = (136, 68, 130), comm.size  # runs of 34 x 8 bytes or more
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
        in_place = {"copy", "direct"} if n > 1 else {"copy"}
        assert ways[0] == in_place
        # Other ranks cannot read a user's array in place.
        assert "direct" not in ways[1] if own else ways[1] == in_place
        for _ in range(3):
            v[...], before = -1, u.copy()
            plans[0]()
            forth = np.array_equal(v, whole.transpose(axes)[b.owned])
            u[...] = -1
            plans[1]()
            assert agree(forth and np.array_equal(u, before), comm)
            u += comm.size
            whole = whole + comm.size


@pytest.mark.geometry
def test_fft_by_pencils_equals_the_serial_one(comm: World) -> None:
    """Transforms along three axes in turn, each contiguous after a transpose, equal NumPy's transform of the whole."""
    shape = (12, 9, 10)
    rng = np.random.default_rng(SEED)
    whole = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    p, q = MPI.Compute_dims(comm.size, 2)

    def grid(order: tuple[int, ...]) -> halox.Grid:
        cells = [shape[axis] for axis in order]
        return halox.Grid(cells, halo=0, proc_shape=(p, q, 1), comm=comm, device="cpu")

    with (
        grid((0, 1, 2)) as along_z,
        grid((0, 2, 1)) as along_y,
        grid((1, 2, 0)) as along_x,
        halox.Transpose(along_z, along_y, axes=(0, 2, 1)) as first,
        halox.Transpose(along_y, along_x, axes=(2, 1, 0)) as second,
    ):
        w, v, u = (g.zeros("c16") for g in (along_z, along_y, along_x))
        w[...] = np.fft.fft(whole[along_z.owned])
        first.forward(w, v)
        v[...] = np.fft.fft(v)
        second.forward(v, u)
        u[...] = np.fft.fft(u)
        spectrum = along_x.gather(u)  # axes y, z, x
        if comm.rank == 0:
            assert spectrum is not None
            wanted = np.fft.fftn(whole).transpose(1, 2, 0)
            assert np.allclose(spectrum, wanted, rtol=1e-12, atol=1e-11)
        u[...] = np.fft.ifft(u)
        second.backward(u, v)
        v[...] = np.fft.ifft(v)
        first.backward(v, w)
        w[...] = np.fft.ifft(w)
        assert agree(bool(np.allclose(w, whole[along_z.owned], rtol=0, atol=1e-13)), comm)


@pytest.mark.geometry
def test_rows_to_blocks_of_any_size_in_one_dimension(comm: World) -> None:
    """From even parts to one large part and many parts of one cell, as for load balancing."""
    n, size = 40, comm.size
    blocks = [(n - size + 1, *(1,) * (size - 1))]
    with (
        halox.Grid(n, halo=2, comm=comm, device="cpu") as a,
        halox.Grid(n, halo=1, blocks=blocks, comm=comm, device="cpu") as b,
        halox.Transpose(a, b) as t,
    ):
        u, v = a.zeros("i8"), b.zeros("i8")
        a.interior(u)[...] = np.arange(n)[a.owned]
        t.forward(u, v)
        assert agree(b.interior(v).tolist() == np.arange(n)[b.owned].tolist(), comm)
        wanted = v.sum() == np.arange(n)[b.owned].sum()
        assert agree(bool(wanted), comm), "the halo was written"


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
        for step in range(30):
            whole = np.arange(n * 50.0).reshape(n, 50) + step
            u[...] = whole[a.owned]
            t.forward(u, v)
            assert np.array_equal(v, whole[b.owned]), step


def test_structs_whose_fields_are_out_of_order(comm: World) -> None:
    dtype = np.dtype({"names": ["a", "b"], "formats": ["f8", "f4"], "offsets": [8, 0]})
    options: dict[str, Any] = {"comm": comm, "device": "cpu", "halo": 0}
    with (
        halox.Grid((4 * comm.size, 6 * comm.size), proc_shape=(0, 1), **options) as a,
        halox.Grid((4 * comm.size, 6 * comm.size), proc_shape=(1, 0), **options) as b,
        halox.Transpose(a, b) as transpose,
    ):
        u, v = a.zeros(dtype), b.zeros(dtype)
        i, j = a.indices()
        u["a"], u["b"] = i, j
        transpose.forward(u, v)
        i, j = b.indices()
        assert np.all(v["a"] == i) and np.all(v["b"] == j)


def test_plans_are_found_again_and_die_with_their_arrays(comm: World) -> None:
    a, b, _ = pencils((8, 8, 8), comm)
    with a, b, halox.Transpose(a, b) as t:
        state, v = np.zeros((3, *a.padded_shape)), b.zeros()
        for step in range(4):
            for k in range(3):
                state[k] = step + k
                t.forward(state[k], v)  # a new view each time
                assert agree(bool((v == step + k).all()), comm)
        assert len(t._plans) == 3
        t.backward(v, state[0])
        assert len(t._plans) == 4
        del state
        gc.collect()
        t.forward(a.ones(), v)
        gc.collect()
        t._plans.sweep()
        assert len(t._plans) == 0 and agree(bool((v == 1).all()), comm)


@pytest.mark.ranks(1, 2, 3, 4)
def test_plans_release_their_memory(comm: World) -> None:
    a, b, _ = pencils((8, 8, 8), comm)
    with a, b:
        u, v = a.zeros(), b.zeros()
        for number in range(100):
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


def making(arguments: dict[str, Any] | None = None, **options: Any) -> Callable[[World], None]:
    def call(comm: World) -> None:
        a, b = two(comm, **options)
        with a, b:
            halox.Transpose(a, b, **(arguments or {}))

    return call


def moving(
    make: Callable[[halox.Grid, halox.Grid], tuple[Any, Any]], direction: str = "forward"
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
    n = comm.size
    with (
        halox.Grid((n, n), comm=comm, device="cpu") as a,
        halox.Grid((n, n), comm=comm, device="cpu") as b,
    ):
        halox.Transpose(a, b, axes=(1, 0) if comm.rank == n - 1 else None)


def to_no_grid(comm: World) -> None:
    a, b = two(comm)
    with a, b:
        halox.Transpose(a, None if comm.rank == 1 else b)  # type: ignore[arg-type]


def components_differ(comm: World) -> None:
    """Pass arrays of equal size and different components, which the handshake alone could not distinguish."""
    last = comm.rank == comm.size - 1
    extents = (3, 2) if last else (2, 3)
    moving(lambda a, b: (a.zeros(components=extents), b.zeros(components=extents)))(comm)


def closed(comm: World) -> None:
    a, b = two(comm)
    with a, b:
        t = halox.Transpose(a, b)
        u, v = a.zeros(), b.zeros()
        t.forward(u, v)
        t.close()
        t.forward(u, v)


def of_closed_grid(which: int) -> Callable[[World], None]:
    def call(comm: World) -> None:
        grids = two(comm)
        grids[which].close()
        with grids[1 - which]:
            halox.Transpose(*grids)

    return call


def grid_closed_under_it(comm: World) -> None:
    a, b = two(comm)
    with b:
        t = halox.Transpose(a, b)
        u, v = a.zeros(), b.zeros()
        t.forward(u, v)
        a.close()
        t.forward(u, v)


def in_place(comm: World) -> None:
    a, _ = two(comm)
    with a, halox.Transpose(a, a) as t:
        u = a.zeros()
        t.forward(u, u)


TABLE: Table = {
    "a transpose of what is no grid": (
        lambda c: halox.Transpose(3, 4),  # type: ignore[arg-type]
        HaloxError,
        "grid_a",
    ),
    "a transpose to what is no grid on one rank >1": (to_no_grid, HaloxError, "grid_b"),
    "a transpose between other cells": (making(shape=(40, 41)), DecompositionError, "grid_b"),
    "a transpose between other numbers of axes": (
        making(shape=(40,), proc_shape=None),
        DecompositionError,
        "grid_b",
    ),
    "axes that are not a permutation": (making({"axes": (0, 2)}), DecompositionError, "axes"),
    "axes that do not fit the shapes": (making({"axes": (1, 0)}), DecompositionError, "axes"),
    "axes that differ between ranks >1": (axes_differ, MismatchError, "axes"),
    "a transpose between other ranks >1": (alone, MismatchError, "grid_b"),
    "a transpose between ranks in another order >1": (other_order, MismatchError, "grid_a"),
    "a transpose of a closed grid": (of_closed_grid(0), ClosedError, "closed"),
    "a transpose to a closed grid": (of_closed_grid(1), ClosedError, "closed"),
    "a closed transpose": (closed, ClosedError, "the transpose is closed"),
    "a transpose whose grid was closed": (grid_closed_under_it, ClosedError, "closed"),
    "a transpose of an array of the wrong shape": (
        moving(lambda a, b: (np.zeros((9, 9, 9)), b.zeros())),
        FieldError,
        "grid_a",
    ),
    "a transpose into a list": (moving(lambda a, b: (a.zeros(), [[0.0]])), FieldError, "grid_b"),
    "a transpose into a list on one rank >1": (
        moving(lambda a, b: (a.zeros(), [[0.0]] if a.rank == 1 else np.zeros(b.padded_shape))),
        FieldError,
        "grid_b",
    ),
    "a transpose into another dtype": (
        moving(lambda a, b: (a.zeros("f8"), b.zeros("c16"))),
        FieldError,
        "dtype",
    ),
    "a transpose into other components": (
        moving(lambda a, b: (a.zeros(components=3), b.zeros(components=2))),
        FieldError,
        "component",
    ),
    "a transpose into other staggering": (
        moving(lambda a, b: (a.zeros(staggered=0), b.zeros(staggered=1))),
        FieldError,
        "staggered",
    ),
    "a transpose in place": (in_place, FieldError, "u and v share memory"),
    "a transpose by a path that there is not": (making({"path": "pigeon"}), PathError, "path"),
    "a transpose into a read-only array": (
        moving(lambda a, b: (a.zeros(), read_only(b))),
        FieldError,
        "read-only",
    ),
    "a transpose back into a read-only array": (
        moving(lambda a, b: (read_only(a), b.zeros()), "backward"),
        FieldError,
        "read-only",
    ),
    "a transpose into a dtype that differs between ranks >1": (
        moving(
            lambda a, b: tuple(g.zeros("f4" if a.rank == a.size - 1 else "f8") for g in (a, b))  # type: ignore[arg-type,return-value]
        ),
        MismatchError,
        "dtype",
    ),
    "components that differ between ranks >1": (components_differ, MismatchError, "layout"),
}


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


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("node", ["", "rank"])
@pytest.mark.full
def test_a_rank_that_does_not_come(node: str, comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_NODE", node)
    group = comm.Dup()
    a, b = two(group)
    u, v = a.zeros(), b.zeros()
    t = halox.Transpose(a, b)
    t.forward(u, v)
    if comm.rank == 0:
        text = r"rank 0 has waited .*rank"
        with short_waits(), pytest.raises(ExchangeTimeoutError, match=text):
            t.forward(u, v)
    comm.Barrier()
