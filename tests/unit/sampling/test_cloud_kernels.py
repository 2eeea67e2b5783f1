"""The kernels of clouds, compiled for the CPU: the values and sums of the host, in any order of threads."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import halox
from halox.runtime.gpu.compiler import preamble, source
from halox.sampling import clouds, locating
from tests.fakes.cpu_kernels import SHIM, shared_library
from tests.support import require

require("cxx")


@cache
def library(defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    return shared_library(f"""{preamble(defines)}
#include "{SHIM}"
// A block is one warp, and each of its threads a fiber: it waits for the others before and after it publishes a number.
static unsigned long long lanes[32];
static void publish(unsigned long long mine)
{{
    wait_for_the_block();
    lanes[threadIdx.x] = mine;
    wait_for_the_block();
}}
template <class T> static T __shfl_sync(unsigned, T mine, int lane)
{{
    unsigned long long bits = 0;
    std::memcpy(&bits, &mine, sizeof mine);
    publish(bits);
    std::memcpy(&mine, &lanes[lane], sizeof mine);
    return mine;
}}
static unsigned __match_any_sync(unsigned, long long number)
{{
    const unsigned long long mine = (unsigned long long)number;
    publish(mine);
    unsigned found = 0;
    for (int lane = 0; lane < 32; ++lane)
        found |= unsigned(lanes[lane] == mine) << lane;
    return found;
}}
static unsigned __ballot_sync(unsigned, bool mine)
{{
    publish(mine);
    unsigned found = 0;
    for (int lane = 0; lane < 32; ++lane)
        found |= unsigned(lanes[lane]) << lane;
    return found;
}}
static bool __any_sync(unsigned mask, bool mine) {{ return __ballot_sync(mask, mine) != 0; }}
static int __popc(unsigned bits) {{ return __builtin_popcount(bits); }}
static int __ffs(unsigned bits) {{ return __builtin_ffs(int(bits)); }}
template <class T> static void atomicAdd(T* at, T value) {{ *at += value; }}
{source("clouds")}
extern "C" void run(unsigned blocks, int backwards, int adds, char* field, const Position* positions, TYPE* values,
                    long long particles, long long stride, const Places* places, const Axes* axes)
{{
    if (adds)
        launch_with_barriers(blocks, 32, backwards != 0, add_clouds, field, positions, values, particles, stride,
                             *places, *axes);
    else
        launch_on_cpu(blocks, 32, backwards != 0, get_clouds, field, positions, values, particles, stride, *places,
                      *axes);
}}
""")


class OnGpu(np.ndarray):
    """An array of the host that has an address as an array of CuPy."""

    data = property(lambda self: SimpleNamespace(ptr=self.__array_interface__["data"][0]))


class FakeCupy:
    """NumPy, with such arrays as results."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            found = getattr(np, name)(*args)
            return found.view(OnGpu) if isinstance(found, np.ndarray) else found

        return call


class CpuLaunch:
    """Runs a kernel by the order of threads that is set."""

    backwards = False

    def __init__(
        self, code: Any, blocks: int, threads: int, args: list[Any], *, device: int
    ) -> None:
        assert (blocks, threads, device) == (1, 32, 0)
        function, defines = code
        self.run, self.adds = library(defines).run, function == "add_clouds"
        self.places, self.axes = args[5:]

    def launch_with(self, stream: int, blocks: int, *values: int) -> None:
        order = map(ctypes.c_int, (self.backwards, self.adds))
        tables = map(ctypes.byref, (self.places, self.axes))
        self.run(ctypes.c_uint(blocks), *order, *map(ctypes.c_uint64, values), *tables)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clouds._prepared.cache_clear()
    monkeypatch.setattr(clouds, "PreparedLaunch", CpuLaunch)
    monkeypatch.setattr(clouds, "kernel", lambda _, function, device, defines: (function, defines))
    monkeypatch.setattr(clouds, "stream_pointer", lambda: 0)
    monkeypatch.setattr(clouds, "_THREADS", 32)
    monkeypatch.setattr(
        clouds, "allocate", lambda shape, dtype, _: np.empty(shape, dtype).view(OnGpu)
    )
    for module in (clouds, locating):
        monkeypatch.setattr(module, "as_device_array", lambda array: np.asarray(array).view(OnGpu))


def on_gpu(domain: Any) -> Any:
    """Return a domain whose fields seem to be on a GPU."""

    def read(field: Any) -> Any:
        described, layout = domain.layouts.read(field)
        return replace(described, device=0), layout

    return SimpleNamespace(layouts=SimpleNamespace(read=read), device_id=0, xp=FakeCupy())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("shape", "order", "dtype", "options"),
    [
        ((11,), 1, "c16", {}),
        ((6, 5), 0, "c8", {"staggered": 1}),
        ((9, 7), 2, "f4", {"components": (2, ..., 3)}),
        ((4, 5, 6), 1, "f8", {"staggered": (0, 2), "components": 2}),
        ((3, 4, 9), 2, "f8", {}),
        ((3, 3, 4, 3), 1, "f4", {}),
    ],
)
def test_values_and_sums(shape: Any, order: int, dtype: str, options: Any) -> None:
    """Values and sums, with threads in either order, of particles in any order and of sorted ones."""
    rng = np.random.default_rng(4)
    x = rng.uniform(-0.5, np.array(shape) - 0.5, (70, len(shape)))  # two warps, and a part of one
    x[:40] = np.maximum(x[:40] // 2, 0)  # many with the same points
    small = 1e-5 if dtype in ("f4", "c8") else 1e-13
    with halox.Grid(shape, halo=1, periodic=True, device="cpu") as grid:
        domain, gpu = grid.domain, on_gpu(grid.domain)
        u = grid.random(1, dtype=dtype, **options)
        grid.exchange(u)
        expected = clouds.read_clouds(domain, u, x, order)
        found = clouds.read_clouds(gpu, u, x.view(OnGpu), order)
        assert found.dtype == dtype and np.allclose(found, expected, small, small)
        given = rng.normal(size=expected.shape).astype(dtype)
        total = grid.zeros(dtype, **options)
        clouds.add_clouds(domain, total, x, given, order, reproducible=False)
        by_place = np.lexsort(np.floor(x if order == 1 else x + 0.5).T[::-1])
        for backwards, rows in product((False, True), (slice(None), by_place)):
            CpuLaunch.backwards = backwards
            w = grid.zeros(dtype, **options)
            clouds.add_clouds(gpu, w, x[rows].view(OnGpu), given[rows], order, reproducible=False)
            assert np.allclose(w, total, small * 10, small * 10)
        ones = grid.ones(dtype, **options)
        clouds.add_clouds(gpu, ones, x.view(OnGpu), -0.5, order, reproducible=False)
        assert np.isclose(ones.sum(), ones.size - 35 * given[0].size, small * 100)


@pytest.mark.usefixtures("gpu")
def test_particles_outside_are_seen() -> None:
    """A particle that is not in the rank's cells gives NaN, and no access outside the array."""
    x = np.array([[3.0, 2.0], [200.0, 2.0], [1.0, -1e300], [np.nan, 0.0]]).view(OnGpu)
    with halox.Grid((6, 5), halo=1, device="cpu") as grid:
        u = grid.ones()
        found = clouds.read_clouds(on_gpu(grid.domain), u, x, 1)
        assert np.array_equal(found, [1, np.nan, np.nan, np.nan], equal_nan=True)
        clouds.add_clouds(on_gpu(grid.domain), u, x, 1.0, 1, reproducible=False)
        assert np.isnan(u).any()
