"""Bad input: all ranks raise an error of one class, none hangs, and the grid stays usable.

The tables have a call, the class of its error, and a word of the error's text.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.lib.stride_tricks import as_strided

import halox
from halox import datatypes as dt
from halox.errors import (
    CheckpointError,
    ClosedError,
    DatatypeError,
    DecompositionError,
    DeviceError,
    ExchangeTimeoutError,
    FieldError,
    HaloxError,
    MismatchError,
    MissingPackageError,
    PathError,
    StateError,
)
from tests.mpi.bad_input import frames, odd_on, raised_by_all, read_only
from tests.mpi.conftest import come_together
from tests.mpi.limits import short_waits
from tests.support import full

World = MPI.Intracomm
Odd = Callable[[Any, Any], Any]

LARGE = np.finfo("f8").max
FRAMES = 4
"""Most frames of halox in the traceback of a user's error."""


def make_grid(comm: World, shape: Any = None, **options: Any) -> halox.Grid:
    options = {"periodic": True, "device": "cpu", "comm": comm} | options
    return halox.Grid(shape or (4 * comm.size, 6), **options)


def sum_of_own_faces(comm: World) -> None:
    """Only the last rank has more faces than cells."""
    with make_grid(comm, periodic=False) as grid:
        grid.sum(grid.interior(grid.ones(staggered=0)))


def check_usable(grid: halox.Grid) -> None:
    u = grid.ones()
    grid.exchange(u)
    assert grid.sum(u) == 24 * grid.size


def line(value: object) -> str | None:
    """Return the line of a call in its table, for the name of the test."""
    return f"line {value.__code__.co_firstlineno}" if hasattr(value, "__code__") else None


def cases(table: list[tuple[Callable[..., Any], type[HaloxError], str]]) -> Any:
    return pytest.mark.parametrize(("call", "kind", "word"), table, ids=line)


# Grids


def on_cart(comm: World, dims: tuple[int, ...], **options: Any) -> None:
    """Make a grid on a Cartesian communicator with periods (True, False); MPI chooses dims that are 0."""
    cart = comm.Create_cart(MPI.Compute_dims(comm.size, list(dims)), (True, False)[: len(dims)])
    try:
        halox.Grid((4 * comm.size, 6), comm=cart, device="cpu", **options)
    finally:
        cart.Free()


def with_variable(comm: World, name: str, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, text)
        with make_grid(comm) as grid:
            grid.exchange(grid.zeros())


@cases(
    [
        (lambda c: make_grid(c, (4,) * 5), DecompositionError, "grid_shape"),
        (lambda c: make_grid(c, (4, 0)), DecompositionError, "grid_shape"),
        (lambda c: make_grid(c, (4.5, 4)), DecompositionError, "grid_shape"),
        (lambda c: make_grid(c, halo=-1), DecompositionError, "halo"),
        (lambda c: make_grid(c, halo=(1, 1, 1)), DecompositionError, "halo"),
        (lambda c: make_grid(c, halo=2**40), DecompositionError, "halo"),
        (lambda c: make_grid(c, periodic=(True,) * 3), DecompositionError, "periodic"),
        (lambda c: make_grid(c, boundary=lambda slab, axis: None), FieldError, "boundary"),
        (sum_of_own_faces, FieldError, "grid.interior"),
        (lambda c: make_grid(c, proc_shape=(c.size + 1, 1)), DecompositionError, "proc_shape"),
        (lambda c: make_grid(c, blocks=((5,) * c.size, None)), DecompositionError, "blocks"),
        (lambda c: make_grid(c, corners="no"), DecompositionError, "corners"),
        (lambda c: make_grid(c, placement=1), DecompositionError, "placement"),
        (lambda c: make_grid(c, device="tpu"), DeviceError, "device"),
        (lambda c: halox.Grid((4, 4), comm=42), HaloxError, "comm"),
        (lambda c: halox.Grid((4, 4), comm=MPI.COMM_NULL), HaloxError, "COMM_NULL"),
        (lambda c: on_cart(c, (0,)), DecompositionError, "comm"),
        (lambda c: on_cart(c, (0, 1), periodic=True), DecompositionError, "periodic"),
        (lambda c: on_cart(c, (0, 1), blocks=(None, (2, 4))), DecompositionError, "blocks[1]"),
        (lambda c: with_variable(c, "HALOX_TIMEOUT", "soon"), HaloxError, "HALOX_TIMEOUT"),
        (lambda c: with_variable(c, "HALOX_DEBUG", "off"), HaloxError, "HALOX_DEBUG"),
        (lambda c: with_variable(c, "HALOX_DEBUG_HALO", "yes"), HaloxError, "HALOX_DEBUG_HALO"),
        (lambda c: with_variable(c, "HALOX_PATH", "host/ll"), PathError, "HALOX_PATH"),
        (lambda c: make_grid(c, path="pigeon"), PathError, "pigeon"),
        (
            lambda c: make_grid(c, (4 * c.size, 7), proc_shape=(c.size, 1)).coarsen(2),
            DecompositionError,
            "axis 1",
        ),
    ]
)
@pytest.mark.usually(1, 2)
def test_grids(call: Callable[[World], Any], kind: Any, word: str, comm: World) -> None:
    raised_by_all(comm, kind, word, lambda: call(comm))


