"""The parts of the stencil mini-app on one rank: operator, problem, checks, options."""

from __future__ import annotations

import numpy as np
import pytest

from apps.stencil2d import verification
from apps.stencil2d.operator import EXACT_WEIGHTS, Stencil, Weights, weights
from apps.stencil2d.problem import Problem
from tests import support
from tests.unit.apps.apps_on_cpu import JACOBI, FakeCupy


def by_definition(old: np.ndarray, w: Weights) -> np.ndarray:
    """Apply the operator to the points inside, in double precision."""
    weight = (w.centre, w.cardinal, w.diagonal)
    rows, cols = old.shape
    return sum(
        weight[abs(i) + abs(j)] * old[1 + i : rows - 1 + i, 1 + j : cols - 1 + j].astype("f8")
        for i in (-1, 0, 1)
        for j in (-1, 0, 1)
    )


class TestOperator:
    # The last one is wide enough for several strips, which share their temporary arrays.
    @pytest.mark.parametrize("shape", [(3, 3), (37, 5), (9, 20_000)])
    @pytest.mark.parametrize(("dtype", "rtol"), [("f8", 1e-14), ("f4", 1e-6)])
    def test_equals_its_definition(self, shape: tuple[int, int], dtype: str, rtol: float) -> None:
        rng = np.random.default_rng(1)
        old = rng.random(shape).astype(dtype)
        new = np.full_like(old, -7)
        w = Weights(0.3, 0.2, 0.1)
        Stencil(old, (1, shape[0] - 1), (1, shape[1] - 1), w)(old, new)
        np.testing.assert_allclose(new[1:-1, 1:-1], by_definition(old, w), rtol=rtol)
        for edge in (new[0], new[-1], new[:, 0], new[:, -1]):
            assert (edge == -7).all()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_device_kernel_as_cpp_equals_numpy(dtype: str) -> None:
    support.require("cxx")
    old = np.random.default_rng(4).random((45, 171)).astype(dtype)
    expected, got = np.full_like(old, -1), np.full_like(old, -1)
    part = (2, 43), (1, 169)
    Stencil(old, *part, EXACT_WEIGHTS)(old, expected)
    Stencil(old, *part, EXACT_WEIGHTS, FakeCupy(JACOBI))(old, got)
    assert np.array_equal(got, expected)


class TestVerification:
    def test_sine_transform_is_its_definition(self) -> None:
        n, lines = 7, 300_000  # several chunks of lines
        k = np.arange(1, n + 1)
        matrix = np.sqrt(2 / (n + 1)) * np.sin(np.pi * np.outer(k, k) / (n + 1))
        values = np.random.default_rng(5).random((lines, n))
        np.testing.assert_allclose(verification.sine_transform(values, 1), values @ matrix)
        np.testing.assert_allclose(verification.sine_transform(values.T, 0), matrix @ values.T)

    @pytest.mark.parametrize("steps", [1, *support.full(10, 100)])
    def test_reference_numbers(self, steps: int) -> None:
        """tests/mpi/test_stencil2d.py compares those of 100 steps."""
        start = Problem.make((512, 512), (1, 1), 1, strong=True).initial()
        field = verification.one_rank_run(start, steps, EXACT_WEIGHTS, "f8")
        assert verification.matches_reference(field, steps) is True
        inexact = verification.one_rank_run(start, steps, weights(exact=False), "f8")
        assert verification.matches_reference(inexact, steps) is False

    @pytest.mark.parametrize("dtype", ["f4", "f8"])
    def test_one_rank_run_equals_the_solution(self, dtype: str) -> None:
        start = Problem.make((40, 31), (1, 1), 4, strong=True).initial()
        w = weights(exact=False)
        got = verification.one_rank_run(start, 200, w, dtype)
        exact = verification.solution(start, 200, w)
        bound = verification.tolerance(dtype, 200)
        assert verification.relative_error(got, exact) < bound
        # The bound must be tight enough to find a small error.
        wrong = got.copy()
        wrong[20, 15] *= 1 + 4 * bound
        wrong[np.unravel_index(got.argmax(), got.shape)] *= 1 + 4 * bound
        assert verification.relative_error(wrong, exact) > bound

    def test_not_a_number_is_never_right(self) -> None:
        assert verification.relative_error(np.array([np.nan]), np.array([1.0])) == float("inf")
