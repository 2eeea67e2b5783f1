"""The traversal packer, with launches on the CPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from halox import datatypes as dt
from halox.errors import DatatypeError, DeviceError
from halox.packing import device_packer, traversal
from halox.packing.traversal import TraversalPacker
from tests.support import require
from tests.unit.cpu_kernels import aligned
from tests.unit.cpu_traversal import ENTRIES, aligned_copy, library

require("cxx")


class CpuLaunch:
    """Takes the place of `PreparedLaunch`; ``made`` lists all launches."""

    made: list[CpuLaunch]

    def __init__(self, function, grid, block, args, *, device, shared_bytes):
        self.function, self.grid, self.block, self.args = function, grid, block, args
        self.device, self.shared_bytes, self.streams = device, shared_bytes, []
        self.made.append(self)

    def launch_at(self, stream, array, packed):
        self.streams.append(stream)
        way, _, entry = self.function.name.removeprefix("traversal_").partition("_")
        table = aligned_copy(np.frombuffer(self.args[2], np.uint8))
        library(self.function.defines).run(
            ctypes.c_uint(self.grid),
            ctypes.c_uint(self.block),
            ctypes.c_int(0),
            ctypes.c_uint(self.shared_bytes),
            ctypes.c_int(ENTRIES.index(f"_{entry}" if entry else "")),
            ctypes.c_int(way == "unpack"),
            ctypes.c_uint64(array),
            ctypes.c_uint64(packed),
            ctypes.c_void_p(table.ctypes.data),
        )


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    def uploaded(image, device):
        memory = aligned_copy(image)
        return SimpleNamespace(pointer=memory.ctypes.data, memory=memory)

    def kernel(name, function, device, defines):
        return SimpleNamespace(name=function, defines=defines)

    CpuLaunch.made = []
    monkeypatch.setattr(traversal, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(traversal, "uploaded", uploaded)
    monkeypatch.setattr(device_packer, "kernel", kernel)
    monkeypatch.setattr(device_packer, "PreparedLaunch", CpuLaunch)


LIST = dt.indexed([1, 2, 4], [0, 5, 3], "f8")
LONG = dt.indexed_block(1, np.random.default_rng(3).permutation(2000)[:900], "f8")
TYPES = {
    "regular": (dt.subarray((20, 21, 22), (18, 19, 3), (1, 1, 2), "f8"), 1),
    "list": (LONG, 2),
    "branches": (dt.struct([1, 2], [8, 240], [LIST, dt.vector(40, 1, 2, "f8")]), 3),
}


@pytest.mark.parametrize("max_blocks", [None, 2])
@pytest.mark.parametrize("name", TYPES)
def test_there_and_back(name, max_blocks):
    datatype, count = TYPES[name]
    packer = TraversalPacker(datatype, count, 0, max_blocks)
    host = aligned(1 << 17)
    host[:] = np.random.default_rng(5).integers(0, 256, host.size)
    blocks = datatype.blocks(count)
    index = np.concatenate(
        [np.arange(o, o + n) for o, n in zip(blocks.offsets, blocks.lengths, strict=True)]
    )
    assert packer.nbytes == index.size
    for at, to in ((0, 0), (16, 8), (0, 3), (4, 0)):
        packed = aligned(packer.nbytes, to)
        packer.pack(host.ctypes.data + at, packed.ctypes.data, 7)
        assert packed.tobytes() == host[index + at].tobytes()
        target = aligned(host.size)
        expected = target.copy()
        expected[index + at] = packed
        packer.unpack(packed.ctypes.data, target.ctypes.data + at, 7)
        assert target.tobytes() == expected.tobytes()
    words = [dict(launch.function.defines)["WORD_BYTES"] for launch in CpuLaunch.made]
    assert sorted(words, key=int) == ["1", "1", "4", "4", "8", "8"], "made once a word size"
    assert all(launch.streams == [7] * len(launch.streams) for launch in CpuLaunch.made)
    if max_blocks:
        assert all(launch.grid <= max_blocks for launch in CpuLaunch.made)


def test_absolute_addresses():
    arrays = [np.random.default_rng(i).random(50) for i in range(3)]
    starts = [array.ctypes.data for array in arrays]
    datatype = dt.struct([1, 1, 1], starts, [dt.vector(10 + i, 1, 2, "f8") for i in range(3)])
    packed = np.zeros(33)
    TraversalPacker(datatype, 1, 0).pack(0, packed.ctypes.data, 0)
    expected = [array[: 2 * (10 + i) : 2] for i, array in enumerate(arrays)]
    assert packed.tobytes() == np.concatenate(expected).tobytes()


def test_an_origin_below_the_array_wraps_to_an_address():
    array, packed = np.arange(20.0), np.zeros(3)
    backwards = dt.hvector(3, 1, -16, "f8")
    TraversalPacker(dt.hindexed_block(1, [-8], backwards), 1, 0).pack(
        array[10:].ctypes.data, packed.ctypes.data, 0
    )
    assert packed.tolist() == [9, 7, 5]


def test_nothing_to_do():
    packer = TraversalPacker(dt.contiguous(0, "f8"), 3, 0)
    packer.pack(0, 0, 0)
    packer.unpack(0, 0, 0)
    assert packer.nbytes == 0
    assert not CpuLaunch.made


def test_what_is_refused():
    deep = LIST
    for _ in range(70):
        deep = dt.resized(dt.struct([1, 1], [0, 200], [deep, "i4"]), 0, 400)
    reason = TraversalPacker.why_not(deep, 1)
    assert reason is not None
    assert "nested" in reason
    with pytest.raises(DatatypeError):
        TraversalPacker(deep, 1, 0)
    with pytest.raises(DeviceError, match="max_blocks"):
        TraversalPacker(LIST, 1, 0, 0)
    assert all(TraversalPacker.why_not(datatype, n) is None for datatype, n in TYPES.values())
