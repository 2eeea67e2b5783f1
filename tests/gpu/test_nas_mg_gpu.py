"""The multigrid mini-app on a GPU: its kernels agree with NumPy up to rounding; whole runs pass NAS verification."""

from __future__ import annotations

import numpy as np
import pytest

from apps.nas_mg.classes import CLASSES, OPERATOR
from apps.nas_mg.device_kernels import DeviceKernels
from apps.nas_mg.host_kernels import HostKernels
from tests.support import require, verified

pytestmark = pytest.mark.gpu
require("gpu")

import cupy  # noqa: E402

SHAPES = [(2, 2, 2), (1, 4, 3), (33, 30, 70), (64, 256, 130)]


def random(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(tuple(n + 2 for n in shape)) - 0.5


@pytest.fixture(scope="module")
def kernels() -> DeviceKernels:
    return DeviceKernels(cupy)


@pytest.mark.parametrize("weights", [OPERATOR, CLASSES["A"].smoother, CLASSES["C"].smoother])
@pytest.mark.parametrize("shape", SHAPES)
def test_stencil_equals_numpy(
    kernels: DeviceKernels, shape: tuple[int, int, int], weights: tuple[float, ...]
) -> None:
    u, v = random(shape, 1), random(shape, 2)
    r = np.zeros_like(u)
    there = [cupy.asarray(array) for array in (u, v, r)]
    HostKernels().stencil(u, v, r, weights)()
    kernels.stencil(*there, weights)()
    inside = (slice(1, -1),) * 3
    np.testing.assert_allclose(there[2].get()[inside], r[inside], rtol=1e-13, atol=1e-14)
    kernels.stencil(there[0], there[1], there[1], weights)()
    np.testing.assert_allclose(there[1].get()[inside], r[inside], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("shape", SHAPES)
def test_transfers_equal_numpy(kernels: DeviceKernels, shape: tuple[int, int, int]) -> None:
    fine = random(tuple(2 * n for n in shape), 3)
    whole = np.zeros(tuple(n + 7 for n in shape))
    place = tuple(slice(a, a + n + 2) for a, n in zip((1, 2, 4), shape, strict=True))
    fine_there, whole_there = cupy.asarray(fine), cupy.asarray(whole)
    HostKernels().restrict(fine, whole[place])()
    kernels.restrict(fine_there, whole_there[place])()
    np.testing.assert_allclose(whole_there.get(), whole, rtol=1e-13, atol=1e-14)
    for add in (True, False):
        HostKernels().prolong(whole[place], fine, add=add)()
        kernels.prolong(whole_there[place], fine_there, add=add)()
        np.testing.assert_allclose(fine_there.get(), fine, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "ranks", "graph"),
    [
        ("S", 1, False),
        ("A", 1, False),
        ("W", 1, True),
        ("A", 2, False),
        ("S", 4, False),
        ("W", 2, True),
    ],
)
def test_official_verification(name: str, ranks: int, graph: bool) -> None:
    if graph and ranks > cupy.cuda.runtime.getDeviceCount():
        pytest.skip(f"{ranks} GPUs are needed: ranks that share a GPU exchange by the host")
    words = f"--class {name} -n {ranks} --device gpu" + " --graph" * graph
    figures = verified("nas_mg", *words.split())
    assert figures["device"] == "gpu" and figures["graph"] is graph
    assert figures["checks"] == {"official_norm": True, "norms_of_first_iterations": True}
