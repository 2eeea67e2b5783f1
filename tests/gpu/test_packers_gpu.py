"""The suite of all packers on a GPU, on every kind of stream, and the places that only a GPU has."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from halox import datatypes as dt
from tests.datatype_strategies import scattered
from tests.packers import GUARD, MIXES, TYPES, PackerTests, displacements
from tests.support import require

pytestmark = pytest.mark.gpu
require("gpu")

import cupy as cp  # noqa: E402

from halox.packing.choosing import choose, device_packer, packers  # noqa: E402
from halox.runtime.gpu.memory import pinned, register  # noqa: E402
from tests.gpu.guarded import DEVICE, MARGIN, STREAMS, Settled, coded  # noqa: E402

METHODS = ("strided", "workunits", "traversal", "copy_engine")
BACKENDS = (*((method, stream) for method in METHODS for stream in ("legacy", "non-blocking")),)


class GpuBackend:
    """A packer class on the GPU, with its launches on one stream."""

    memory = Settled

    def __init__(self, method, stream):
        self.method, self.stream = method, stream

    def packer(self, datatype, count, max_blocks=None):
        made = packers()[self.method](datatype, count, DEVICE, max_blocks)
        assert made.nbytes == datatype.size * count

        def pack(array, origin, packed):
            made.pack(array.pointer + origin, packed.pointer, self.stream.ptr)

        def unpack(packed, array, origin):
            made.unpack(packed.pointer, array.pointer + origin, self.stream.ptr)

        return SimpleNamespace(pack=pack, unpack=unpack)


@pytest.fixture(scope="class", params=BACKENDS, ids=", ".join)
def backend(request):
    name, stream = request.param
    return GpuBackend(name, STREAMS[stream]())


class TestPackers(PackerTests):
    """Packs and unpacks every type of the table, and random types."""


@pytest.fixture
def stream():
    cp.cuda.runtime.deviceSynchronize()
    return cp.cuda.Stream(non_blocking=True)


def filled(nbytes: int, offset: int = 0) -> Settled:
    return Settled(np.full(nbytes, GUARD, np.uint8), offset)


def there_and_back(method, datatype, count, stream, **options):
    """Compare packing and unpacking with NumPy's indexing, in memory as large as the items need."""
    host = coded(datatype.reach(count)[1])
    places = displacements(datatype, count)
    packer = packers()[method](datatype, count, DEVICE, **options)
    source, packed, target = Settled(host), filled(places.size, 4), filled(host.size)
    packer.pack(source.pointer, packed.pointer, stream.ptr)
    np.testing.assert_array_equal(packed.get(), host[places])
    wanted = np.full(host.size, GUARD, np.uint8)
    wanted[places] = host[places]
    packer.unpack(packed.pointer, target.pointer, stream.ptr)
    np.testing.assert_array_equal(target.get(), wanted)


