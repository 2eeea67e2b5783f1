"""The stencil mini-app on a GPU: its kernel equals NumPy bit for bit, and whole runs are verified."""

from __future__ import annotations

import numpy as np
import pytest

from apps.stencil2d.operator import EXACT_WEIGHTS, Stencil
from tests.support import require, verified

pytestmark = pytest.mark.gpu
require("gpu")


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("shape", [(3, 3), (18, 131), (100, 1000), (515, 514)])
def test_kernel_equals_numpy(shape: tuple[int, int], dtype: str) -> None:
    import cupy

    old = np.random.default_rng(1).random(shape).astype(dtype)
    expected = np.full_like(old, -1)
    got = cupy.asarray(expected)
    part = (1, shape[0] - 1), (1, shape[1] - 1)
    Stencil(old, *part, EXACT_WEIGHTS)(old, expected)
    Stencil(got, *part, EXACT_WEIGHTS, cupy)(cupy.asarray(old), got)
    assert np.array_equal(got.get(), expected)


@pytest.mark.parametrize(("ranks", "every"), [(1, 1), (2, 1), (4, 3)])
def test_whole_run(ranks: int, every: int) -> None:
    words = f"-n {ranks} --custom-size 60,71 --num-iters 50 --passes 1 --device gpu"
    figures = verified("stencil2d", *words.split(), f"--iters-per-exchange={every}")
    assert figures["device"] == "gpu"
    assert all(checks["equals_one_rank"] is True for checks in figures["checks"].values())