@cases(
    [
        (lambda c, odd: make_grid(c, periodic=odd(False, True)), MismatchError, "periodic"),
        (lambda c, odd: make_grid(c, odd((8, 7), (8, 6))), MismatchError, "grid_shape"),
        (lambda c, odd: make_grid(c, halo=odd(2, 1)), MismatchError, "halo"),
        (lambda c, odd: make_grid(c, halo=odd(-3, 1)), DecompositionError, "halo"),
        (lambda c, odd: with_variable(c, "HALOX_TIMEOUT", odd("soon", "60")), HaloxError, "soon"),
        (lambda c, odd: with_variable(c, "HALOX_DEBUG", odd("off", "")), HaloxError, "off"),
        (lambda c, odd: make_grid(c, path=odd("ipc", "host")), MismatchError, "path"),
        (
            lambda c, odd: on_cart(c, (0, 1), proc_shape=odd((1, c.size), None)),
            DecompositionError,
            "proc_shape",
        ),
        (
            lambda c, _: make_grid(c, blocks=([3, *[4] * (c.size - 2), 5], None)).coarsen(2),
            DecompositionError,
            "blocks",
        ),
        (
            lambda c, _: make_grid(
                c, (4 * c.size - 4, 6), blocks=([3, 1, *[4] * (c.size - 2)], None)
            ).coarsen(2, even=False),
            DecompositionError,
            "fewer ranks",
        ),
    ]
)
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usually(3)
def test_grids_of_one_rank(
    call: Callable[[World, Odd], Any], kind: Any, word: str, comm: World
) -> None:
    raised_by_all(comm, kind, word, lambda: call(comm, odd_on(comm)))


# Calls of a grid


class Raising:
    """An array of another library, which raises in every query."""

    def __dlpack_device__(self) -> Any:
        raise ZeroDivisionError("no device")


def new_array(grid: halox.Grid, dtype: Any = "f8", more: int = 0) -> np.ndarray:
    return np.zeros((grid.padded_shape[0] + more, *grid.padded_shape[1:]), dtype)


def strided(grid: halox.Grid, *strides: int) -> np.ndarray:
    """Return an array of a field's shape whose elements share memory."""
    return as_strided(np.zeros(999), grid.padded_shape, strides)


def sum_of_several_layouts(grid: halox.Grid) -> None:
    w, v = grid.ones(halo=((2, 1), (1, 1))), grid.ones(halo=((1, 2), (1, 1)))
    assert w.shape == v.shape
    grid.sum(2 * w)


def changed_later(grid: halox.Grid, change: Callable[[np.ndarray], object]) -> None:
    u = new_array(grid)
    grid.exchange(u)
    change(u)
    grid.exchange(u)


def accumulated(grid: halox.Grid, *views: Callable[[Any], Any]) -> None:
    u = grid.ones(components=2)
    grid.accumulate(*(view(u) for view in views))


def product(grid: halox.Grid, apply: Any, fields: Any) -> None:
    made = grid.linear_operator(apply, fields)
    made @ np.ones(made.shape[0])


def started_twice(grid: halox.Grid) -> None:
    plan = grid.plan(grid.zeros())
    plan.start()
    try:
        plan.start()
    finally:
        plan.finish()


def closed_plan(grid: halox.Grid) -> None:
    plan = grid.plan(grid.zeros())
    plan.close()
    plan()


def at_point(grid: halox.Grid) -> halox.Points:
    return halox.Points(grid, [(1, 1)])


@pytest.fixture(scope="module")
def grid() -> Iterator[halox.Grid]:
    with make_grid(MPI.COMM_WORLD) as made:
        yield made