@pytest.mark.parametrize("max_blocks", [None, 3])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("method", METHODS[1:])
def test_long_lists(method, mix, max_blocks, stream):
    """The mixes of the table, with tens of thousands of blocks."""
    lengths = TYPES[mix].blocks().lengths
    most = 1000 if method == "copy_engine" else 20_000
    lengths = np.resize(lengths, min(most, (4 << 20) // int(lengths.mean())))
    common = int(np.gcd.reduce(lengths))
    datatype, _ = scattered(np.random.default_rng(3), lengths, min(16, common & -common))
    there_and_back(method, datatype, 1, stream, max_blocks=max_blocks)


@pytest.mark.parametrize("count", [8, 1000])
@pytest.mark.parametrize("method", ["workunits", "traversal"])
def test_random_elements_of_many_items(method, count, stream):
    chosen = np.random.default_rng(7).permutation(1180)[:1024]
    datatype = dt.resized(dt.indexed_block(1, chosen, "f8"), 0, 1180 * 8)
    there_and_back(method, datatype, count, stream)


@pytest.mark.parametrize("n", [1, 127, 129, 1025, 65535, 65536, 65537, 1_000_001])
@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_rows(method, n, stream):
    there_and_back(method, dt.vector(n, 1, 2, "f8"), 1, stream)
    if n <= 65537:
        there_and_back(method, dt.hvector(n, 1, 16, dt.vector(2, 3, 4, "u1")), 1, stream)


def test_the_longest_list_of_the_copy_engine(stream):
    places = np.cumsum(np.arange(1024) % 7 + 9)
    there_and_back("copy_engine", dt.hindexed_block(8, places, "u1"), 1, stream)


def needs(nbytes):
    if cp.cuda.runtime.memGetInfo()[0] < nbytes:
        pytest.skip(f"less than {nbytes >> 30} GiB of device memory are free")


@pytest.mark.parametrize("method", METHODS)
def test_strides_past_32_bits(method, stream):
    """Three rows of 4 KiB, and halves of them, at a distance of 3 GiB."""
    needs(10 << 30)
    stride, rows = 3 << 30, coded((3, 4096))
    memory = cp.cuda.alloc(2 * stride + 4096)
    for i in range(3):
        cp.cuda.runtime.memcpy(memory.ptr + i * stride, rows[i].ctypes.data, 4096, 1)
    halves = dt.hvector(3, 1, stride, dt.hvector(2, 1024, 2048, "u1"))
    for datatype, expected in (
        (dt.hvector(3, 4096, stride, "u1"), rows),
        (halves, rows.reshape(3, 2, 2048)[:, :, :1024]),
    ):
        packed = filled(expected.size)
        packers()[method](datatype, 1, DEVICE).pack(int(memory.ptr), packed.pointer, stream.ptr)
        assert packed.get().tobytes() == expected.tobytes()
    del memory
    cp.get_default_memory_pool().free_all_blocks()


def test_more_than_32_bits_of_words(stream):
    """The packed address is odd, so each word is one byte, and 2**31 + 5 words exceed a signed 32-bit count."""
    needs(10 << 30)
    n = 2**31 + 5
    source = (cp.arange(n, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24)).astype("u1")
    packed = cp.zeros(n + 16, "u1")
    cp.cuda.runtime.deviceSynchronize()
    packer = packers()["traversal"](dt.contiguous(n, "u1"), 1, DEVICE)
    packer.pack(int(source.data.ptr), int(packed.data.ptr) + 1, stream.ptr)
    stream.synchronize()
    assert bool((packed[1 : n + 1] == source).all())
    assert not packed[0] and not packed[n + 1 :].any()
    del source, packed
    cp.get_default_memory_pool().free_all_blocks()


def test_more_blocks_than_are_listed(stream):
    """By default the tree of such a datatype is walked."""
    needs(1 << 30)
    chosen = np.random.default_rng(11).permutation(1000)[:500]
    rows = (1 << 24) // chosen.size + 1
    datatype = dt.contiguous(rows, dt.resized(dt.indexed_block(1, chosen, "f8"), 0, 8000))
    assert choose(datatype, 1).method == "traversal"
    source, packed = cp.arange(rows * 1000, dtype="f8"), cp.zeros(datatype.size, "u1")
    cp.cuda.runtime.deviceSynchronize()
    packer = device_packer("auto", datatype, 1, DEVICE)
    packer.pack(int(source.data.ptr), int(packed.data.ptr), stream.ptr)
    stream.synchronize()
    wanted = source.reshape(-1, 1000)[:, cp.asarray(chosen)]
    assert bool((packed.view("f8").reshape(-1, 500) == wanted).all())
    del source, packed, wanted
    cp.get_default_memory_pool().free_all_blocks()


def test_items_past_2_gib(stream):
    """Indices in a segment of work units have 31 bits, so larger messages need several segments."""
    needs(12 << 30)
    starts = 0, 1, 257, 300
    datatype = dt.resized(dt.indexed_block(256, starts, "f8"), 0, 8 * 1024)
    count = (5 << 29) // datatype.extent
    source, packed = cp.arange(count * 1024, dtype="f8"), cp.zeros(datatype.size * count, "u1")
    cp.cuda.runtime.deviceSynchronize()
    packer = packers()["workunits"](datatype, count, DEVICE)
    packer.pack(int(source.data.ptr), int(packed.data.ptr), stream.ptr)
    stream.synchronize()
    rows, found = source.reshape(-1, 1024), packed.view("f8").reshape(-1, 4, 256)
    for place, start in enumerate(starts):
        assert bool((found[:, place] == rows[:, start : start + 256]).all())
    del source, packed, rows, found
    cp.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("name", ["box", "list", "struct"])
@pytest.mark.parametrize("method", METHODS)
class TestPlaces:
    """Memory of the host, graphs, and threads; displacement 0 is byte 4096 of the array."""

    @pytest.mark.parametrize("kind", ["pinned", "registered"])
    def test_page_locked_memory(self, method, name, kind, stream):
        datatype, host = TYPES[name], coded(1 << 15)
        places, packer = 4096 + displacements(datatype), packers()[method](datatype, 1, DEVICE)
        source, size = Settled(host), packer.nbytes + 2 * MARGIN
        buffer = pinned(size) if kind == "pinned" else register(np.zeros(size, np.uint8))
        buffer.array[:] = GUARD
        start, stop = MARGIN + 1, MARGIN + 1 + packer.nbytes
        packer.pack(source.pointer + 4096, buffer.device_pointer + start, stream.ptr)
        stream.synchronize()
        np.testing.assert_array_equal(buffer.array[start:stop], host[places])
        assert (buffer.array[:start] == GUARD).all() and (buffer.array[stop:] == GUARD).all()
        target, wanted = filled(host.size), np.full(host.size, GUARD, np.uint8)
        packer.unpack(buffer.device_pointer + start, target.pointer + 4096, stream.ptr)
        wanted[places] = host[places]
        np.testing.assert_array_equal(target.get(), wanted)
        buffer.close()

    def test_captured_in_a_graph(self, method, name, stream):
        """After a first use; lists of copies are captured as single copies."""
        datatype, host = TYPES[name], coded(1 << 15)
        places, packer = 4096 + displacements(datatype), packers()[method](datatype, 1, DEVICE)
        source, packed = Settled(host), filled(packer.nbytes)
        call = partial(packer.pack, source.pointer + 4096, packed.pointer, stream.ptr)
        call()
        packed.get()
        with stream:
            stream.begin_capture()
            call()
            graph = stream.end_capture()
        for turn in (1, 2):
            source.array[:] = cp.asarray(np.roll(host, turn))
            packed.array[:] = GUARD
            cp.cuda.runtime.deviceSynchronize()
            graph.launch(stream)
            np.testing.assert_array_equal(packed.get(), np.roll(host, turn)[places])

    def test_from_another_thread(self, method, name):
        """A thread without earlier CUDA calls has no current context."""
        datatype, host, failures = TYPES[name], coded(1 << 15), []
        packer = packers()[method](datatype, 1, DEVICE)
        source, packed = Settled(host), filled(packer.nbytes)

        def work():
            try:
                packer.pack(source.pointer + 4096, packed.pointer, 0)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not failures
        np.testing.assert_array_equal(packed.get(), host[4096 + displacements(datatype)])
