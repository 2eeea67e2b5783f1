"""Driver copies and memory queries on a GPU, compared with NumPy, with guard bytes around every target."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import require

pytestmark = pytest.mark.gpu
require("gpu")

import cupy as cp  # noqa: E402

from halox.errors import DeviceError  # noqa: E402
from halox.runtime.gpu.copies import (  # noqa: E402
    MAX_PITCH,
    PreparedMemcpy,
)
from halox.runtime.gpu.memory import pinned  # noqa: E402
from tests.gpu.guarded import DEVICE, GUARD, STREAMS, Settled, coded  # noqa: E402


@pytest.fixture(params=STREAMS)
def stream(request):
    cp.cuda.runtime.deviceSynchronize()
    return STREAMS[request.param]()


def filled(nbytes: int) -> Settled:
    return Settled(np.full(nbytes, GUARD, np.uint8))


class TestDriver:
    def test_copies(self, stream):
        host = coded(6 * 9 * 31)
        source, cube = Settled(host), host.reshape(6, 9, 31)

        target = filled(500)
        PreparedMemcpy(500).launch(target.pointer, source.pointer + 1, stream.ptr)
        assert (target.get() == host[1:501]).all()

        target = filled(54 * 17)
        rows = PreparedMemcpy(13, 54, target_pitch=17, source_pitch=31)
        rows.launch(target.pointer, source.pointer + 2, stream.ptr)
        expected = np.full((54, 17), GUARD, np.uint8)
        expected[:, :13] = host.reshape(54, 31)[:, 2:15]
        assert (target.get() == expected.ravel()).all()

        target = filled(6 * 8 * 17)
        slices = PreparedMemcpy(
            13, 7, 6, target_pitch=17, target_rows=8, source_pitch=31, source_rows=9
        )
        slices.launch(target.pointer, source.pointer + 2, stream.ptr)
        expected = np.full((6, 8, 17), GUARD, np.uint8)
        expected[:, :7, :13] = cube[:, :7, 2:15]
        assert (target.get() == expected.ravel()).all()

    def test_pitch_limit(self):
        runtime = cp.cuda.runtime
        limit = runtime.deviceGetAttribute(11, DEVICE)  # cudaDevAttrMaxPitch
        assert limit >= MAX_PITCH
        target = filled(64)
        with pytest.raises(DeviceError):
            rows = PreparedMemcpy(8, 2, target_pitch=4, source_pitch=8)
            rows.launch(target.pointer, target.pointer + 32, 0)

    def test_page_locked_memory(self):
        buffer = pinned(1000)
        buffer.array[:] = 7
        runtime = cp.cuda.runtime
        found = cp.zeros(1000, np.uint8)
        runtime.memcpy(found.data.ptr, buffer.device_pointer, 1000, runtime.memcpyDefault)
        assert (found == 7).all()
        buffer.close()

    def test_prepared_copies_keep_their_shape(self):
        rows = PreparedMemcpy(8, 10, target_pitch=8, source_pitch=16, device=DEVICE)
        stream = cp.cuda.Stream(non_blocking=True)
        hosts = [np.roll(coded(160), seed) for seed in range(3)]
        pairs = [(Settled(host), filled(80)) for host in hosts]
        for source, target in pairs:
            rows.launch(target.pointer, source.pointer, stream.ptr)
        for host, (_, target) in zip(hosts, pairs, strict=True):
            assert target.get().tobytes() == host.view("f8")[::2].tobytes()