@cases(
    [
        (lambda g: g.zeros(object), FieldError, "dtype"),
        (lambda g: g.zeros("no such type"), FieldError, "dtype"),
        (lambda g: g.zeros(components=0), FieldError, "components"),
        (lambda g: g.zeros(components=(..., 2, ...)), FieldError, "components"),
        (lambda g: g.zeros(components_after=2), FieldError, "components=(2, ..., 3)"),
        (lambda g: g.zeros(stagered=0), FieldError, "write staggered"),
        (lambda g: g.zeros(staggered=7), FieldError, "staggered"),
        (lambda g: g.zeros(colour="red"), FieldError, "colour"),
        (lambda g: g.full(np.ma.masked), FieldError, "value"),
        (lambda g: g.declare(np.zeros(3)), FieldError, "array"),
        (lambda g: g.interior(np.zeros(3)), FieldError, "does not fit"),
        (lambda g: g.indices(staggered=5), FieldError, "staggered"),
        (lambda g: g.exchange(), FieldError, "field"),
        (lambda g: g.exchange(3), FieldError, "field"),
        (lambda g: g.exchange(g.interior(g.zeros(components=3))), FieldError, "halo"),
        (lambda g: g.exchange(new_array(g, more=1)), FieldError, "does not fit"),
        (lambda g: g.exchange(strided(g, 0, 8)), FieldError, "field"),
        (lambda g: g.exchange(strided(g, 8, 8)), FieldError, "field"),
        (lambda g: g.exchange(g.zeros(), corners=1), FieldError, "corners"),
        (lambda g: g.exchange(g.zeros(), axes="w"), FieldError, "axes: the grid axes are 'x', 'y'"),
        (lambda g: g.accumulate(g.zeros(), axes=()), FieldError, "axes"),
        (lambda g: g.plan(g.zeros(), axes=("x", 2)), FieldError, "axes"),
        (lambda g: [g.exchange(g.ones(), axes=each) for each in (1, True)], FieldError, "axes"),
        (lambda g: g.sum("2 * out", out=g.ones()), FieldError, "'out' is a parameter"),
        (lambda g: changed_later(g, lambda u: u.setflags(write=False)), FieldError, "read-only"),
        (lambda g: changed_later(g, lambda u: setattr(u, "shape", (-1,))), FieldError, "fit"),
        (lambda g: g.accumulate(g.zeros("?")), FieldError, "accumulate"),
        (lambda g: g.accumulate(np.zeros(3)), FieldError, "does not fit"),
        (lambda g: accumulated(g, lambda u: u, lambda u: u), FieldError, "share memory"),
        (lambda g: accumulated(g, lambda u: u, lambda u: u[1]), FieldError, "share memory"),
        (lambda g: accumulated(g, lambda u: u, lambda u: u[:, ::-1]), FieldError, "0 and 1"),
        (lambda g: g.plan(), FieldError, "field"),
        (lambda g: g.plan(g.zeros()).finish(), StateError, "start"),
        (started_twice, StateError, "finish"),
        (closed_plan, ClosedError, "closed"),
        (lambda g: g.plan(g.zeros()).device_handle, FieldError, "plan.device_handle"),
        (sum_of_several_layouts, FieldError, "grid.declare"),
        (lambda g: g.sum(3), FieldError, "field"),
        (lambda g: g.sum(g.zeros([("a", "f8")])), FieldError, "no meaning"),
        (lambda g: g.sum(g.ones(), axis=7), FieldError, "axis"),
        (lambda g: g.sum(g.ones(), axis=0, reproducible=True), FieldError, "reproducible"),
        (lambda g: g.norm(g.ones(), reproducible="yes"), FieldError, "reproducible"),
        (lambda g: g.min(g.zeros("c16")), FieldError, "min"),
        (lambda g: g.std(3), FieldError, "field"),
        (lambda g: g.argmin(g.ones("c8")), FieldError, "argmin"),
        (lambda g: g.histogram(g.ones(), -1), FieldError, "bins"),
        (lambda g: g.random(-1), FieldError, "seed"),
        (lambda g: g.allreduce(np.ones(3, "?"), "sum"), FieldError, "sum"),
        (lambda g: g.allreduce(np.ones(3), "logical_or"), FieldError, "logical_or"),
        (lambda g: g.allreduce(np.ones(3, ">f8")), FieldError, ">f8"),
        (lambda g: g.allreduce(np.ones(3, "f2")), FieldError, "float16"),
        (lambda g: g.allreduce(np.ones(3), ["sum"]), FieldError, "op"),
        (lambda g: g.allreduce(1.0, "prod", reproducible=True), FieldError, "reproducible"),
        (lambda g: g.gather(3), FieldError, "field"),
        (lambda g: g.gather(g.zeros(), root=g.size), FieldError, "root"),
        (lambda g: g.scatter(np.zeros(3)), FieldError, "whole"),
        (lambda g: g.scatter(np.ones(2 * g.grid_shape)), FieldError, "components="),
        (lambda g: g.save("/none/a", u=3), FieldError, "u"),
        (lambda g: g.load("/none/a"), CheckpointError, "/none/a"),
        (lambda g: g.coarsen(0), DecompositionError, "factor"),
        (lambda g: g.linear_operator(None, g.zeros()), FieldError, "apply"),
        (lambda g: g.linear_operator(print, g.zeros("i4")), FieldError, "fields"),
        (lambda g: g.locate([1]), FieldError, "points"),
        (lambda g: halox.Points(g, [1]), FieldError, "indices"),
        (lambda g: at_point(g).get(3), FieldError, "field"),
        (lambda g: at_point(g).add(3, 1), FieldError, "field"),
        (lambda g: halox.Transpose(g, 3), HaloxError, "grid_b"),
        (lambda g: halox.FFT("3"), HaloxError, "grid"),
        (lambda g: halox.FFT(g, axes=1).forward(new_array(g, "i8")), FieldError, "u"),
        (lambda g: halox.Allreduce(g.comm, 3, "f8", "median"), FieldError, "op"),
        (
            lambda g: halox.Allreduce(g.comm, 3, "f8", algorithm="hierarchical", reproducible=True),
            FieldError,
            "algorithm",
        ),
    ]
)
@pytest.mark.usually(1, 2)
def test_calls(call: Callable[[halox.Grid], Any], kind: Any, word: str, grid: halox.Grid) -> None:
    """Also: the traceback of a user's error is short, and has no second traceback."""
    error = raised_by_all(grid.comm, kind, word, lambda: call(grid))
    assert frames(error) <= FRAMES
    assert "".join(traceback.format_exception(error)).count("Traceback") == 1
    check_usable(grid)


