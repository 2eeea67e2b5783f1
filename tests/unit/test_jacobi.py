"""The Jacobi example: its checks, and its GPU code run on the CPU. tests/mpi/test_examples.py runs it on ranks."""

from __future__ import annotations

import ctypes
import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halox
from tests import support
from tests.unit.apps_on_cpu import SHIM
from tests.unit.cpu_kernels import compiled_once
from tests.unit.nvrtc import by_nvrtc

ROOT = Path(__file__).resolve().parents[2]
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
def test_a_wrong_norm_is_noticed(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    support.require("mpi")
    norm = halox.Grid.norm

    def wrong_norm(grid: halox.Grid, field: Any, out: Any = None, **named: Any) -> Any:
        value = norm(grid, field, **named) * wrong
        if out is not None:
            out[...] = value
        return value

    monkeypatch.setattr(halox.Grid, "norm", wrong_norm)
    with pytest.raises(SystemExit, match="wrong"):
        example()["main"](["--device", "cpu", "--steps", "200"])


@pytest.mark.parametrize("words", ["--read-every 5", "--cells 3 9 9"])
def test_options_that_cannot_be(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        example()["main"](words.split())
    assert words.split()[0] in capsys.readouterr().err


class FakeGrid(halox.Grid):
    """A grid with NumPy arrays that claims to be on a GPU."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"device": "cpu"})
        self.device = "gpu"
        self.xp = FakeCupy()


class FakeCupy:
    """NumPy, with kernels compiled by g++."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def RawKernel(self, source: str, name: str) -> Callable[..., None]:
        function = compiled(source, name)

        def launch(blocks: Sequence[int], threads: Sequence[int], given: Sequence[Any]) -> None:
            *fields, ny, nz = given
            for field in fields:
                assert field.flags.c_contiguous
                assert field.shape == (blocks[2] + 2, ny + 2, nz + 2)
            function(
                (ctypes.c_uint * 3)(*blocks),
                (ctypes.c_uint * 2)(*threads),
                *(ctypes.c_void_p(field.ctypes.data) for field in fields),
                *(ctypes.c_int(n) for n in (ny, nz)),
            )

        return launch


LAUNCH = """
LAUNCH(relax, const double* u COMMA const double* f COMMA double* next COMMA int ny COMMA int nz,
       (u, f, next, ny, nz))
"""


def compiled(source: str, name: str) -> Any:
    flags = ["-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-fsanitize=undefined"]
    text = SHIM.format(source=source, launches=LAUNCH)
    path = compiled_once(text, *flags, "-fno-sanitize-recover=all")
    return ctypes.CDLL(str(path))[f"launch_{name}"]


def test_the_kernel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Odd extents, several thread blocks."""
    support.require("mpi")
    support.require("cxx")
    monkeypatch.setattr(halox, "Grid", FakeGrid)
    options = "--cells 6 9 37 --tolerance 1e-2 --read-every 10"
    assert example()["main"](options.split()) < 1e-13
    _, steps, residual = printed(capsys.readouterr().out)
    known_steps, known = serial((6, 9, 37), 1e-2, 10)
    assert steps == known_steps
    assert residual == pytest.approx(known, rel=1e-11)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_kernel_compiles_without_warnings(architecture: str) -> None:
    flags = [f"-arch={architecture}", "-std=c++17"]
    assert not by_nvrtc(example()["SOURCE"], "relax.cu", flags).log
