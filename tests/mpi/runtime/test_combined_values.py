"""Reductions of many ranks without common memory, which combine their values in pairs, then in pairs of pairs.

A few real ranks, each of them a node, count as many. The reference is NumPy in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError, MismatchError
from halox.reductions.algorithms import HOST_ALGORITHMS
from tests.exact import hard, norm, products, same_bits, sums
from tests.limits import combine_all
from tests.mpi.bad_input import odd_on, raised_by_all
from tests.mpi.conftest import agree
from tests.unit.reductions.reduction_oracle import expected, same, sample
from tests.unit.reductions.test_operations import PAIRS

pytestmark = [pytest.mark.ranks(2, 3, 4, 8), pytest.mark.usually(3)]

DTYPES = ["?", "i1", "u4", "i8", "u8", "f4", "f8", "c8", "c16"]


@pytest.fixture(autouse=True)
def trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every number of ranks count as many."""
    monkeypatch.setenv("HALOX_NODE", "rank")
    combine_all(monkeypatch)


def in_pairs(op: str, values: list[Any]) -> Any:
    """Combine pairs of values, then pairs of the results, and so on."""
    while len(values) > 1:
        values = [expected(op, values[n : n + 2]) for n in range(0, len(values), 2)]
    return values[0]


def is_right(found: Any, wanted: Any, comm: MPI.Intracomm) -> bool:
    """Whether a result is right, and has the same bits on all ranks."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    ok = found.dtype == wanted.dtype and same(found, wanted)
    return agree(ok and len(set(comm.allgather(found.tobytes()))) == 1, comm)


@contextmanager
def grid_of(whole: Any, comm: MPI.Intracomm) -> Iterator[tuple[halox.Grid, Callable[[Any], Any]]]:
    """Context manager: a grid for a whole array, and a function that returns its own cells of whole arrays."""
    with halox.Grid(whole.shape, comm=comm, device="cpu", halo=0) as grid:
        yield grid, lambda each: np.ascontiguousarray(each[grid.owned])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fields(dtype: str, comm: MPI.Intracomm) -> None:
    """Sums, extremes with NaN, and sums of integers that wrap around; the second call is a prepared launch."""
    whole = sample(dtype, "sum", (4 * comm.size,), 1)
    wide = {"f": "f8", "c": "c16", "u": "u8"}.get(whole.dtype.kind, "i8")
    with grid_of(whole, comm) as (grid, own), np.errstate(all="ignore"):
        u = own(whole)
        blocks = whole.reshape(comm.size, -1)
        names = ["sum"] if whole.dtype.kind == "c" else ["sum", "min", "max"]
        for name in names:
            of_ranks = [getattr(block, name)() for block in blocks.astype(wide)]
            wanted = in_pairs(name, of_ranks).astype(wide if name == "sum" else dtype)
            for _ in range(2):
                assert is_right(getattr(grid, name)(u), wanted, comm), name
        squares = [np.asarray(squares_of(block)) for block in blocks]
        assert np.isclose(grid.norm(u), np.sqrt(in_pairs("sum", squares)), equal_nan=True)


def squares_of(block: Any) -> Any:
    """Return the sum of the squares of a block."""
    return (np.abs(block.astype("c16")) ** 2).sum()


@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_reproducible_sums(dtype: str, comm: MPI.Intracomm) -> None:
    """Partial sums are exact, so that the results have the bits of sums by fractions."""
    rng = np.random.default_rng(2)
    shape = (6 * comm.size,)
    parts = [hard(kind, 2 * shape[0], rng) for kind in ("wide", "normal")]
    a, b = (each.view("c16") if dtype == "c16" else each[: shape[0]] for each in parts)
    with grid_of(a, comm) as (grid, own):
        u, v = own(a), own(b)
        for found, wanted in (
            (grid.sum(u, reproducible=True), sums(a)),
            (grid.norm(u, reproducible=True), norm(a)),
            (grid.dot(u, v, reproducible=True), products(a, b)),
            (grid.sum("u", u=u, reproducible=True), sums(a)),
        ):
            assert agree(same_bits(found, wanted), comm), (found, wanted)
        tiny = np.array([1e16, 1.0, -1e16, 2.0**-30][comm.rank % 4])
        total = grid.allreduce(tiny, reproducible=True)
        every = [[1e16, 1.0, -1e16, 2.0**-30][rank % 4] for rank in range(comm.size)]
        assert agree(same_bits(total[()], sums(every)), comm)


def test_expressions(comm: MPI.Intracomm) -> None:
    """Several results of several dtypes in one record."""
    a, n = np.arange(5.0 * comm.size), np.arange(5 * comm.size, dtype="i4") % 7
    c = a - 2j * n
    texts = {"flag": "n > 9", "sum": "a * n", "norm": "a - n", "least": "n - 3", "c": "conj(c) * a"}
    ops = {"flag": "max", "sum": "sum", "norm": "norm", "least": "min", "c": "sum"}
    wanted = {
        "flag": np.bool_(False),
        "sum": (a * n).sum(),
        "norm": np.sqrt(((a - n) ** 2).sum()),
        "least": n.min() - 3,
        "c": (np.conj(c) * a).sum(),
    }
    with grid_of(a, comm) as (grid, own):
        fields = {"a": own(a), "n": own(n), "c": own(c)}
        for _ in range(3):
            found = grid.reduce(texts, ops, **fields)
            for key, value in wanted.items():
                assert found[key] == value, key
            assert is_right(found["sum"], wanted["sum"], comm)
        odd = own(np.where(a == comm.size, np.nan, a))
        assert agree(bool(np.isnan(grid.max("odd", odd=odd))), comm)


def test_arrays(comm: MPI.Intracomm) -> None:
    """Every operation on every dtype; products and sums of floats have the bits of this order."""
    with halox.Grid(comm.size, comm=comm, device="cpu") as grid:
        for op, dtype in PAIRS:
            values = [sample(dtype, op, (5, 2), rank) for rank in range(comm.size)]
            mine, wanted = values[comm.rank], in_pairs(op, values)
            assert is_right(grid.allreduce(mine, op), wanted, comm), (op, dtype)
        large = np.arange(20_000.0) + comm.rank  # parts of it are scattered
        wanted = sum(large - comm.rank + r for r in range(comm.size))
        assert is_right(grid.allreduce(large), wanted, comm)
        assert grid.allreduce(np.zeros((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("algorithm", HOST_ALGORITHMS)
def test_algorithms(algorithm: str, comm: MPI.Intracomm) -> None:
    for op, dtype in PAIRS[::12]:
        values = [sample(dtype, op, (5, 2), rank) for rank in range(comm.size)]
        with halox.Allreduce(comm, (5, 2), dtype, op, algorithm, device="cpu") as reduce:
            assert is_right(reduce(values[comm.rank]), in_pairs(op, values), comm), (op, dtype)


@pytest.mark.parametrize("rank", [0, -1])
def test_errors_of_one_rank(rank: int, comm: MPI.Intracomm) -> None:
    """All ranks raise the error, and the next call is right."""
    odd, ones, few = odd_on(comm, rank), np.ones(2), np.ones(2, "f4")
    with (
        halox.Grid(2 * comm.size, comm=comm, device="cpu", halo=0) as grid,
        halox.Allreduce(comm, 2, "f8", "sum", "host", device="cpu") as reduce,
    ):
        for call, kind, word in (
            (lambda: grid.sum(odd(np.ones(5), ones)), FieldError, "does not fit"),
            (lambda: grid.sum(odd(few, ones)), MismatchError, "float32"),
            (lambda: odd(grid.max, grid.sum)(ones), MismatchError, "max"),
            (lambda: grid.sum(ones, reproducible=odd(True, False)), MismatchError, "reproducible"),
            (lambda: grid.sum(odd("a + 1", "a + 2"), a=ones), MismatchError, "a + 1"),
            (lambda: grid.allreduce(ones, odd("max", "sum")), MismatchError, "max"),
            (lambda: grid.allreduce(odd(few, ones)), MismatchError, "dtype"),
            (lambda: grid.allreduce(odd(object(), ones)), FieldError, "array"),
            (lambda: grid.allreduce(odd(np.ones(9000), ones)), MismatchError, "shape"),
            (lambda: reduce(odd(np.ones(3), ones)), FieldError, "shape"),
        ):
            raised_by_all(comm, kind, word, call)
            assert grid.sum(np.ones(2)) == 2 * comm.size == grid.allreduce(2)
            assert reduce(np.ones(2)).tolist() == [comm.size] * 2