# Calls that differ between ranks


def fields(grid: halox.Grid, number: int) -> list[Any]:
    return [grid.ones() for _ in range(number)]


def scattered(grid: halox.Grid, odd: Odd) -> None:
    whole = np.ones(grid.grid_shape) if grid.rank == 0 else None
    grid.scatter(whole, out=odd(strided(grid, 8, 8), new_array(grid)))


def transformed(grid: halox.Grid, odd: Odd) -> None:
    fft = halox.FFT(grid, axes=0)
    out = np.ones(fft.grid.padded_shape, "c16")
    fft.forward(fft.physical.zeros("c16"), odd(as_strided(out, strides=(8, 8)), out))


def overflowing(grid: halox.Grid, odd: Odd, strict: str) -> None:
    """Form a sum that overflows on one rank, where NumPy or Python is told to raise."""
    u = grid.ones()
    grid.interior(u)[:2] = odd(LARGE, 1)
    with strictly(odd(strict, "")):
        grid.sum(u)


@contextmanager
def strictly(strict: str) -> Iterator[None]:
    with (
        np.errstate(**({"all": "raise"} if strict == "errstate" else {})),
        warnings.catch_warnings(),
    ):
        if strict == "warnings":
            warnings.simplefilter("error")
        yield


@pytest.fixture(scope="module")
def several(request: pytest.FixtureRequest) -> Iterator[halox.Grid]:
    """A grid of several ranks, on one node, or on a node each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALOX_NODE", request.param)
        made = make_grid(MPI.COMM_WORLD.Dup())
    with made:
        yield made


DIFFERENT: list[tuple[Callable[[halox.Grid, Odd], Any], type[HaloxError], str]] = [
    (lambda g, odd: g.zeros(odd(object, "f8")), FieldError, "dtype"),
    (lambda g, odd: g.zeros_like(g.ones(), odd(("f8", (3,)), "f8")), FieldError, "dtype"),
    (lambda g, odd: g.zeros(components=odd(1 << 60, 1)), FieldError, "components"),
    (lambda g, odd: g.ones(components=odd((1,) * 65, 1)), FieldError, "components"),
    (lambda g, odd: g.empty(components=odd((10**6, 10**6), 1)), HaloxError, "memory"),
    (lambda g, odd: g.full(odd(300, 1), "u1"), FieldError, "value"),
    (lambda g, odd: g.full(odd(-1, 1), "u4"), FieldError, "value"),
    (lambda g, odd: g.full(odd(np.nan, 1), "i4"), FieldError, "value"),
    (lambda g, odd: g.full(odd("x", 1)), FieldError, "value"),
    (lambda g, odd: g.full(odd({}, 1)), FieldError, "value"),
    (lambda g, odd: g.full(odd((1, 2, 3), (1, 2)), "f8,i4"), FieldError, "value"),
    (lambda g, odd: g.full(odd([1] * 7, 1)), FieldError, "value"),
    (lambda g, odd: g.full_like(g.ones("f4"), odd(1j, 1)), FieldError, "value"),
    (lambda g, odd: g.exchange(odd([[0.0]], g.ones())), FieldError, "numpy.ndarray"),
    (lambda g, odd: g.exchange(odd(np.zeros((3, 3, 3)), g.ones())), FieldError, "padded_shape"),
    (lambda g, odd: g.exchange(odd(read_only(g), new_array(g))), FieldError, "read-only"),
    (lambda g, odd: g.exchange(odd(np.ma.ones((6, 8)), g.ones())), FieldError, "masked"),
    (lambda g, odd: g.exchange(odd(Raising(), g.ones())), FieldError, "ZeroDivisionError"),
    (lambda g, odd: g.gather(odd(Raising(), g.ones())), FieldError, "ZeroDivisionError"),
    (lambda g, odd: g.sum(odd(Raising(), g.ones())), FieldError, "ZeroDivisionError"),
    (lambda g, odd: g.exchange(new_array(g, odd("f4", "f8"))), MismatchError, "f8"),
    (lambda g, odd: g.exchange(*fields(g, 2)[: odd(1, 2)]), MismatchError, "rank"),
    (lambda g, odd: g.exchange(*fields(g, 2)[:: odd(1, -1)]), MismatchError, "field"),
    (
        lambda g, odd: g.exchange(np.zeros(odd((2, *g.padded_shape), (*g.padded_shape, 2)))),
        MismatchError,
        "field",
    ),
    (lambda g, odd: g.plan(g.ones(), path=odd("host", None)), MismatchError, "path"),
    (lambda g, odd: g.plan(g.ones()).measure(odd(0, 3)), HaloxError, "repeats"),
    (lambda g, odd: g.plan(g.ones()).measure(odd(2**31, 3)), HaloxError, "repeats"),
    (lambda g, odd: g.plan(g.ones()).measure(odd(2, 3)), MismatchError, "repeats"),
    (lambda g, odd: g.sum(g.ones(odd("f8", "i8"))), MismatchError, "int64"),
    (
        lambda g, odd: g.sum(odd(g.ones(components=3), g.ones(components=(..., 3)))),
        MismatchError,
        "components",
    ),
    (lambda g, odd: g.sum(g.ones(), reproducible=odd(True, False)), MismatchError, "reproducible"),
    (lambda g, odd: odd(g.max, g.sum)(g.ones()), MismatchError, "max"),
    (lambda g, odd: odd(g.allreduce, g.sum)(g.ones()), MismatchError, "allreduce"),
    (lambda g, odd: g.sum("a + b", a=g.ones(), b=odd(np.ones(5), g.ones())), FieldError, "b"),
    (lambda g, odd: g.sum(odd("a + 1", "a + 2"), a=g.ones()), MismatchError, "a + 1"),
    (lambda g, odd: overflowing(g, odd, "errstate"), HaloxError, "FloatingPointError"),
    (lambda g, odd: overflowing(g, odd, "warnings"), HaloxError, "RuntimeWarning"),
    (lambda g, odd: g.allreduce(np.ones(3, odd("i8", "f8"))), MismatchError, "dtype"),
    (lambda g, odd: g.allreduce(np.ones(odd((4, 1), 4))), MismatchError, "shape"),
    (lambda g, odd: g.allreduce(np.ones(odd(9000, 4))), MismatchError, "shape"),
    (lambda g, odd: g.allreduce(np.ones(odd(4, 9000))), MismatchError, "shape"),
    (lambda g, odd: g.allreduce(1.0, odd("prod", "sum")), MismatchError, "prod"),
    (lambda g, odd: g.allreduce(1.0, odd("mean", "sum")), FieldError, "op"),
    (lambda g, odd: g.allreduce(1.0, reproducible=odd(True, False)), MismatchError, "reproducible"),
    (lambda g, odd: g.allreduce(odd("text", 1.0)), FieldError, "U4"),
    (lambda g, odd: g.allreduce(odd(np.ma.masked, 1.0)), FieldError, "array"),
    (lambda g, odd: g.allreduce(np.ones(4), out=np.ones(odd(3, 4))), FieldError, "out"),
    (lambda g, odd: g.gather(g.ones(odd("f8", "f4"))), MismatchError, "dtype"),
    (lambda g, odd: g.gather(g.ones(), root=odd(1, 0)), MismatchError, "root"),
    (scattered, FieldError, "share memory"),
    (transformed, FieldError, "out"),
    (lambda g, odd: g.coarsen(odd((2, 1), 2)), MismatchError, "factor"),
    (lambda g, odd: g.linear_operator(print, fields(g, 2)[: odd(1, 2)]), MismatchError, "number"),
    (lambda g, odd: product(g, lambda u, out: None, g.ones()), StateError, "dot products"),
]


@cases(DIFFERENT)
@pytest.mark.parametrize("several", ["", *full("rank")], indirect=True)
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usually(3)
def test_calls_of_one_rank(
    call: Callable[[halox.Grid, Odd], Any], kind: Any, word: str, several: halox.Grid
) -> None:
    raised_by_all(several.comm, kind, word, lambda: call(several, odd_on(several.comm)))
    check_usable(several)


@pytest.mark.ranks(2, 3)
@pytest.mark.usually(3)
@pytest.mark.parametrize("several", ["rank"], indirect=True)
def test_the_first_rank_is_the_odd_one(several: halox.Grid) -> None:
    """Some of the calls, on a node each."""
    for call, kind, word in DIFFERENT[::3]:
        odd = odd_on(several.comm, 0)
        raised_by_all(several.comm, kind, word, lambda: call(several, odd))  # noqa: B023


def test_targets_that_share_no_memory(grid: halox.Grid) -> None:
    """Elements that interleave, and components of one array, are accepted."""
    target = strided(grid, 56, 48)
    grid.scatter(np.ones(grid.grid_shape) if grid.rank == 0 else None, out=target)
    assert (target[1:-1, 1:-1] == 1).all()
    in_front, behind = grid.ones(components=2), grid.ones(components=(..., 2))
    grid.accumulate(in_front[0], in_front[1])
    grid.accumulate(behind[..., 0], behind[..., 1])


# Masks


def operated(x: Any) -> Any:
    pytest.importorskip("scipy")
    with halox.Grid(4, device="cpu", comm=MPI.COMM_SELF) as grid:
        return grid.linear_operator(lambda v, out: np.copyto(out, v), grid.ones()).matvec(x)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("field", lambda g, u, m: g.exchange(m(u))),
        ("array", lambda g, u, m: g.allreduce(m(np.ones(3)))),
        ("array", lambda g, u, m: g.allreduce(m(np.ones(9000)))),
        ("array", lambda g, u, m: g.allreduce(m(np.float64(1)))),
        ("indices", lambda g, u, m: halox.Points(g, m([[1.0, 2.0]]))),
        ("values", lambda g, u, m: halox.Points(g, [[1, 2]]).add(u, m([1.0]))),
        ("bins", lambda g, u, m: g.histogram(u, m([0.0, 1.0, 2.0]))),
        ("range", lambda g, u, m: g.histogram(u, 2, m([0.0, 1.0]))),
        ("s", lambda g, u, m: g.sum("s * u", s=m(np.float64(2)), u=u)),
        ("v", lambda g, u, m: g.sum("v + u", v=m(u), u=u)),
        ("x", lambda g, u, m: g.locate([[1, 2]], coords={"x": m(np.arange(4.0 * g.size))})),
        ("points", lambda g, u, m: g.locate(m([[1.0, 2.0]]))),
        ("boundary", lambda g, u, m: g.ones(boundary=("constant", m(2.0)[()]))),
        ("x", lambda g, u, m: operated(m(np.ones(4)))),
        ("displacements", lambda g, u, m: dt.indexed([1], m([1]), "f8")),
    ],
    ids=line,
)
@pytest.mark.usually(2)
def test_masked_arrays(argument: str, call: Callable[..., Any], comm: World) -> None:
    """A mask that was dropped would turn missing values into numbers; the same call without mask works."""

    def masked(values: Any) -> Any:
        return np.ma.masked if np.ndim(values) == 0 else np.ma.array(values, mask=True)

    with make_grid(comm, periodic=False) as grid:
        u = grid.ones()
        call(grid, u, np.asarray)
        raised_by_all(comm, FieldError, argument, lambda: call(grid, u, masked))


# Messages


def send(array: Any, datatype: Any = "f8", to: Any = None, **options: Any) -> Callable[..., Any]:
    """Return a function that sends an array to the next rank, which expects eight floats."""

    def call(comm: World) -> None:
        dest = (comm.rank + 1) % comm.size if to is None else to(comm)
        receive = halox.Recv(np.zeros(8), dt.contiguous(8, "f8"), (comm.rank - 1) % comm.size)
        halox.Exchange([halox.Send(array, datatype, dest, **options)], [receive], comm=comm)

    return call


def receive(*items: tuple[Any, Any]) -> Callable[[World], Any]:
    """Return a function that receives arrays, as some datatypes, from the same rank."""

    def call(comm: World) -> None:
        sends = [halox.Send(np.zeros(4), "f8", comm.rank, 4) for _ in items]
        halox.Exchange(sends, [halox.Recv(a, t, comm.rank) for a, t in items], comm=comm)

    return call


def of_mpi(comm: World, datatype: MPI.Datatype, *, is_freed: bool = False) -> None:
    if is_freed:
        datatype.Free()
    try:
        send(np.zeros(8), datatype)(comm)
    finally:
        if not is_freed:
            datatype.Free()


EIGHT, FOUR = dt.contiguous(8, "f8"), dt.contiguous(4, "f8")
SHARED = np.zeros(8)


@cases(
    [
        (lambda c: halox.Exchange([3], [], comm=c), FieldError, "sends[0]"),
        (
            lambda c: halox.Exchange([halox.Send(SHARED, EIGHT, 0)], [], comm=c),
            MismatchError,
            "send",
        ),
        (send(np.zeros(8), dt.contiguous(16, "f4")), MismatchError, "f4"),
        (send(np.zeros(8), EIGHT, tag=1), MismatchError, "tag"),
        (send(np.zeros(8), EIGHT, tag="red"), MismatchError, "sends[0].tag"),
        (send(np.zeros(8), EIGHT, lambda comm: comm.size), MismatchError, "sends[0].dest"),
        (send(np.zeros(8), count=-1), FieldError, "count"),
        (send(np.zeros(8), dt.vector(8, 1, 2, "f8")), FieldError, "bytes"),
        (send(np.zeros(8), dt.contiguous(1 << 59, "f8")), FieldError, "bytes"),
        (send(np.zeros(8), dt.vector(2, 1, -(1 << 58), "f8")), FieldError, "bytes"),
        (send(np.zeros((8, 6))[:, 1], count=8), FieldError, "sends[0].array"),
        (receive((SHARED, dt.hindexed_block(2, [0, 8], "f8"))), DatatypeError, "twice"),
        (lambda c: dt.vector(2, 1, 3, MPI.DOUBLE), DatatypeError, "mpi4py"),
        (
            lambda c: of_mpi(c, MPI.DOUBLE.Create_vector(2, 1, 3), is_freed=True),
            DatatypeError,
            "sends[0].datatype",
        ),
        (
            lambda c: of_mpi(
                c, MPI.DOUBLE.Create_darray(1, 0, [8], [MPI.DISTRIBUTE_BLOCK], [8], [1])
            ),
            DatatypeError,
            "sends[0].datatype",
        ),
    ]
)
@pytest.mark.usually(1, 2)
def test_messages(call: Callable[[World], Any], kind: Any, word: str, comm: World) -> None:
    raised_by_all(comm, kind, word, lambda: call(comm))


# States and machines


@pytest.mark.usually(1, 2)
def test_closed_grids(comm: World) -> None:
    grid = make_grid(comm)
    u = grid.zeros()
    plan = grid.plan(u)
    plan()
    grid.close()
    for call in (lambda: grid.exchange(u), plan, plan.measure):
        raised_by_all(comm, ClosedError, "closed", call)


@pytest.mark.usually(1, 2)
def test_between_start_and_finish(comm: World) -> None:
    with make_grid(comm) as grid:
        plan = grid.plan(grid.zeros())
        plan.start()
        raised_by_all(comm, StateError, "finish", plan.measure)
        raised_by_all(comm, StateError, "finish", plan.accumulate)
        raised_by_all(comm, StateError, "finish", lambda: plan.device_handle)
        plan.finish()


@pytest.mark.usually(1, 2)
def test_debugging_shows_all_frames(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_DEBUG", "1")
    with make_grid(comm) as grid:
        error = raised_by_all(comm, FieldError, "field", lambda: grid.exchange(3))
    assert frames(error) > FRAMES and isinstance(error.__cause__, HaloxError)


@pytest.mark.usually(1, 2)
def test_an_error_of_users_code_stays_as_the_cause(comm: World) -> None:
    with make_grid(comm) as grid:
        call = lambda: grid.exchange(Raising())  # noqa: E731
        cause = raised_by_all(comm, FieldError, "ZeroDivisionError", call).__cause__
    assert isinstance(cause, ZeroDivisionError)
    assert traceback.extract_tb(cause.__traceback__)[-1].name == "__dlpack_device__"


@pytest.mark.usually(1)
def test_missing_packages(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("cupy") is None:
        raised_by_all(comm, DeviceError, "cupy", lambda: make_grid(comm, device="gpu"))
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    raised_by_all(comm, MissingPackageError, "mpi4py", lambda: make_grid(comm))


# Sums that overflow between ranks


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("several", ["", "rank"], indirect=True)
@pytest.mark.parametrize("strict", ["errstate", "warnings"])
def test_combining_raises_nowhere(strict: str, several: halox.Grid) -> None:
    """A sum that overflows only between ranks is infinite on all, whatever a rank's warning settings are."""
    u = several.zeros()
    several.interior(u)[0, 0] = LARGE
    with strictly(strict if several.rank == 0 else ""):
        assert several.sum(u) == np.inf


