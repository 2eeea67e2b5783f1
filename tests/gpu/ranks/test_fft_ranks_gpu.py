"""Transforms of GPU arrays on several ranks, compared with the references of the CPU tests, and captured in graphs."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import halox
from tests.gpu.ranks.paths import PEER, along
from tests.mpi.conftest import agree
from tests.mpi.test_fft import Transform, check, transforms
from tests.mpi.ways import Way
from tests.strategies import on_ranks
from tests.support import require

require("gpu")

import cupy  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.ranks(2, 4)  # tests/gpu/test_fft_gpu.py has random transforms on one rank
@on_ranks(transforms, 32)
def test_random_transforms(case: Transform, comm: MPI.Intracomm) -> None:
    check(case, comm, "gpu")


@pytest.mark.parametrize("halo", [0, 1])
@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("slabs", [False, True])
def test_large_fields(slabs: bool, real: bool, halo: int, comm: MPI.Intracomm) -> None:
    """Repeated messages of megabytes, which some paths cut into fragments."""
    shape = (130, 128, 126)
    p, q = (comm.size, 1) if slabs else MPI.Compute_dims(comm.size, 2)
    with (
        halox.Grid(shape, halo=halo, proc_shape=(p, q, 1), comm=comm, device="gpu") as grid,
        halox.FFT(grid, real=real) as fft,
    ):
        u, v = (grid.zeros("f8" if real else "c16") for _ in "uv")
        s = fft.grid.zeros("c16")
        x, y, z = (2 * np.pi * i / n for i, n in zip(grid.indices(), shape, strict=True))
        _, ky, _ = fft.wavenumbers()
        for k in range(1, 5):
            grid.interior(u)[...] = cupy.sin(k * x) * cupy.cos(2 * y + 1) * cupy.sin(5 * z)
            fft.forward(u, s)
            s *= 1j * ky
            fft.backward(s, v)
            wanted = -2 * cupy.sin(k * x) * cupy.sin(2 * y + 1) * cupy.sin(5 * z)
            assert agree(float(abs(grid.interior(v) - wanted).max()) < 1e-12, comm), k


def test_a_shape(comm: MPI.Intracomm) -> None:
    """The transform makes a grid of slabs."""
    whole = np.random.default_rng(5).standard_normal((24, 20, 15))
    with halox.FFT(whole.shape, real=True, comm=comm, device="gpu") as fft:
        assert fft.physical.proc_shape == (comm.size, 1, 1)
        u = cupy.asarray(whole[fft.physical.owned])
        s = fft.forward(u)
        assert agree(np.allclose(s.get(), np.fft.rfftn(whole)[fft.grid.owned], atol=1e-11), comm)
        assert agree(np.allclose(fft.backward(s).get(), u.get(), atol=1e-12), comm)


@pytest.mark.ranks(2, 4)
@along(PEER[1:2])
def test_captured(way: Way, comm: MPI.Intracomm) -> None:
    """Forward and backward transforms in one graph, replayed with new values."""
    p, q = MPI.Compute_dims(comm.size, 2)
    with (
        halox.Grid((24, 20, 18), halo=1, proc_shape=(p, q, 1), comm=comm, device="gpu") as grid,
        halox.FFT(grid, real=True, path=way.path) as fft,
    ):
        u, v, s = grid.zeros(), grid.zeros(), fft.grid.zeros("c16")
        x = 2 * np.pi * grid.indices()[0] / 24
        fft.forward(u, s)
        fft.backward(s, v)
        cupy.cuda.runtime.deviceSynchronize()
        comm.Barrier()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            fft.forward(u, s)
            fft.backward(s, v)
            stream.begin_capture()
            fft.forward(u, s)
            fft.backward(s, v)
            graph = stream.end_capture()
            for k in range(20):
                grid.interior(u)[...] = cupy.cos(x) + k
                graph.launch(stream)
                wanted = cupy.cos(x) + k
                right = float(abs(grid.interior(v) - wanted).max()) < 1e-12
                assert agree(right, comm), k
            stream.synchronize()
