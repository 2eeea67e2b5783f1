"""The Jacobi example on GPUs: steps repeated by the GPU, and called by the host."""

from __future__ import annotations

import pytest

from tests.support import on_ranks, require
from tests.unit.apps.test_jacobi import EXAMPLE, printed, serial

pytestmark = pytest.mark.gpu
require("gpu")
require("mpi")

import cupy  # noqa: E402

BY_GPU, BY_HOST = "steps repeated by the GPU", "steps called by the host"
CELLS = (24, 17, 30)
OPTIONS = f"--device gpu --cells {' '.join(map(str, CELLS))} --tolerance 1e-2 --read-every 50"


def run(ranks: int, *words: str, **variables: str) -> str:
    ended = on_ranks(ranks, str(EXAMPLE), *OPTIONS.split(), *words, **variables)
    # The example exits with an error if its result differs from the closed form.
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{ranks} rank(s), gpu" in ended.stdout
    return ended.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_and_residual_of_numpy(ranks: int) -> None:
    said = run(ranks)
    way, steps, residual = printed(said)
    if ranks <= cupy.cuda.runtime.getDeviceCount():
        assert way == BY_GPU, said
    else:
        assert way == BY_HOST and "the host calls the steps" in said
    known_steps, known = serial(CELLS, 1e-2, 50)
    assert steps == known_steps
    assert residual == pytest.approx(known, rel=1e-11)


def test_paths_that_cannot_be_captured_are_named() -> None:
    said = run(2, HALOX_PATH="staged")
    assert "the host calls the steps: the staged path" in said
    assert printed(said)[0] == BY_HOST