# Ranks that do not come


@pytest.mark.ranks(2)
def test_after_a_failure(comm: World) -> None:
    """A rank whose call has failed makes no other call, and a rank that waits for it raises at once."""
    grid = make_grid(comm.Dup())
    u = np.zeros(grid.padded_shape)
    grid.exchange(u)
    if comm.rank == 1:
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            grid.exchange(u)
        with pytest.raises(StateError):
            grid.zeros()
    come_together(comm)
    if comm.rank == 0:
        grid.exchange(u)  # rank 1 has sent its cells before its timeout
        with pytest.raises(ExchangeTimeoutError):
            grid.exchange(u)
    come_together(comm)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("allocate", ["by the grid", "by the user", "without shared memory"])
@pytest.mark.full
def test_a_neighbour_that_does_not_come(
    allocate: str, comm: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits for an absent rank raises an error."""
    if allocate == "without shared memory":
        monkeypatch.setenv("HALOX_NODE", "rank")
    grid = make_grid(comm.Dup(), (4 * comm.size, 64), proc_shape=(comm.size, 1))
    u = np.zeros(grid.padded_shape) if allocate == "by the user" else grid.zeros()
    grid.exchange(u)
    if comm.rank == 0:
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            grid.exchange(u)
    come_together(comm)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("elements", [4, 4000])
@pytest.mark.full
def test_an_allreduce_that_a_rank_does_not_come_to(elements: int, comm: World) -> None:
    grid = make_grid(comm.Dup())
    ones = np.ones(elements)
    assert (grid.allreduce(ones) == comm.size).all()
    come_together(comm)
    if comm.rank < comm.size - 1:
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            grid.allreduce(ones)
    come_together(comm)


@pytest.mark.ranks(2, 3)
def test_a_new_dtype_on_one_rank(comm: World) -> None:
    grid = make_grid(comm.Dup())
    grid.exchange(new_array(grid))
    new = new_array(grid, odd_on(comm)("f4", "f8"))
    raised_by_all(comm, MismatchError, "plan", lambda: grid.exchange(new))


@pytest.mark.ranks(2, 3)  # on more, ranks that are not neighbours need not notice
def test_a_rank_that_makes_another_call(comm: World) -> None:
    """One rank makes a new plan while other ranks run the old plan: all raise, none hangs."""
    grid = make_grid(comm.Dup(), proc_shape=(comm.size, 1))
    u, v = grid.zeros(), grid.zeros()
    grid.exchange(u)
    with pytest.raises(MismatchError if comm.size == 2 else HaloxError):
        grid.exchange(v if comm.rank == 1 else u)
    come_together(comm)
