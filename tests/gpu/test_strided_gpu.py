"""The strided packer on a GPU, compared with NumPy, with guard bytes around every target."""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
import pytest

from halox import datatypes as dt
from halox.datatypes import StridedBlocks
from tests.support import require

pytestmark = pytest.mark.gpu
require("gpu")

import cupy as cp  # noqa: E402

from halox.errors import DeviceError  # noqa: E402
from halox.packing.refine import Copy, Side, contiguous_side  # noqa: E402
from halox.packing.strided import StridedAdd, StridedCopy  # noqa: E402
from halox.runtime.gpu.compiler import kernel  # noqa: E402
from halox.runtime.gpu.memory import pinned, register  # noqa: E402
from halox.runtime.gpu.streams import stream_pointer  # noqa: E402
from tests.gpu.guarded import (  # noqa: E402
    DEVICE,
    GUARD,
    coded,
    on_device,
)


class TestCopy:
    def test_26_periodic_halos_of_four_fields_in_one_launch(self):
        shape, halo, fields, copies = (30, 29, 28), (1, 2, 1), [], []
        for dtype in ("f8", "f4", "u1", "c16"):
            inner = coded(shape, dtype)
            widths = [(h, h) for h in halo]
            poisoned = np.pad(inner, widths)
            inside = tuple(slice(h, -h) for h in halo)
            poisoned.view("u1")[:] = GUARD
            poisoned[inside] = inner
            field = on_device(poisoned)
            fields.append((field, poisoned, np.pad(inner, widths, mode="wrap")))
            for direction in np.ndindex(3, 3, 3):
                if direction == (1, 1, 1):
                    continue
                axes = list(zip(direction, shape, halo, strict=True))
                subsizes = [n if d == 1 else h for d, n, h in axes]
                receive = [(0, h, h + n)[d] for d, n, h in axes]
                send = [(n, h, h)[d] for d, n, h in axes]
                a, b = (
                    Side(
                        field.pointer,
                        dt.subarray(poisoned.shape, subsizes, starts, dtype).strided,
                    )
                    for starts in (send, receive)
                )
                copies.append(Copy(a, b))
        assert len(copies) == 4 * 26
        for field, poisoned, expected in fields:
            assert field.get().tobytes() == poisoned.tobytes() != expected.tobytes()
        StridedCopy(copies, device=DEVICE).at(stream_pointer())
        for field, _, expected in fields:
            assert field.get().tobytes() == expected.tobytes()


class TestHostMemory:
    def test_views_outlive_a_closed_pinned_buffer(self):
        buffer = pinned(4096)
        view = buffer.array[:10]
        buffer.close()
        buffer.close()
        view[:] = 3
        assert view.sum() == 30
        with pytest.raises(DeviceError, match="closed"):
            _ = buffer.array

    def test_pinned_memory_of_no_bytes(self):
        buffer = pinned(0)
        assert buffer.array.size == 0
        buffer.close()

    @pytest.mark.parametrize("kind", ["anonymous", "file in /dev/shm"])
    def test_shared_memory_of_others_is_registered(self, kind):
        nbytes = 1 << 20
        if kind == "anonymous":
            shared = mmap.mmap(-1, nbytes)
        else:
            with tempfile.TemporaryFile(dir="/dev/shm") as file:
                os.ftruncate(file.fileno(), nbytes)
                shared = mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_SHARED)
        memory = np.frombuffer(shared, np.uint8)
        memory[:] = GUARD
        part = memory[4096 + 64 : -4096]
        buffer = register(part)
        source = cp.arange(200, dtype="f8")
        StridedCopy(
            [
                Copy(
                    Side(int(source.data.ptr), StridedBlocks(0, (100,), (16,), 8)),
                    contiguous_side(buffer.device_pointer + 128, 800),
                )
            ],
            device=DEVICE,
        ).at(stream_pointer())
        cp.cuda.get_current_stream().synchronize()
        assert (part[128:928].view("f8") == np.arange(0, 200, 2)).all()
        assert (memory[: 4096 + 64 + 128] == GUARD).all()
        assert (memory[4096 + 64 + 928 :] == GUARD).all()
        with pytest.raises(DeviceError):
            register(part)
        buffer.close()
        buffer.close()
        register(part).close()
        del memory, part, buffer


class TestAdd:
    @pytest.mark.parametrize(
        "dtype", ["f2", "f4", "f8", "c8", "c16", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"]
    )
    def test_adds_as_numpy_does(self, dtype):
        rng = np.random.default_rng(3)
        shape, box = (20, 21, 22), (slice(1, 18), slice(2, 20), slice(1, 21))
        source, target = ((rng.integers(0, 250, shape) / 3).astype(dtype) for _ in range(2))
        there, here = on_device(source), on_device(target)
        datatype = dt.subarray(shape, (17, 18, 20), (1, 2, 1), dtype)
        a, b = (Side(x.pointer, datatype.strided) for x in (there, here))
        add = StridedAdd([Copy(a, b)], dtype, device=DEVICE)
        add.at(stream_pointer())
        expected = target.copy()
        expected[box] += source[box]
        assert here.get().tobytes() == expected.tobytes()
        assert add.nbytes == datatype.size

    @pytest.mark.parametrize("dtype", ["i1", "u1", "f2", "i2"])
    @pytest.mark.parametrize("columns", [33, 1100])
    def test_long_blocks_between_odd_addresses(self, dtype, columns):
        """A copy moves long blocks as unaligned runs of bytes; an addition needs whole elements."""
        rng = np.random.default_rng(columns)
        shape = (50, columns + 2)
        source, target = (rng.integers(0, 60, shape).astype(dtype) for _ in range(2))
        there, here = on_device(source), on_device(target)
        datatype = dt.subarray(shape, (50, columns), (0, 1), dtype)
        copy = Copy(*(Side(x.pointer, datatype.strided) for x in (there, here)))
        StridedAdd([copy], dtype, device=DEVICE).at(stream_pointer())
        target[:, 1:-1] += source[:, 1:-1]
        assert here.get().tobytes() == target.tobytes()

    def test_half_precision_is_ieee(self):
        rng = np.random.default_rng(6)
        a, b = (rng.integers(0, 2**16, 8192, dtype=np.uint16).view("f2") for _ in range(2))
        with np.errstate(all="ignore"):
            expected = a + b
        there, here = on_device(a), on_device(b)
        copies = [Copy(contiguous_side(there.pointer, 16384), contiguous_side(here.pointer, 16384))]
        StridedAdd(copies, "f2", device=DEVICE).at(stream_pointer())
        np.testing.assert_array_equal(here.get().view("f2"), expected)

    def test_overlapping_targets_add_in_the_order_given(self):
        """Addition in float32 is not associative: 1 + 1e8 - 1e8 depends on the order."""
        target = np.ones(8000, "f4")
        here, copies, expected, kept = on_device(target), [], target.copy(), []
        for first, value in ((0, 1e8), (2000, -1e8), (3000, 3.0)):
            kept.append(on_device(np.full(5000, value, "f4")))
            expected[first : first + 5000] += np.float32(value)
            copies.append(
                Copy(
                    contiguous_side(kept[-1].pointer, 20000),
                    contiguous_side(here.pointer + 4 * first, 20000),
                )
            )
        add = StridedAdd(copies, "f4", device=DEVICE)
        add.at(stream_pointer())
        assert add.launches == 3
        assert here.get().tobytes() == expected.tobytes()


def test_a_kernel_that_does_not_compile():
    with pytest.raises(DeviceError, match="strided_add"):
        kernel("strided_add", "strided_add", 0, (("ELEMENT", "no_such_type"),))
