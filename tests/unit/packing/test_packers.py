"""The suite of all packers, by NumPy and by kernels compiled by g++."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from halox import datatypes as dt
from halox.errors import DeviceError
from halox.packing.choosing import packers
from tests.fakes.cpu_kernels import before_a_forbidden_page
from tests.fakes.cpu_packers import HostBackend, cpu_backend
from tests.fakes.fake_driver import STREAM
from tests.packers import GUARD, TYPES, PackerTests, check, coded

METHODS = ("strided", "workunits", "traversal", "copy_engine")
MAP_NORESERVE = 0x4000  # the value on Linux; mmap has the name since Python 3.13


@pytest.fixture(scope="class", params=["host", *METHODS])
def backend(request):
    if request.param == "host":
        yield HostBackend()
        return
    with cpu_backend(request.param) as made:
        yield made


class TestPackers(PackerTests):
    """Packs and unpacks every type of the table, and random types."""


@pytest.fixture(params=METHODS)
def device(request):
    with cpu_backend(request.param) as made:
        yield made


@pytest.mark.parametrize("name", ["rows", "long rows of bytes", "indexed", "struct", "granules"])
def test_threads_in_reverse_order(device, name):
    """No kernel may depend on the order of its threads."""
    device.backwards = True
    check(device, TYPES[name], to=4)


@pytest.mark.parametrize("nbytes", [8, 24, 1000, 1032, 2001, 4104])
def test_not_a_byte_past_the_end_is_touched(device, nbytes):
    """Even a read beyond the end would kill the process, as it may on a GPU."""
    lengths = np.diff([0, *sorted({nbytes // 3, nbytes // 2, nbytes})])
    starts = np.cumsum(lengths) - lengths
    for datatype in (dt.contiguous(nbytes, "u1"), dt.hindexed(lengths[::-1], starts[::-1], "u1")):
        array, packed = coded(nbytes), before_a_forbidden_page(nbytes)
        here = before_a_forbidden_page(nbytes)
        here[:], packed[:] = array, GUARD
        packer = device.packer(datatype, 1).made
        packer.pack(here.ctypes.data, packed.ctypes.data, STREAM)
        blocks = [array] if datatype.strided else np.split(array, starts[1:])[::-1]
        assert packed.tobytes() == b"".join(block.tobytes() for block in blocks)
        here[:] = GUARD
        packer.unpack(packed.ctypes.data, here.ctypes.data, STREAM)
        assert here.tobytes() == array.tobytes()


def test_absolute_addresses(device):
    """Displacements may be addresses, and the array's address 0."""
    arrays = [np.random.default_rng(i).random(50) for i in range(3)]
    starts = [array.ctypes.data + 8 * i for i, array in enumerate(arrays)]
    evens = [dt.vector(10 + i, 1, 2, "f8") for i in range(3)]
    packed = np.zeros(33)
    packer = device.packer(dt.struct([1, 1, 1], starts, evens), 1).made
    packer.pack(0, packed.ctypes.data, STREAM)
    expected = [array[i:][: 2 * (10 + i) : 2] for i, array in enumerate(arrays)]
    assert packed.tobytes() == np.concatenate(expected).tobytes()


@pytest.mark.parametrize("gap", [1 << 33, 1 << 36])
def test_displacements_beyond_32_bits(device, gap):
    """Blocks are far apart in an array; only the pages of the blocks occupy memory."""
    memory = mmap.mmap(-1, gap + 4096, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
    array = np.frombuffer(memory, np.uint8)
    array[:4096] = coded(4096)
    array[gap:] = array[4095::-1]
    starts = 0, 256, gap + 16, 512
    packed = np.zeros(32, np.uint8)
    packer = device.packer(dt.hindexed_block(8, starts, "u1"), 1).made
    packer.pack(array.ctypes.data, packed.ctypes.data, STREAM)
    assert packed.tobytes() == b"".join(array[start : start + 8].tobytes() for start in starts)


@pytest.mark.parametrize("datatype", [dt.contiguous(0, "f8"), TYPES["nothing"]])
def test_nothing_to_do(device, datatype):
    packer = device.packer(datatype, 3).made
    packer.pack(0, 0, STREAM)
    packer.unpack(0, 0, STREAM)
    assert not packer.nbytes and not device.events


def test_later_calls_only_launch(device):
    """A call with equal alignment uploads nothing, so that it can be captured."""
    datatype = TYPES["a few long blocks among short ones" if device.method != "strided" else "box"]
    array, packed = device.memory(coded(1 << 15)), device.memory(np.zeros(datatype.size, "u1"))
    packer = device.packer(datatype, 1)
    packer.pack(array, 0, packed)
    device.events.clear()
    device.capturing = True
    packer.pack(array, 0, packed)
    packer.unpack(packed, array, 0)
    assert [event[0] for event in device.events] == ["launch"] * len(device.events)
    assert len(device.events) == (0 if device.method == "copy_engine" else 2)


def test_a_limit_below_one_block(device):
    with pytest.raises(DeviceError, match="max_blocks"):
        packers()[device.method](dt.primitive("f8"), 1, 0, 0)
