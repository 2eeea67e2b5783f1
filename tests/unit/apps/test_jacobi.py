"""The Jacobi example: its checks, and its GPU code run on the CPU. tests/mpi/test_examples.py runs it on ranks."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import halox
from tests import support
from tests.fakes.nvrtc import by_nvrtc
from tests.unit.apps.apps_on_cpu import RELAX, FakeCupy

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "jacobi.py"
PRINTED = re.compile(
    r"(\d+) rank\(s\), (\w+), (.*): (\d+) steps, .* us each\nresidual (\S+), .* largest error (\S+)\n"
)


def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def printed(said: str) -> tuple[str, int, float]:
    """Return the kind of steps, their number, and the residual of a run."""
    found = PRINTED.search(said)
    assert found, said
    return found[3], int(found[4]), float(found[5])


def serial(cells: tuple[int, int, int], tolerance: float, every: int) -> tuple[int, float]:
    """Return steps and residual of a run without halox."""

    def left_hand_side(u: np.ndarray) -> np.ndarray:
        padded = np.pad(u, 1)
        around = sum(np.roll(padded, by, axis) for axis in range(3) for by in (-1, 1))
        return 6 * u - around[1:-1, 1:-1, 1:-1]

    exact = np.zeros(cells)
    for halves, amplitude in example()["WAVES"].items():
        sines = (
            np.sin(np.pi * k * np.arange(1, n + 1) / (n + 1))
            for k, n in zip(halves, cells, strict=True)
        )
        exact += amplitude * np.einsum("i,j,k", *sines)
    f, u, steps = left_hand_side(exact), np.zeros(cells), 0
    while True:
        for _ in range(every):
            r = f - left_hand_side(u)
            u = u + r / 6
        steps += every
        if np.linalg.norm(r) <= tolerance * np.linalg.norm(f):
            return steps, float(np.linalg.norm(r))


@pytest.mark.parametrize("wrong", [1.001, np.nan])
def test_a_wrong_norm_is_noticed(wrong: float) -> None:
    support.require("mpi")

    class WrongNorm(halox.Grid):
        def norm(self, field: Any, out: Any = None, **named: Any) -> Any:
            value = super().norm(field, **named) * wrong
            if out is not None:
                out[...] = value
            return value

    main = example()["main"]
    main.__globals__["halox"] = SimpleNamespace(Grid=WrongNorm)
    with pytest.raises(SystemExit, match="wrong"):
        main(["--device", "cpu", "--steps", "200"])


@pytest.mark.parametrize("words", ["--read-every 5", "--cells 3 9 9"])
def test_options_that_cannot_be(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        example()["main"](words.split())
    assert words.split()[0] in capsys.readouterr().err


def test_the_kernel_as_cpp_equals_numpy() -> None:
    """Odd extents, several thread blocks."""
    support.require("cxx")
    scope, shape = example(), (6, 9, 37)
    u, f = np.random.default_rng(1).random((2, *(n + 2 for n in shape)))
    expected, found = np.full_like(u, -1), np.full_like(u, -1)
    scope["numpy_relax"](u, f, expected)
    grid = SimpleNamespace(rank_shape=shape, xp=FakeCupy(RELAX))
    scope["cupy_relax"](grid)(u, f, found)
    np.testing.assert_allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize("architecture", ["sm_90", *support.full("sm_80")])
def test_the_kernel_compiles_without_warnings(architecture: str) -> None:
    flags = [f"-arch={architecture}", "-std=c++17"]
    assert not by_nvrtc(example()["SOURCE"], "relax.cu", flags).log
