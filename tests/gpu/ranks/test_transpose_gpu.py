"""Transposes of GPU arrays, compared with the references of the CPU tests, and their order in the user's stream."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

import halox
from tests.gpu.ranks.test_exchange_gpu import stall
from tests.mpi.conftest import agree
from tests.mpi.test_transpose import SEED, Turn, check, pencils, turns
from tests.strategies import on_ranks
from tests.support import require

require("gpu")

import cupy  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = ["c16", "f8", "f4", "c8", "f2", "i1", "i8", "u2", "?"]


@on_ranks(partial(turns, dtypes=DTYPES), 50)
def test_random_divisions(case: Turn, comm: MPI.Intracomm) -> None:
    check(case, comm, "gpu")


@pytest.mark.parametrize("shape", [(64, 64, 64), (130, 127, 66)])
def test_pencils_round_a_ring_of_three(shape: tuple[int, ...], comm: MPI.Intracomm) -> None:
    """Repeated messages of megabytes, which some paths cut into fragments."""
    grids = pencils(shape, comm, device="gpu")
    fields = [grid.zeros("c16") for grid in grids]
    ring = [(k, (k + 1) % 3) for k in range(3)]
    transposes = [halox.Transpose(grids[k], grids[n]) for k, n in ring]

    def values(grid: halox.Grid, step: int) -> cupy.ndarray:
        x, y, z = grid.indices()
        return x * 1e6 + y * 1e3 + z + 1j * step

    for step in range(5):
        fields[0][...] = values(grids[0], step)
        for (source, target), transpose in zip(ring, transposes, strict=True):
            fields[target][...] = -1
            transpose.forward(fields[source], fields[target])
            right = bool((fields[target] == values(grids[target], step)).all())
            assert agree(right, comm), (step, source)
    for each in (*transposes, *grids):
        each.close()


@pytest.mark.parametrize("non_blocking", [False, True])
def test_ordered_after_a_stalled_stream(non_blocking: bool, comm: MPI.Intracomm) -> None:
    """Queued kernels write the cells that a transpose sends, and read the cells that the next one overwrites."""
    a, b, _ = pencils((24, 20, 16), comm, device="gpu")
    with a, b, halox.Transpose(a, b) as t:
        u, v, back = a.zeros("f8"), b.zeros("f8"), a.zeros("f8")
        cupy.cuda.runtime.deviceSynchronize()  # another stream fills them
        with cupy.cuda.Stream(non_blocking=non_blocking) as stream:
            for step in range(4):
                x, y, z = a.indices()
                wanted = x * 1e4 + y * 1e2 + z + step * 1e6
                stall()
                u[...] = wanted
                t.forward(u, v)
                v *= 2
                t.backward(v, back)
                right = bool((back == 2 * wanted).all())
                assert agree(right, comm), step
            stream.synchronize()


def test_fft_by_pencils_equals_the_serial_one(comm: MPI.Intracomm) -> None:
    shape = (24, 18, 20)
    rng = np.random.default_rng(SEED)
    whole = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    x, y, z = pencils(shape, comm, device="gpu")
    with x, y, z, halox.Transpose(x, y) as first, halox.Transpose(y, z) as second:
        u, v, w = (grid.zeros("c16") for grid in (x, y, z))
        u[...] = cupy.fft.fft(cupy.asarray(whole[x.owned]), axis=0)
        first.forward(u, v)
        v[...] = cupy.fft.fft(v, axis=1)
        second.forward(v, w)
        w[...] = cupy.fft.fft(w, axis=2)
        spectrum = z.gather(w)
        if comm.rank == 0:
            assert spectrum is not None
            assert np.allclose(spectrum, np.fft.fftn(whole), rtol=1e-12, atol=1e-10)


def test_arrays_of_two_kinds_of_memory_are_refused(comm: MPI.Intracomm) -> None:
    a, b, _ = pencils((8, 8, 8), comm, device="gpu")
    with a, b, halox.Transpose(a, b) as t:
        u = a.zeros("f8")
        with pytest.raises(halox.errors.DeviceError):
            t.forward(u, np.zeros(b.padded_shape))


def test_grids_on_unlike_devices_are_refused(comm: MPI.Intracomm) -> None:
    shape = (8, 8, 8 * comm.size)
    with (
        halox.Grid(shape, comm=comm, device="gpu") as a,
        halox.Grid(shape, comm=comm, device="cpu") as b,
        pytest.raises(halox.errors.DeviceError),
    ):
        halox.Transpose(a, b)


def test_in_place_is_refused(comm: MPI.Intracomm) -> None:
    with (
        halox.Grid((4, 4 * comm.size), halo=0, comm=comm, device="gpu") as a,
        halox.Grid((4, 4 * comm.size), halo=0, comm=comm, device="gpu") as b,
        halox.Transpose(a, b) as t,
    ):
        memory = cupy.zeros((2, *a.padded_shape))
        for u, v in ((memory[0], memory[0]), (memory[0], memory[0, ::-1])):
            with pytest.raises(halox.errors.FieldError):
                t.forward(u, v)
        memory[0] = a.indices()[1]
        t.forward(memory[0], memory[1])
        assert agree(bool((memory[1] == memory[0]).all()), comm)
