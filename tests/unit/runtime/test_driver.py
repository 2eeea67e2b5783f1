"""Copies, queries and launches through the driver, with a stand-in library that executes them in host memory."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from halox.errors import DeviceError
from halox.runtime.gpu import driver
from halox.runtime.gpu.copies import PreparedMemcpy
from tests.fakes.fake_driver import STREAM, compiled, fake_driver
from tests.support import ROOT, require

GUARD = 0xA5


@pytest.fixture
def newest():
    require("cxx")
    require("nvrtc")
    with fake_driver() as found:
        yield found


def bytes_of(n, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, GUARD, n, np.uint8)


def address(array) -> int:
    return array.ctypes.data


class TestCopies:
    @pytest.mark.parametrize(
        ("shape", "pitches", "counts"),
        [
            ((1, 1, 900), {}, (1, 0, 0)),
            ((1, 20, 13), {"target_pitch": 17, "source_pitch": 31}, (0, 1, 0)),
            (
                (5, 7, 13),
                {"target_pitch": 17, "target_rows": 8, "source_pitch": 31, "source_rows": 9},
                (0, 0, 1),
            ),
        ],
        ids=["contiguous", "rows", "slices"],
    )
    def test_boxes(self, newest, shape, pitches, counts):
        def box(memory, side):
            pitch = pitches.get(f"{side}_pitch", shape[2])
            steps = pitch * pitches.get(f"{side}_rows", shape[1]), pitch, 1
            return np.ndarray(shape, "u1", memory.data, 1, steps)

        source, target = bytes_of(2000), np.full(2000, GUARD, np.uint8)
        expected = target.copy()
        box(expected, "target")[...] = box(source, "source")
        copy = PreparedMemcpy(*reversed(shape), **pitches)
        copy.launch(address(target) + 1, address(source) + 1, STREAM)
        assert (target == expected).all() and (target != GUARD).any()
        assert newest.counts() == counts and newest["last_stream"] == STREAM

    def test_many_threads_share_a_prepared_copy(self, newest):
        rows = PreparedMemcpy(8, 100, target_pitch=8, source_pitch=16)
        wrong = []

        def work(number):
            source, target = np.full(200, number, "u8"), np.zeros(100, "u8")
            for _ in range(200):
                target[:] = 0
                rows.launch(address(target), address(source), STREAM)
                if not (target == number).all():
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number + 1,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


class TestErrors:
    @pytest.mark.parametrize("code", [driver.NOT_INITIALIZED, driver.INVALID_CONTEXT])
    def test_a_thread_without_a_context_gets_one(self, newest, monkeypatch, code):
        made = []
        monkeypatch.setattr(driver, "make_context", made.append)
        source, target = bytes_of(8), np.zeros(8, np.uint8)
        newest["next_error"] = code
        PreparedMemcpy(8, device=3).launch(address(target), address(source), STREAM)
        assert made == [3]
        assert (target == source).all()
        newest["next_error"] = 12345
        with pytest.raises(DeviceError):
            PreparedMemcpy(8).launch(0, 0, STREAM)

    def test_a_driver_without_the_function(self):
        require("cxx")
        require("nvrtc")
        with fake_driver(without=("cuMemcpy3DAsync_v2",)), pytest.raises(DeviceError):
            PreparedMemcpy(8, 2, 2).launch(0, 0, STREAM)


def test_nvidias_own_bindings():
    """The real bindings make the same calls to the stand-in as the other tests' replacement for them."""
    require("cxx")
    require("nvrtc")
    here = ROOT / "tests/fakes/with_bindings.py"
    subprocess.run([sys.executable, str(here), str(compiled(named=True))], check=True, timeout=500)
