"""Reductions of expressions over all ranks, on the host and on simulated GPUs, against NumPy on the whole field."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError, MismatchError
from tests.fakes.fake_cupy import Array
from tests.mpi.bad_input import Table, check_error
from tests.mpi.conftest import agree
from tests.mpi.test_reproducible import device, field, plain
from tests.unit.reductions.reduction_oracle import same

__all__ = ["device"]  # a fixture

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usually(3)]


def whole(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    found = np.round(np.random.default_rng(seed).normal(size=(2, *shape)) * 9)
    return (found[0] + 1j * found[1] if np.dtype(dtype).kind == "c" else found[0]).astype(dtype)


@pytest.mark.part(2)
def test_results_are_numpys(device: str, comm: MPI.Intracomm) -> None:
    """Whole numbers, whose sums are exact in any order; each call three times, the last ones with a prepared launch."""
    shape = (3 * comm.size + 1, 4, 5)
    a, b, c, n = (whole(dtype, shape, k) for k, dtype in enumerate(("f8", "f4", "c16", "i4")))
    x = np.arange(shape[0])[:, None, None]
    wanted = {
        "mixed": ("(a - s * b) ** 2 + where(index_x > 2, n, -1)", "sum"),
        "complex": ("conj(c) * (c + a)", "sum"),
        "norm": ("a - b", "norm"),
        "least": ("n // 2 - index_z % 3", "min"),
        "count": ("(a > b) & (n != 0)", "sum"),
        "most": ("(a > b) & (n != 0)", "max"),
    }
    # Each call of a GPU's compiles another kernel.
    few = {key: wanted[key] for key in wanted if device == "cpu" or key in ("complex", "norm")}
    names = {"mixed": "abns", "complex": "ac", "norm": "ab", "least": "n", "count": "abn"}
    with halox.Grid(shape, proc_shape=(comm.size, 1, 1), comm=comm, device=device) as grid:
        fields = {name: field(grid, each) for name, each in zip("abcn", (a, b, c, n), strict=True)}
        for s in (2, 3.0, 2):
            value = (a - s * b.astype("f8")) ** 2 + np.where(x > 2, n, -1)
            both = (a > b) & (n != 0)
            results = {
                "mixed": value.sum(),
                "complex": (np.conj(c) * (c + a)).sum(),
                "norm": np.sqrt(((a - b) ** 2).sum()),
                "least": (n // 2 - np.arange(5) % 3).min(),
                "count": both.sum(),
                "most": both.max(),
            }
            given = fields | {"s": s}
            arguments = {key: {n: given[n] for n in names.get(key, "abn")} for key in wanted}
            texts, ops = ({key: pair[k] for key, pair in wanted.items()} for k in range(2))
            found = grid.reduce(texts, ops, s=s, **fields)
            assert list(found) == list(wanted)
            alone = {
                key: grid.reduce(text, op, **arguments[key]) for key, (text, op) in few.items()
            }
            for key, result in [*found.items(), *alone.items()]:
                assert agree(same(plain(result), results[key]), comm), (key, result)


def test_methods_take_expressions(device: str, comm: MPI.Intracomm) -> None:
    shape = (2 * comm.size, 3)
    a, b = (whole("f8", shape, k) for k in range(2))
    with halox.Grid(shape, comm=comm, device=device) as grid:
        u, v = field(grid, a), field(grid, b)
        out = np.zeros(1)
        target = out if device == "cpu" else Array(out)
        for _ in range(3):
            if device == "cpu":
                assert grid.sum("u * v", u=u, v=v) == (a * b).sum()
                assert grid.sum("2 * field", field=u) == 2 * a.sum()
                assert grid.max("u * v", u=u, v=v) == (a * b).max()
                assert grid.min("abs(u)", u=u) == abs(a).min()
                assert grid.mean("u + v", u=u, v=v) == (a + b).sum() / a.size
                assert grid.norm("u - v", u=u, v=v) == np.sqrt(((a - b) ** 2).sum())
            assert plain(grid.dot("u", "u + v", u=u, v=v)) == (a * (a + b)).sum()
            assert grid.sum("u + v", target, u=u, v=v) is target
            assert plain(target)[0] == (a + b).sum()
            outs = {"x": target}
            assert grid.reduce({"x": "u"}, "max", outs, u=u)["x"] is target
            assert plain(target)[0] == a.max()


@pytest.mark.part(2)
def test_reproducible_sums_of_expressions(device: str, comm: MPI.Intracomm) -> None:
    """The same bits as the reproducible sum of a field of the values."""
    shape = (4 * comm.size, 6)
    rng = np.random.default_rng(3)
    a, b = (rng.normal(size=shape) * 10.0 ** rng.integers(-9, 9, shape) for _ in range(2))
    with halox.Grid(shape, comm=comm, device=device, reproducible=True) as grid:
        u, v, w = field(grid, a), field(grid, b), field(grid, a * b - 0.1)
        for _ in range(3):
            found = grid.reduce({"s": "u * v - s", "n": "u > v"}, u=u, v=v, s=0.1)
            assert same(plain(found["s"]), plain(grid.sum(w)))
            assert plain(found["n"]) == (a > b).sum()
            if device == "cpu":  # a GPU compiles another kernel for each
                assert same(grid.norm("u * v - s", u=u, v=v, s=0.1), grid.norm(w))
                assert same(grid.dot("u", "v", u=u, v=v), grid.dot(u, v))


def test_layouts(comm: MPI.Intracomm) -> None:
    """Staggered fields, components and fields with other halos; indices count the points of the layout."""
    n = 2 * comm.size
    options: dict[str, Any] = {"comm": comm, "device": "cpu"}
    with halox.Grid((n, 3), dims=("lat", "lon"), **options) as grid:
        u = grid.full(2.0, staggered=0, components=2)
        v = grid.full(3.0, staggered=0, components=2, halo=(2, 0))
        assert grid.reduce("u * v * index_lat", u=u, v=v) == 2 * 3 * 6 * sum(range(n + 1))
    with halox.Grid((n, 6), checkerboard=True, periodic=True, **options) as grid:
        even = grid.full(1.5, parity="even")
        assert grid.sum("2 * even", even=even) == 3 * n * 3
        with pytest.raises(FieldError):
            grid.sum("even * index_x", even=even)


def test_profiles_and_sixteen_fields(device: str, comm: MPI.Intracomm) -> None:
    """Profiles count the points of the whole grid; each call several times, the last ones prepared."""
    shape = (3 * comm.size + 1, 4)
    wholes = {f"f{n}": whole("f8", shape, n) for n in range(14)}
    numbers = np.arange(2.0 * shape[0])[::2], np.arange(4, dtype="f4")
    text = " + ".join(wholes) + " + r * s"
    with halox.Grid(shape, proc_shape=(comm.size, 1), comm=comm, device=device) as grid:
        fields = {name: field(grid, each) for name, each in wholes.items()}
        r, s = numbers if device == "cpu" else map(Array, numbers)
        for _ in range(3):
            found = grid.sum(text, r=("x", r), s=("y", s), **fields)
            assert plain(found) == sum(wholes.values()).sum() + np.outer(*numbers).sum()
            plain(r)[...] *= 2
            numbers = (plain(r), numbers[1])
    with halox.Grid(shape, comm=comm, device="cpu") as grid:
        u = grid.ones(staggered=0, components=2)
        faces = ("x", np.arange(shape[0] + 1))
        assert grid.sum("u * r", u=u, r=faces) == 8 * faces[1].sum()
        m = grid.mean(grid.scatter(wholes["f0"]), axis=0)
        found = grid.norm("u - m", u=grid.scatter(wholes["f0"]), m=("y", m))
        assert np.isclose(found, np.linalg.norm(wholes["f0"] - wholes["f0"].mean(0)))


def test_only_documented_functions_are_possible(comm: MPI.Intracomm) -> None:
    with halox.Grid(4 * comm.size, comm=comm, device="cpu") as grid:
        u = grid.ones("f4")
        for name in ("wide", "astype", "sum"):
            with pytest.raises(FieldError, match=name):
                grid.sum(f"{name}(u)", u=u)
        for reproducible in (False, True):
            assert grid.dot("u + 1", "2 * u", u=u, reproducible=reproducible) == 16 * comm.size


def test_arrays_are_not_kept(comm: MPI.Intracomm) -> None:
    with halox.Grid((2 * comm.size, 3), comm=comm, device="cpu") as grid:
        u = grid.ones()
        for _ in range(3):
            grid.reduce("u * s", u=u, s=2.0)
        seen = weakref.ref(u)
        del u
        gc.collect()
        assert seen() is None


BAD_TEXTS: list[tuple[str, dict[str, Any], str]] = [
    # an expression, arguments beside the fields u of f8 and w of another dtype, and a word of the error
    ("u + x", {}, "'x'"),
    ("u", {"v": 2}, "not in the expre"),
    ("u.T", {}, "u.T"),
    ("u[0]", {}, "u[0]"),
    ("eval(u)", {}, "eval"),
    ("lambda: u", {}, "lambda"),
    ("u + 'x'", {}, "x"),
    ("u > 1 and u < 2", {}, "and"),
    ("u +", {}, "invalid syntax"),
    ("+".join(["u"] * 400), {}, "is too long"),
    ("(u > 1) - (u > 2)", {}, "bool"),
    ("u & 1", {}, "bitwise_and"),
    ("u * s ** 0.5", {"s": -2.0}, "-2.0"),
    ("u * (~n)", {"n": 3}, "invert"),
    ("u + v", {"v": None}, "field"),
    ("u + 9 ** 9 ** 9", {}, "exponent"),
    ("w", {"w": [("x", "f8")]}, "dtype"),
    ("sqrt(w)", {"w": "i1"}, "float16"),
    ("w > 0 & w", {"w": "i8"}, "booleans"),
    ("sin(w)", {"w": "c16"}, "complex"),
    ("w + 300", {"w": "u1"}, "300"),
    ("w ** w", {"w": "i8"}, "integer"),
    ("e = u", {}, "no value"),
    ("e += u\ne", {}, "e += u"),
    ("for i in u: u\nu", {}, "for i"),
    ("u.x = u\nu", {}, "u.x"),
    ("a = b = u\na", {}, "a = b"),
    ("e = u\ne + x", {}, "'x'"),
    ("u = u + u\n" * 30 + "u", {}, "is too long"),
    ("u * r", {"r": ("q", np.ones(6))}, "x, y"),
    ("u * r", {"r": ("y", np.ones(5))}, "all 6"),
    ("u * r", {"r": ("y", np.ones((6, 1)))}, "all 6"),
    ("u * r", {"r": ("y", [1] * 6)}, "array of numpy"),
    ("u * r", {"r": ("y",)}, "tuple"),
    ("r", {"r": ("y", np.ones(6))}, "fields"),
]


@pytest.mark.usually(1, 3)
def test_bad_texts(comm: MPI.Intracomm) -> None:
    """Of all ranks, and of one rank: all ranks raise."""
    with halox.Grid((4 * comm.size, 6), comm=comm, device="cpu") as grid:
        u = grid.ones()
        for text, named, word in BAD_TEXTS:
            if "w" in named:
                named = {"w": grid.zeros(named["w"])}
            if "u" in text:
                named = {"u": u, **named}
            for is_bad in (True, comm.rank == comm.size - 1):
                with pytest.raises(FieldError) as caught:
                    grid.reduce(text, **named) if is_bad else grid.reduce("u", u=u)
                assert word in str(caught.value), text


def on_grid(call: Callable[[halox.Grid, Any, int], object]) -> Callable[[MPI.Intracomm], None]:
    def run(comm: MPI.Intracomm) -> None:
        with halox.Grid((4 * comm.size, 6), comm=comm, device="cpu") as grid:
            call(grid, grid.ones(), comm.rank)

    return run


FIELD_ERRORS: dict[str, tuple[Any, str]] = {
    "no field": (lambda g, u, rank: g.reduce("2"), "arrays"),
    "no text": (lambda g, u, rank: g.sum(u, v=u), "text"),
    "an unknown op": (lambda g, u, rank: g.reduce("u", "prod", u=u), "op"),
    "other keys": (lambda g, u, rank: g.reduce({"a": "u"}, {"b": "sum"}, u=u), "keys"),
    "no expressions": (lambda g, u, rank: g.reduce({}, u=u), "expressions"),
    "the name of an index": (lambda g, u, rank: g.reduce("index_x", index_x=u), "index_x"),
    "unlike layouts": (
        lambda g, u, rank: g.reduce("u + v", u=u, v=g.zeros(staggered=0)),
        "layout",
    ),
    "a field and an expression": (lambda g, u, rank: g.dot("u", u, u=u), "dot"),
    "a complex maximum": (lambda g, u, rank: g.max("u * 1j", u=u), "max"),
    "a sum over an axis": (lambda g, u, rank: g.sum("u", axis=0, u=u), "axis"),
    "a reproducible complex product": (
        lambda g, u, rank: g.reduce("w * w", w=g.zeros("c16"), reproducible=True),
        "reproducible",
    ),
}
ERRORS: Table = {
    **{name: (on_grid(call), FieldError, word) for name, (call, word) in FIELD_ERRORS.items()},
    "expressions that differ >1": (
        on_grid(lambda g, u, rank: g.reduce("u + 1" if rank else "u", u=u)),
        MismatchError,
        "the field reduced",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_raised_on_all_ranks(name: str, comm: MPI.Intracomm) -> None:
    check_error(ERRORS, name, comm)
