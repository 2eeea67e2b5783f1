"""Reductions of many ranks without common memory, which combine their values in pairs, then in pairs of pairs.

A few real ranks, each of them a node, count as many. The reference is NumPy in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.collectives.algorithms import HOST_ALGORITHMS
from halox.errors import HaloxError
from halox.runtime import gathered_values
from tests.exact import hard, norm, products, same_bits, sums
from tests.mpi.conftest import agree
from tests.unit.collectives.reduction_oracle import expected, same, sample
from tests.unit.collectives.test_operations import PAIRS

pytestmark = [pytest.mark.ranks(2, 3, 4, 8), pytest.mark.usually(3)]

DTYPES = ["?", "i1", "u4", "i8", "u8", "f4", "f8", "c8", "c16"]


@pytest.fixture(autouse=True)
def trees(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make every number of ranks count as many; return the lengths in bytes of the arrays that were combined."""
    found: list[int] = []
    real = gathered_values.combine

    def noted(comm: Any, pair: Any, *arguments: Any) -> None:
        found.append(pair[0].nbytes)
        real(comm, pair, *arguments)

    monkeypatch.setenv("HALOX_NODE", "rank")
    monkeypatch.setattr(gathered_values, "MOST_GATHERED", 1)
    monkeypatch.setattr(gathered_values, "combine", noted)
    return found


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
def test_fields(dtype: str, comm: MPI.Intracomm, trees: list[int]) -> None:
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
    assert len(trees) == 2 * len(names) + 1


def squares_of(block: Any) -> Any:
    """Return the sum of the squares of a block."""
    return (np.abs(block.astype("c16")) ** 2).sum()


@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_reproducible_sums(dtype: str, comm: MPI.Intracomm, trees: list[int]) -> None:
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
        assert len(trees) == 4
        tiny = np.array([1e16, 1.0, -1e16, 2.0**-30][comm.rank % 4])
        total = grid.allreduce(tiny, reproducible=True)
        every = [[1e16, 1.0, -1e16, 2.0**-30][rank % 4] for rank in range(comm.size)]
        assert agree(same_bits(total[()], sums(every)), comm)
        assert len(trees) == 4  # rounded once, so from the values of all ranks


def test_expressions(comm: MPI.Intracomm, trees: list[int]) -> None:
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
    assert len(trees) == 4


@pytest.mark.parametrize("algorithm", ["of the grid", *HOST_ALGORITHMS])
def test_arrays(algorithm: str, comm: MPI.Intracomm, trees: list[int]) -> None:
    """Every operation on every dtype; products and sums of floats have the bits of this order."""
    # Making "hierarchical" splits the communicator, which takes long.
    pairs = PAIRS[::9] if algorithm == "hierarchical" else PAIRS
    with halox.Grid(comm.size, comm=comm, device="cpu") as grid:
        for op, dtype in pairs:
            values = [sample(dtype, op, (5, 2), rank) for rank in range(comm.size)]
            mine, wanted = values[comm.rank], in_pairs(op, values)
            if algorithm == "of the grid":
                found = grid.allreduce(mine, op)
            else:
                with halox.Allreduce(comm, (5, 2), dtype, op, algorithm, device="cpu") as reduce:
                    found = reduce(mine)
            assert is_right(found, wanted, comm), (op, dtype)
        assert len(trees) == len(pairs)
        large = np.arange(20_000.0) + comm.rank  # parts of it are scattered
        assert is_right(
            grid.allreduce(large), sum(large - comm.rank + r for r in range(comm.size)), comm
        )
        assert grid.allreduce(np.zeros((0, 3))).shape == (0, 3)
    assert len(trees) == len(pairs)


def test_the_same_bits_in_every_run(comm: MPI.Intracomm) -> None:
    with halox.Grid(4 * comm.size, comm=comm, device="cpu", halo=0) as grid:
        u = np.random.default_rng(comm.rank).normal(size=4)
        found = {np.float64(grid.sum(u)).tobytes() for _ in range(50)}
    assert len(set().union(*comm.allgather(found))) == 1


def raised(call: Callable[[], object], comm: MPI.Intracomm) -> str:
    """Return the type and text of the error, which all ranks raise."""
    with pytest.raises(HaloxError) as caught:
        call()
    text = re.sub(r"call \d+", "call", f"{type(caught.value).__name__}: {caught.value}")
    texts = set(comm.allgather(text))
    assert len(texts) == 1, texts
    return texts.pop()


def wrong_calls(grid: halox.Grid, is_odd: bool) -> list[Callable[[], object]]:
    """Return calls that raise on all ranks because of the odd rank."""
    ones, few = np.ones(2), np.ones(2, "f4")
    return [
        lambda: grid.sum(np.ones(5) if is_odd else ones),
        lambda: grid.sum(few if is_odd else ones),
        lambda: grid.max(ones) if is_odd else grid.sum(ones),
        lambda: grid.sum(ones, reproducible=is_odd),
        lambda: grid.sum("a + b", a=ones, b=np.ones(5) if is_odd else ones),
        lambda: grid.sum("a + 1" if is_odd else "a + 2", a=ones),
        lambda: grid.allreduce(ones, "max" if is_odd else "sum"),
        lambda: grid.allreduce(few if is_odd else ones),
        lambda: grid.allreduce(object() if is_odd else ones),
        lambda: grid.allreduce(np.ones(9000) if is_odd else ones),
        lambda: grid.allreduce(ones, reproducible=is_odd),
    ]


@pytest.mark.parametrize("odd", [0, -1])
def test_errors_of_one_rank(odd: int, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise the errors of ranks that gather, and the next call is right."""
    is_odd = comm.rank == odd % comm.size
    texts: dict[int, list[str]] = {}
    for most in (1, 64):
        monkeypatch.setattr(gathered_values, "MOST_GATHERED", most)
        found = texts[most] = []
        with halox.Grid(2 * comm.size, comm=comm, device="cpu", halo=0) as grid:
            for call in wrong_calls(grid, is_odd):
                found.append(raised(call, comm))
                assert grid.sum(np.ones(2)) == 2 * comm.size == grid.allreduce(2)
        with halox.Allreduce(comm, 2, "f8", "sum", "host", device="cpu") as reduce:
            for _ in range(2):
                given = np.ones(3 if is_odd else 2)
                found.append(raised(partial(reduce, given), comm))
                assert reduce(np.ones(2)).tolist() == [comm.size] * 2
    assert texts[1] == texts[64]
    kinds = [text.partition(":")[0] for text in texts[1]]
    assert kinds[:3] == ["FieldError", "MismatchError", "MismatchError"]
    assert kinds[-1] == "FieldError"
