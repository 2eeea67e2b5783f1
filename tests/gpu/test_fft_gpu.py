"""Transforms on one GPU against scipy.fft and the definition, their order with streams, and their capture in graphs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

import halox
from halox.errors import DeviceError, StateError
from tests.gpu.ranks.test_exchange_gpu import stall
from tests.mpi.test_fft import Transform, check, transforms
from tests.strategies import PATIENT
from tests.support import require

require("gpu")

import cupy  # noqa: E402
from mpi4py import MPI  # noqa: E402

pytestmark = pytest.mark.gpu


def alone(shape: tuple[int, ...], halo: int = 0) -> halox.Grid:
    return halox.Grid(shape, halo=halo, periodic=True, comm=MPI.COMM_SELF, device="gpu")


@settings(PATIENT, max_examples=120)
@given(transforms(1))
def test_random_transforms(case: Transform) -> None:
    check(case, MPI.COMM_SELF, "gpu")


@pytest.mark.parametrize("halo", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["c8", "c16", "f4", "f8"])
@pytest.mark.parametrize("shape", [(128, 96, 80), (300, 257), (63, 65, 66), (24, 20, 18, 16)])
def test_as_cupy_transforms(shape: tuple[int, ...], dtype: str, halo: int) -> None:
    real = dtype[0] == "f"
    with alone(shape, halo) as grid, halox.FFT(grid, real=real) as fft:
        u = grid.full(np.nan, dtype)
        cells = cupy.random.default_rng(1).standard_normal(shape).astype(dtype)
        grid.interior(u)[...] = cells
        s = fft.forward(u)
        wanted = (cupy.fft.rfftn if real else cupy.fft.fftn)(cells)
        tolerance = (2e-5 if dtype in ("c8", "f4") else 1e-13) * float(abs(wanted).max())
        assert s.dtype == wanted.dtype and float(abs(s - wanted).max()) < tolerance
        kept = s.copy()
        v = fft.backward(s, grid.full(-7, dtype))
        assert bool((s == kept).all()), "the spectrum was changed"
        assert float(abs(grid.interior(v) - cells).max()) < (
            1e-4 if dtype in ("c8", "f4") else 1e-12
        )
        grid.interior(v)[...] = -7
        assert bool((v == -7).all()), "the halo was written"


def test_one_plan_for_a_whole_field_with_a_halo() -> None:
    """cuFFT reads and writes the interior of a field in place; only the normalization adds a step to its plan."""
    with alone((32, 32, 32), 2) as grid, halox.FFT(grid, norm="forward") as fft:
        s = fft.forward(grid.zeros("c16"))
        fft.backward(s)
        assert len(fft._engine._plans) == 2 and not fft._engine._work
        (pipeline,) = fft._pipelines.values()
        assert [len(steps) for steps in pipeline._bound.values()] == [2, 1]  # a factor forward


@settings(PATIENT, max_examples=20)
@given(transforms(1))
def test_plans_of_64_bits(case: Transform) -> None:
    """Arrays of more than 2**31 - 1 elements need cuFFT plans with 64-bit indices; here all arrays use these plans."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("halox.fft.cufft._LARGEST", 0)
        check(case, MPI.COMM_SELF, "gpu")


def test_later_calls_allocate_nothing() -> None:
    with alone((48, 40, 36), 1) as grid, halox.FFT(grid, real=True, dealias=True) as fft:
        u, s = fft.physical.zeros("f8"), fft.grid.zeros("c16")
        fft.forward(u, s)
        fft.backward(s, u)
        pool = cupy.get_default_memory_pool()
        before = pool.used_bytes()
        for _ in range(3):
            fft.forward(u, s)
            fft.backward(s, u)
            assert pool.used_bytes() == before


@pytest.mark.parametrize("dealias", [False, True])
@pytest.mark.parametrize("real", [False, True])
def test_captured(real: bool, dealias: bool) -> None:
    """A spectral step captured as one graph, and replayed with new values."""
    with alone((24, 20, 18), 1) as grid, halox.FFT(grid, real=real, dealias=dealias) as fft:
        fine = fft.physical
        u, v = (fine.zeros("f8" if real else "c16") for _ in "uv")
        s = fft.grid.zeros("c16")
        kx, _, _ = fft.wavenumbers()
        factor = 1j * kx
        x = 2 * np.pi * fine.indices()[0] / fine.grid_shape[0]

        def step() -> None:
            fft.forward(u, s)
            cupy.multiply(s, factor, out=s)
            fft.backward(s, v)

        step()
        cupy.cuda.runtime.deviceSynchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            step()
            stream.begin_capture()
            step()
            graph = stream.end_capture()
            for k in range(1, 6):
                fine.interior(u)[...] = cupy.sin(k * x)
                fine.interior(v)[...] = -1
                graph.launch(stream)
                wanted = k * cupy.cos(k * x)
                assert float(abs(fine.interior(v) - wanted).max()) < 1e-12
            stream.synchronize()


def test_a_first_call_in_a_capture_is_refused() -> None:
    with alone((16, 16)) as grid, halox.FFT(grid) as fft:
        u, s = grid.zeros("c16"), fft.grid.zeros("c16")
        cupy.cuda.runtime.deviceSynchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            with pytest.raises(StateError):
                fft.forward(u, s)
            stream.end_capture()
        fft.forward(u, s)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_ordered_after_stalled_and_changing_streams(non_blocking: bool) -> None:
    """Each call reuses the work arrays of the previous call, which may still be queued on another stream."""
    with alone((40, 36), 1) as grid, halox.FFT(grid, real=True) as fft:
        fields = [(grid.zeros(), grid.zeros(), fft.grid.zeros("c16")) for _ in range(6)]
        x = 2 * np.pi * grid.indices()[0] / 40
        fft.backward(fft.forward(fields[0][0], fields[0][2]), fields[0][1])
        cupy.cuda.runtime.deviceSynchronize()
        streams = [cupy.cuda.Stream(non_blocking=non_blocking) for _ in range(2)]
        for k, (u, v, s) in enumerate(fields):
            with streams[k % 2]:
                stall()
                grid.interior(u)[...] = cupy.cos(k * x)
                fft.forward(u, s)
                fft.backward(s, v)
        cupy.cuda.runtime.deviceSynchronize()
        for k, (_, v, _) in enumerate(fields):
            assert float(abs(grid.interior(v) - cupy.cos(k * x)).max()) < 1e-13, k


def test_wave_numbers_are_on_the_gpu() -> None:
    with alone((8, 6)) as grid, halox.FFT(grid, real=True) as fft:
        kx, ky = fft.wavenumbers(2 * np.pi)
        assert isinstance(kx, cupy.ndarray)
        assert np.allclose(kx.get().ravel(), np.fft.fftfreq(8) * 8)
        assert np.allclose(ky.get().ravel(), np.fft.rfftfreq(6) * 6)


def test_host_arrays_are_refused() -> None:
    with alone((8, 6)) as grid, halox.FFT(grid) as fft:
        with pytest.raises(DeviceError):
            fft.forward(np.zeros((8, 6), "c16"))
        with pytest.raises(DeviceError):
            fft.forward(grid.zeros("c16"), np.zeros((8, 6), "c16"))
