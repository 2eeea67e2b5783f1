"""The examples of Fourier transforms on GPUs."""

from __future__ import annotations

import pytest

from tests.support import require
from tests.unit.test_fft_examples import CASES, POISSON, TAYLOR_GREEN, on_ranks, printed

pytestmark = pytest.mark.gpu
require("gpu")
require("mpi")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("options", CASES)
def test_taylor_green(ranks: int, options: str) -> None:
    """Energy and enstrophy; the example itself compares the velocity in 2D, and the series in 3D."""
    ended = on_ranks(ranks, str(TAYLOR_GREEN), *options.split(), "--device", "gpu")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    device, _, energy, enstrophy = printed(ended.stdout)
    assert device == "gpu"
    assert (energy, enstrophy) == pytest.approx(CASES[options], abs=1e-9)


@pytest.mark.parametrize("ranks", [1, 2])
def test_poisson(ranks: int) -> None:
    ended = on_ranks(ranks, str(POISSON))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{ranks} rank(s), gpu" in ended.stdout
