"""The examples of Fourier transforms on GPUs."""

from __future__ import annotations

import pytest

from tests.support import on_ranks, require
from tests.unit.apps.test_fft_examples import BOX, CASES, PLANE, PLANES, POISSON, printed

pytestmark = pytest.mark.gpu
require("gpu")
require("mpi")


@pytest.mark.parametrize(("ranks", "options"), zip((1, 2), CASES, strict=True))
def test_the_vortex_in_a_box(ranks: int, options: str) -> None:
    """Energy and enstrophy equal the host's; the example itself compares them with a series."""
    ended = on_ranks(ranks, str(BOX), *options.split(), "--device", "gpu")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    device, _, energy, enstrophy = printed(ended.stdout)
    assert device == "gpu"
    assert (energy, enstrophy) == pytest.approx(CASES[options], abs=1e-9)


@pytest.mark.parametrize(("ranks", "options"), zip((1, 2), PLANES, strict=True))
def test_vortices_in_a_plane(ranks: int, options: str) -> None:
    """The example itself compares the vorticity with the exact solution in all cells."""
    ended = on_ranks(ranks, str(PLANE), *options.split(), "--device", "gpu")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith(f"{ranks} rank(s), gpu: ")


@pytest.mark.parametrize("ranks", [1, 2])
def test_poisson(ranks: int) -> None:
    ended = on_ranks(ranks, str(POISSON))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{ranks} rank(s), gpu" in ended.stdout
