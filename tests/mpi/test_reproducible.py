"""Reproducible reductions: the exact sum by Python's fractions, rounded once, in every division, on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import (
    DecompositionError,
    FieldError,
    HaloxError,
    MismatchError,
)
from tests.exact import KINDS, exact_sum, hard, norm, products, same_bits, sums
from tests.fakes.fake_cupy import Array, Machine
from tests.mpi.conftest import agree
from tests.support import require, trials

pytestmark = [pytest.mark.ranks(1, 2, 3, 4, 8), pytest.mark.usually(3)]

WAYS = ["host", "own GPUs", "one GPU", "two nodes"]


@pytest.fixture(params=WAYS)
def device(
    request: pytest.FixtureRequest, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Set up the host, or a simulated GPU of this rank; return the grid's device."""
    if request.param == "two nodes":
        monkeypatch.setenv("HALOX_NODE", "second" if comm.rank % 3 == 1 else "first")
    if request.param == "host":
        return "cpu"
    require("cxx")
    Machine(comm.rank, shared=request.param == "one GPU" and comm.size > 1).install(monkeypatch)
    return "gpu"


def field(grid: halox.Grid, whole: np.ndarray) -> Any:
    """Return a field of a whole array, with other numbers in the halo."""
    values = np.full(grid.padded_shape, 99).astype(whole.dtype)
    values[grid.layout(values if grid.device == "cpu" else Array(values)).interior] = whole[
        grid.owned
    ]
    return values if grid.device == "cpu" else Array(values)


def plain(result: Any) -> Any:
    return result.get() if isinstance(result, Array) else result


def numbers(kind: str, dtype: str, shape: Any, seed: Any) -> np.ndarray:
    rng, n = np.random.default_rng(seed), int(np.prod(shape))
    parts = [hard(kind, n, rng), hard("normal", n, rng)]
    is_complex = np.dtype(dtype).kind == "c"
    with np.errstate(all="ignore"):
        whole = np.stack(parts, -1).reshape(-1).view("c16") if is_complex else parts[0]
        return whole.reshape(shape).astype(dtype)


@pytest.mark.parametrize("number", range(trials(8)))
@pytest.mark.part(4)
def test_random_fields_and_divisions(number: int, device: str, comm: MPI.Intracomm) -> None:
    rng = np.random.default_rng([38, number])
    ndim = int(rng.integers(1, 4))
    shape = tuple(int(n) for n in rng.integers(1, 12, ndim))
    axis = int(rng.integers(ndim))
    shape = tuple(n + comm.size * (k == axis) for k, n in enumerate(shape))
    procs = [comm.size if k == axis else 1 for k in range(ndim)]
    dtype = str(rng.choice(["f4", "f8", "c8", "c16"]))
    a, b = (numbers(str(rng.choice(KINDS)), dtype, shape, [number, k]) for k in range(2))
    halo = [(int(low), int(high)) for low, high in rng.integers(0, 3, (ndim, 2))]
    with halox.Grid(
        shape, halo=halo, proc_shape=procs, comm=comm, device=device, reproducible=True
    ) as grid:
        u, v = field(grid, a), field(grid, b)
        for call in range(2):  # a prepared launch from the second call on
            ok = same_bits(plain(grid.sum(u)), sums(a))
            ok &= same_bits(plain(grid.norm(u)), norm(a))
            ok &= same_bits(plain(grid.dot(u, v)), products(a, b))
            assert agree(ok, comm), (call, dtype, shape)
        out = np.zeros(1)
        target = out if device == "cpu" else Array(out)
        assert grid.norm(u, out=target) is target
        assert agree(same_bits(plain(target)[0], norm(a)), comm)


def test_each_call_decides(device: str, comm: MPI.Intracomm) -> None:
    """An ordinary sum of these numbers is another one, unless the call asks for a reproducible one."""
    whole = np.array([1e16, *[1.0] * (4 * comm.size), -1e16, 0.5])
    for default in (False, True):
        with halox.Grid(whole.shape, comm=comm, device=device, reproducible=default) as grid:
            assert grid.reproducible is default
            u = field(grid, whole)
            found = [float(plain(grid.sum(u, reproducible=r))) for r in (None, False, True)]
            wanted = 4 * comm.size + 0.5
            assert found[2] == wanted != found[1]
            assert found[0] == found[1 + default]


def test_means_and_sums_over_axes(device: str, comm: MPI.Intracomm) -> None:
    a = numbers("wide", "f8", (3 * comm.size, 5), 1)
    with halox.Grid(a.shape, comm=comm, device=device, reproducible=True) as grid:
        u = field(grid, a)
        if device == "cpu":  # the simulated GPU's arrays cannot be divided
            assert grid.mean(u) == sums(a) / a.size
        for call in (grid.sum, grid.mean):
            with pytest.raises(FieldError, match="axis"):
                call(u, axis=1)


