"""Reproducible reductions on one GPU: the exact sum of Python's fractions, rounded once, and the bits of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import halox
from halox.errors import FieldError, StateError
from tests.exact import KINDS, exact_sum, hard, norm, products, same_bits, sums
from tests.support import on_ranks, require
from tests.unit.apps.test_jacobi import EXAMPLE, printed

pytestmark = pytest.mark.gpu
require("gpu")
require("mpi")

import cupy  # noqa: E402

SHAPE = (17, 23, 41)


@pytest.fixture
def grid() -> Iterator[halox.Grid]:
    with halox.Grid(SHAPE, halo=((1, 2), (0, 1), (3, 0)), device="gpu", reproducible=True) as grid:
        yield grid


def field(grid: halox.Grid, whole: np.ndarray) -> Any:
    u = grid.zeros(whole.dtype)
    u[...] = cupy.asarray(np.full(u.shape, 99).astype(whole.dtype))
    grid.interior(u)[...] = cupy.asarray(whole)
    return u


def numbers(kind: str, dtype: str, seed: int) -> np.ndarray:
    rng, n = np.random.default_rng(seed), int(np.prod(SHAPE))
    whole = hard(kind, n, rng)
    if np.dtype(dtype).kind == "c":
        whole = whole + 1j * np.where(np.isfinite(whole), hard("normal", n, rng), 0)
    return whole.reshape(SHAPE).astype(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_hard_numbers(grid: halox.Grid, kind: str, dtype: str) -> None:
    a, b = (numbers(kind, dtype, seed) for seed in range(2))
    u, v = field(grid, a), field(grid, b)
    for _ in range(2):
        assert same_bits(grid.sum(u).get(), sums(a))
        assert same_bits(grid.norm(u).get(), norm(a))
        assert same_bits(grid.dot(u, v).get(), products(a, b))


@pytest.mark.parametrize("dtype", ["f4", "c8", "f2"])
def test_other_dtypes(grid: halox.Grid, dtype: str) -> None:
    a, b = (numbers("normal", dtype, seed) for seed in range(2))
    u, v, w = field(grid, a), field(grid, b), field(grid, b.real.astype("i4"))
    assert same_bits(grid.sum(u).get(), sums(a))
    assert same_bits(grid.norm(u).get(), norm(a))
    assert same_bits(grid.dot(u, v).get(), products(a, b))
    assert same_bits(grid.dot(w, u).get(), products(b.real.astype("i4"), a))
    assert same_bits(grid.norm(w).get(), norm(b.real.astype("i4")))
    assert grid.sum(w).dtype == "i8"


def test_all_the_gpu() -> None:
    """Many blocks, each of whose threads adds thousands of cells; the CPU gives the same bits."""
    shape = (300, 400, 500)
    whole = np.random.default_rng(7).standard_normal(shape)
    whole[:100] *= 1e-200
    whole[200] *= 2.0**60
    found = []
    for device in ("gpu", "cpu"):
        with halox.Grid(shape, device=device, reproducible=True) as grid:
            u = grid.zeros()
            grid.interior(u)[...] = grid.xp.asarray(whole)
            found.append(
                [
                    np.asarray(x.get() if device == "gpu" else x)
                    for x in (grid.sum(u), grid.norm(u), grid.dot(u, u))
                ]
            )
            if device == "gpu":
                again = [x.get() for x in (grid.sum(u), grid.norm(u), grid.dot(u, u))]
                assert all(map(same_bits, again, found[0]))
    assert all(map(same_bits, *found)), found
    assert float(found[0][0]) == exact_sum([np.float64(found[1][0])])


def test_strides(grid: halox.Grid) -> None:
    a = numbers("normal", "f8", 3)
    u = field(grid, a)
    for other in (cupy.asfortranarray(u), cupy.repeat(u, 2, axis=2)[:, :, ::2], u + 0):
        assert same_bits(grid.sum(other).get(), sums(a))
        assert same_bits(grid.dot(other, u).get(), products(a, a))


def test_in_a_graph(grid: halox.Grid) -> None:
    a = numbers("normal", "f8", 4)
    u, out = field(grid, a), cupy.zeros(())
    grid.norm(u, out=out)
    u *= 1
    cupy.cuda.runtime.deviceSynchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        grid.norm(u, out=out)
        with pytest.raises(StateError):
            grid.sum(u)
        u *= 2
        graph = stream.end_capture()
        for _ in range(5):
            graph.launch(stream)
        stream.synchronize()
    assert same_bits(out.get(), norm(a * 16))


def test_arrays(grid: halox.Grid) -> None:
    x = cupy.asarray([0.5, -0.0, np.inf])
    assert np.array_equal(grid.allreduce(x).get(), x.get())
    assert grid.allreduce(cupy.arange(3), "prod").get().tolist() == [0, 1, 2]
    with pytest.raises(FieldError):
        grid.allreduce(x, "prod")
    with halox.Allreduce(None, 3, "f8", device="gpu", reproducible=True) as reduce:
        assert reduce.algorithm == "host"
        assert np.array_equal(reduce(x).get(), x.get())


def test_jacobi() -> None:
    """Steps repeated by the GPU and called by the host, on one rank and two: the same bits of the residual."""
    options = "--device gpu --cells 24 17 30 --tolerance 1e-2 --read-every 50 --reproducible"
    found = set()
    for ranks, path in ((1, ""), (2, "staged"), (2, "")):
        ended = on_ranks(ranks, str(EXAMPLE), *options.split(), HALOX_PATH=path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found.add(printed(ended.stdout)[1:])
    assert len(found) == 1, found
