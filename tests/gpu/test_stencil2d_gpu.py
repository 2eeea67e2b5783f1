"""The stencil mini-app on a GPU: whole runs equal NumPy on one rank bit for bit."""

from __future__ import annotations

import pytest

from tests.support import require, verified

pytestmark = pytest.mark.gpu
require("gpu")


@pytest.mark.parametrize(("ranks", "every"), [(1, 1), (2, 1), (4, 3)])
def test_whole_run(ranks: int, every: int) -> None:
    words = f"-n {ranks} --custom-size 60,71 --num-iters 50 --passes 1 --device gpu"
    figures = verified("stencil2d", *words.split(), f"--iters-per-exchange={every}")
    assert figures["device"] == "gpu"
    assert all(checks["equals_one_rank"] is True for checks in figures["checks"].values())