@pytest.mark.part(2)
def test_integers_and_mixed_dtypes(device: str, comm: MPI.Intracomm) -> None:
    shape = (3 * comm.size, 5)
    a = numbers("normal", "f8", shape, 1)
    i = np.random.default_rng(2).integers(-(2**62), 2**62, shape)
    with halox.Grid(shape, comm=comm, device=device, reproducible=True) as grid:
        u, w = field(grid, a), field(grid, i)
        total = sum(map(int, i.flat))
        assert plain(grid.sum(w)) == (total + 2**63) % 2**64 - 2**63
        assert same_bits(plain(grid.norm(w)), norm(i))
        assert same_bits(plain(grid.dot(w, u)), products(i, a))
        assert same_bits(
            plain(grid.dot(u, field(grid, a.astype("c8")))), products(a, a.astype("c8"))
        )
        half = field(grid, a.astype("f2"))
        assert same_bits(plain(grid.sum(half)), sums(a.astype("f2")))
        assert plain(grid.max(w)) == i.max()


@pytest.mark.parametrize(("dtype", "elements"), [("f4", 3), ("c16", 600)])
@pytest.mark.part(2)
def test_arrays(dtype: str, elements: int, device: str, comm: MPI.Intracomm) -> None:
    """Any order of the same values gives the bits of the exact sum; also in arrays that are scattered."""
    values = numbers("cancelling", dtype, (comm.size, elements), 1)
    values[:, ::5] = numbers("odd", dtype, (comm.size, len(values[0, ::5])), 2)
    wanted = np.array(
        [complex(sums(c)) if values.dtype.kind == "c" else exact_sum(c) for c in values.T]
    )
    with np.errstate(all="ignore"):
        wanted = wanted.astype(dtype)
    where = np.asarray if device == "cpu" else Array
    with (
        halox.Grid((comm.size,), comm=comm, device=device) as grid,
        halox.Allreduce(comm, elements, dtype, device=device, reproducible=True) as reduce,
    ):
        assert reduce.reproducible and reduce.algorithm == "host"
        for shift in range(min(comm.size, 2)):
            given = where(values[(comm.rank + shift) % comm.size].copy())
            for found in (reduce(given), grid.allreduce(given, reproducible=True)):
                assert agree(np.array_equal(plain(found), wanted, equal_nan=True), comm)


def test_operations_that_are_always_reproducible(device: str, comm: MPI.Intracomm) -> None:
    with halox.Grid((comm.size,), comm=comm, device=device, reproducible=True) as grid:
        assert grid.allreduce(comm.rank, "prod") == 0
        assert grid.allreduce(float(comm.rank), "max") == comm.size - 1
        assert grid.allreduce(np.arange(3), "sum").tolist() == [0, comm.size, 2 * comm.size]
        u = field(grid, np.arange(1.0, comm.size + 1))
        found = grid.reduce({"least": "u", "most": "u"}, {"least": "min", "most": "max"}, u=u)
        assert [float(plain(found[key])) for key in ("least", "most")] == [1, comm.size]


def test_errors(device: str, comm: MPI.Intracomm) -> None:
    last = comm.rank == comm.size - 1

    def reduce(*words: Any, reproducible: Any = True) -> Any:
        return halox.Allreduce(comm, 2, *words, device=device, reproducible=reproducible)

    def refused(error: type[HaloxError], word: str, call: Callable[[], Any]) -> None:
        with pytest.raises(error, match=word):
            call()

    refused(FieldError, "prod", lambda: reduce("f8", "prod"))
    refused(FieldError, "reproducible", lambda: reduce("f8", reproducible="yes"))
    refused(FieldError, "'hierarchical'", lambda: reduce("f8", "sum", "hierarchical"))
    options: dict[str, Any] = {"comm": comm, "device": device}
    refused(
        DecompositionError, "reproducible", lambda: halox.Grid(8, reproducible="yes", **options)
    )
    if comm.size > 1:
        refused(MismatchError, "reproducible", lambda: reduce("f8", reproducible=last))
    with halox.Grid((2 * comm.size,), reproducible=True, **options) as grid:
        u, pairs = (field(grid, np.ones(2 * comm.size, dtype)) for dtype in ("f8", "i4,f8"))
        on_last: Any = "yes" if last else True
        refused(FieldError, "reproducible", lambda: grid.sum(u, reproducible=on_last))
        refused(FieldError, "reproducible", lambda: grid.allreduce(1.0, reproducible=on_last))
        refused(FieldError, "prod", lambda: grid.allreduce(np.ones(2), "prod"))
        refused(FieldError, "op", lambda: grid.allreduce(1.0, 3))  # type: ignore[arg-type]
        refused(FieldError, "sum", lambda: grid.sum(pairs))
        if comm.size > 1:
            word = "reproducible" if device == "cpu" else "reduction differs between ranks"
            refused(MismatchError, word, lambda: grid.sum(u, reproducible=last))
        if device == "cpu" and np.dtype("g").itemsize > 8:
            long = field(grid, np.ones(2 * comm.size, "g"))
            refused(FieldError, "reproducible", lambda: grid.dot(long, long))
        assert plain(grid.sum(u)) == 2 * comm.size
