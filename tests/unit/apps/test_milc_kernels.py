"""The GPU kernels of the staggered fermions mini-app, compiled as C++, against its NumPy kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import halox
from apps.milc import checks, device_kernels, links, random_fields
from apps.milc.cg import ConjugateGradient, Solution, Stop
from apps.milc.device_kernels import DeviceKernels, iteration_bytes
from apps.milc.lattice import EVEN, ODD, PARITIES, Lattice
from apps.milc.operator import Staggered
from tests import support
from tests.unit.apps.apps_on_cpu import BARRIERS, STAGGERED, FakeCupy

SHAPE = (6, 4, 6, 10)
"""720 sites of a parity: the last block of 32 threads is half empty."""

WHOLE = tuple(slice(0, n) for n in SHAPE)
MASS = 2.0


class OnNumpy(DeviceKernels):
    """The GPU kernels on NumPy arrays; reads and writes need no copy between host and device."""

    def read(self, array: Any) -> np.ndarray:
        return array

    def write(self, array: Any, values: np.ndarray) -> None:
        array[...] = values


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """Use blocks of 32 threads, since a barrier on the CPU is faster with few threads."""
    support.require("cxx")
    monkeypatch.setattr(device_kernels, "THREADS", 32)
    return FakeCupy(STAGGERED, BARRIERS)


@pytest.fixture(params=[3, 1], ids=["improved", "naive"])
def lattices(request: pytest.FixtureRequest) -> Iterator[tuple[Lattice, Lattice]]:
    """Yield a lattice with components last, as on the host, and one with components first, as on a GPU."""
    support.require("mpi")
    from mpi4py import MPI

    with (
        Lattice(SHAPE, request.param, MPI.COMM_SELF) as last,
        Lattice(SHAPE, request.param, MPI.COMM_SELF) as first,
    ):
        first.components_first = True
        yield last, first


def made_links(lattice: Lattice) -> dict[int, np.ndarray]:
    thin = random_fields.random_matrices(SHAPE, WHOLE, 4, 3, random_fields.LINKS)
    return links.of_thin(lattice, thin, naive=lattice.depth == 1)


def operators(
    lattices: tuple[Lattice, Lattice], device: FakeCupy, dtype: str
) -> tuple[Staggered, Staggered]:
    last, first = lattices
    found, kind = made_links(last), np.dtype(dtype)
    kernels = OnNumpy(first, kind, device)
    return (
        Staggered(last, links.tables(last, found, kind)),
        Staggered(first, links.tables(first, found, kind), kernels),
    )


def vectors(operator: Staggered, seed: int) -> tuple[Any, Any]:
    return checks.vectors(operator, random_fields.random_vectors(SHAPE, WHOLE, seed, 1))


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def failure(operator: Staggered, b: Any, mass: float, iterations: int) -> str:
    with pytest.raises(halox.HaloxError) as caught:
        ConjugateGradient(operator, EVEN, mass, Stop(1e-9, iterations)).solve(b)
    return str(caught.value)


class TestConjugateGradient:
    def solved(
        self, operator: Staggered, parity: int, stop: Stop, inner: Staggered | None = None
    ) -> Solution:
        b = vectors(operator, 5)[parity]
        return ConjugateGradient(operator, parity, MASS, stop, inner).solve(b)

    @pytest.mark.parametrize("dtype", ["c8", "c16"])
    def test_the_solution_of_numpy(
        self, lattices: tuple[Lattice, Lattice], device: FakeCupy, dtype: str
    ) -> None:
        host, gpu = operators(lattices, device, dtype)
        stop = Stop(1e-6, 100)
        for parity in PARITIES:
            expected, found = self.solved(host, parity, stop), self.solved(gpu, parity, stop)
            assert (found.iterations, found.applications) == (
                expected.iterations,
                expected.applications,
            )
            limit = 1e-4 if dtype == "c8" else 1e-12
            np.testing.assert_allclose(found.history, expected.history, rtol=limit)
            assert found.residual == pytest.approx(expected.residual, rel=limit)
            assert error(gpu.lattice.values(found.x), expected.x) < limit

    def test_the_same_bits_again_and_launches_after_the_end(
        self, lattices: tuple[Lattice, Lattice], device: FakeCupy
    ) -> None:
        _, gpu = operators(lattices, device, "c16")
        b = vectors(gpu, 5)[ODD]
        gradient = ConjugateGradient(gpu, ODD, MASS, Stop(1e-3, 100))
        first = gradient.solve(b)
        x = first.x.copy()
        second = gradient.solve(b)
        assert first.history == second.history and np.array_equal(x, second.x)
        residual = gradient.residual
        for step in 3 * gradient.iteration:
            step.call()
        assert np.array_equal(second.x, x) and gradient.residual == residual

    def test_what_ends_it(self, lattices: tuple[Lattice, Lattice], device: FakeCupy) -> None:
        """Both kinds of kernels raise the same errors."""
        texts = []
        for operator in operators(lattices, device, "c16"):
            b = vectors(operator, 5)[EVEN]
            texts += [failure(operator, b, MASS, 2)]
            for value in (np.nan, 0):
                for table in operator.tables:
                    table.matrices[...] = value
                texts += [failure(operator, b, 0.0, 9)]
            b[...] = 0
            zero = ConjugateGradient(operator, EVEN, MASS, Stop(1e-9, 9)).solve(b)
            assert (zero.iterations, zero.residual, zero.x.any()) == (0, 0, False)
        words = "after 2 iterations", " is nan", " is 0"
        assert all(word in text for word, text in zip(words, texts[:3], strict=True))
        assert texts[0].partition(":")[0] == texts[3].partition(":")[0] and texts[1:3] == texts[4:]

    def test_mixed_precision(self, lattices: tuple[Lattice, Lattice], device: FakeCupy) -> None:
        double = operators(lattices, device, "c16")
        single = operators(lattices, device, "c8")
        stop = Stop(1e-13, 200)
        for outer, inner in zip(double, single, strict=True):
            expected = self.solved(double[0], EVEN, Stop(1e-20, 200))
            found = self.solved(outer, EVEN, stop, inner)
            assert found.residual <= stop.residual
            assert found.residuals >= 3 and found.applications == found.iterations + found.residuals
            x = outer.lattice.values(found.x)
            assert np.linalg.norm(x - expected.x) < 2 * stop.residual**0.5 * np.linalg.norm(x)


def test_bytes_of_an_iteration() -> None:
    assert sum(iteration_bytes(16, 16).values()) == 5232
    assert sum(iteration_bytes(8, 8).values()) == 2928 // 2
