"""The traversal packer on a GPU, compared with NumPy and HostPacker, with guard bytes around every target."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.packing.host import HostPacker
from tests.support import require
from tests.unit.datatype_strategies import build, recipes

pytestmark = pytest.mark.gpu
require("gpu")

import cupy as cp  # noqa: E402
from cupy_backends.cuda.api import driver  # noqa: E402

from halox.packing import traversal  # noqa: E402
from halox.packing.strided import StridedPacker  # noqa: E402
from halox.packing.traversal import TraversalPacker  # noqa: E402
from halox.packing.traversal_plan import plan  # noqa: E402
from halox.packing.traversal_tree import simplified  # noqa: E402
from halox.runtime.gpu.compiler import kernel  # noqa: E402
from halox.runtime.gpu.memory import pinned  # noqa: E402
from tests.gpu.guarded import DEVICE, GUARD, Guarded, coded, host_us, on_device  # noqa: E402

HALF = 1 << 17


def stream():
    return int(cp.cuda.get_current_stream().ptr)


def check(datatype, count=1, *, at=0, to=0, max_blocks=None, half=HALF, packer=None):
    """Compare with HostPacker: pack, and unpack unless the blocks overlap; ``at`` and ``to`` shift the addresses."""
    host = coded(2 * half)
    expected = np.zeros(datatype.size * count, np.uint8)
    HostPacker(host[half:], datatype, count).pack(expected)
    source, packed = on_device(host, at), Guarded(expected.size, to)
    packer = packer or TraversalPacker(datatype, count, DEVICE, max_blocks)
    packer.pack(source.pointer + half, packed.pointer, stream())
    assert packed.get().tobytes() == expected.tobytes()
    if datatype.overlaps(count):
        return
    target = Guarded(host.size, at)
    wanted = np.full(host.size, GUARD, np.uint8)
    HostPacker(wanted[half:], datatype, count).unpack(expected)
    packer.unpack(packed.pointer, target.pointer + half, stream())
    assert target.get().tobytes() == wanted.tobytes()


RNG = np.random.default_rng(7)
LINE = dt.vector(3, 1, 2, "f4")
LIST = dt.indexed([1, 2, 4], [0, 5, -9], "f8")
TYPES = {
    "primitive": dt.primitive("f8"),
    "contiguous": dt.contiguous(1000, "f8"),
    "contiguous of list": dt.contiguous(50, LIST),
    "vector": dt.vector(200, 3, 5, "f4"),
    "vector backwards": dt.vector(200, 3, -5, "f4"),
    "vector of list": dt.vector(4, 2, 3, LIST),
    "hvector": dt.hvector(200, 3, 13, "f4"),
    "hvector of list": dt.hvector(4, 2, 1000, LIST),
    "subarray": dt.subarray((12, 13, 14), (9, 8, 7), (1, 2, 3), "f8"),
    "subarray F": dt.subarray((12, 13, 14), (9, 8, 7), (1, 2, 3), "f4", order="F"),
    "subarray of list": dt.subarray((4, 5), (2, 3), (1, 1), LIST),
    "nine axes": dt.subarray((3,) * 9, (2,) * 9, (0,) * 9, "u1"),
    "indexed": dt.indexed(RNG.integers(0, 9, 500), np.arange(500) * 20, "f4"),
    "hindexed": dt.hindexed(RNG.integers(0, 9, 500), np.arange(500) * 37, "f4"),
    "indexed over vector": dt.indexed([3, 1, 5], [0, 7, 20], dt.vector(3, 1, 2, "i2")),
    "indexed_block": dt.indexed_block(3, RNG.permutation(900)[:600] * 4, "f8"),
    "hindexed_block": dt.hindexed_block(3, RNG.integers(-20000, 20000, 1000), "u1"),
    "indexed_block over list": dt.indexed_block(2, [0, 9, 4], LIST),
    "struct": dt.struct([1, 2, 3], [0, 40, 400], [LIST, LINE, "i1"]),
    "struct of structs": dt.struct(
        [2, 1],
        [0, 2000],
        [
            dt.struct([1, 30], [0, 300], [LIST, LINE]),
            dt.struct([20, 3], [0, 9000], [LINE, dt.indexed([9, 70], [1, 50], "f4")]),
        ],
    ),
    "many branches": dt.struct(
        [1] * 500,
        RNG.permutation(500) * 200,
        [dt.vector(2 + i % 40, 1, 2, "u1") for i in range(500)],
    ),
    "more records than fit": dt.struct(
        [1] * 400, RNG.permutation(400) * 300, [dt.hvector(2, 1, 2 + i, "u1") for i in range(400)]
    ),
    "structured dtype": dt.as_datatype(
        np.dtype([("a", "u1"), ("b", "f8", (3,)), ("c", [("x", "f4"), ("y", "i2")])], align=True)
    ),
    "negative extent": dt.contiguous(4, dt.resized(LIST, 0, -160)),
    "zero lengths": dt.indexed([0, 2, 0, 3, 0], [5, 0, 1, 9, 2], "f4"),
    "nothing": dt.indexed([0, 0], [1, 2], "f4"),
    "empty children": dt.struct([1, 1, 2], [0, 8, 64], [dt.contiguous(0, "f8"), LIST, LINE]),
    "overlapping": dt.indexed([4, 4, 3], [0, 2, 1], "f8"),
}


class TestConstructors:
    @pytest.mark.parametrize("count", [1, 4])
    @pytest.mark.parametrize("name", TYPES)
    def test_packs_and_unpacks(self, name, count):
        if abs(TYPES[name].extent) * count < HALF:
            check(TYPES[name], count)

    @pytest.mark.parametrize("name", ["struct", "struct of structs", "indexed over vector"])
    def test_small_lists_are_walked_as_well(self, name, monkeypatch):
        """Disables the simplification that flattens small subtrees to one list."""

        def unflattened(datatype, count):
            return simplified(datatype, count, flat_blocks=0, few_units=0)

        monkeypatch.setattr(traversal, "simplified", unflattened)
        check(TYPES[name], 3)

    @pytest.mark.parametrize("at", [0, 1, 2, 4, 8])
    @pytest.mark.parametrize("to", [0, 1, 2, 4, 8])
    @pytest.mark.parametrize("name", ["contiguous", "vector", "indexed_block", "many branches"])
    def test_any_alignment(self, name, at, to):
        check(TYPES[name], 1, at=at, to=to)

    @pytest.mark.parametrize("max_blocks", [1, 3, 16, 100_000])
    @pytest.mark.parametrize("name", ["vector", "indexed", "many branches"])
    def test_any_number_of_blocks(self, name, max_blocks):
        check(TYPES[name], 1, max_blocks=max_blocks)

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(recipes(), st.integers(1, 3), st.integers(0, 15), st.integers(0, 15))
    def test_random_types(self, recipe, count, at, to):
        check(build(recipe), count, at=at, to=to, half=1 << 16)

    @pytest.mark.parametrize("name", ["vector", "indexed", "many branches"])
    def test_64_bit_numbers(self, name, monkeypatch):
        def wide(tree, word_bytes, **options):
            return plan(tree, word_bytes, index_bits=64, **options)

        monkeypatch.setattr(traversal, "plan", wide)
        check(TYPES[name], 1)

    def test_more_than_32_bits_of_words(self):
        """The packed address is odd, so each word is one byte, and 2**31 + 5 words exceed a signed 32-bit count."""
        n = 2**31 + 5
        if cp.cuda.runtime.memGetInfo()[0] < 10 << 30:
            pytest.skip("less than 10 GiB of device memory are free")
        source = (cp.arange(n, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24)).astype(
            "u1"
        )
        packed = cp.zeros(n + 16, "u1")
        packer = TraversalPacker(dt.contiguous(n, "u1"), 1, DEVICE)
        packer.pack(int(source.data.ptr), int(packed.data.ptr) + 1, stream())
        assert bool((packed[1 : n + 1] == source).all())
        assert not packed[0]
        assert not packed[n + 1 :].any()
        del source, packed
        cp.get_default_memory_pool().free_all_blocks()

    @pytest.mark.parametrize("count", [1, 8, 1000, 20_000])
    def test_gathers_as_numpy_does(self, count):
        chosen = RNG.permutation(1180)[:1024]
        rows = cp.arange(count * 1180, dtype="f8").reshape(count, 1180)
        packed = Guarded(count * 8192)
        datatype = dt.resized(dt.indexed_block(1, chosen, "f8"), 0, 1180 * 8)
        TraversalPacker(datatype, count, DEVICE).pack(rows.data.ptr, packed.pointer, stream())
        expected = rows[:, cp.asarray(chosen)].ravel()
        packed.get()
        assert bool((packed.array.view("f8") == expected).all())

    def test_absolute_addresses(self):
        arrays = [cp.random.random(5000) for _ in range(3)]
        starts = [int(array.data.ptr) for array in arrays]
        types = [dt.vector(1000 + i, 1, 2 + i, "f8") for i in range(3)]
        datatype = dt.struct([1, 1, 1], starts, types)
        packed = Guarded(datatype.size)
        TraversalPacker(datatype, 1, DEVICE).pack(0, packed.pointer, stream())
        expected = [a[: (1000 + i) * (2 + i) : 2 + i] for i, a in enumerate(arrays)]
        assert packed.get().tobytes() == cp.concatenate(expected).get().tobytes()

    def test_a_triangle(self):
        n = 700
        lengths, starts = np.arange(n, 0, -1), np.arange(n) * (n + 1)
        matrix = cp.arange(n * n, dtype="f8").reshape(n, n)
        datatype = dt.indexed(lengths, starts, "f8")
        packed = Guarded(datatype.size)
        TraversalPacker(datatype, 1, DEVICE).pack(matrix.data.ptr, packed.pointer, stream())
        expected = matrix.get()[np.triu_indices(n)]
        assert packed.get().tobytes() == expected.tobytes()


class TestLaunches:
    def test_nothing_to_do(self):
        packer = TraversalPacker(dt.contiguous(0, "f8"), 3, DEVICE)
        packer.pack(0, 0, stream())
        packer.unpack(0, 0, stream())

    def test_pinned_memory(self):
        datatype = dt.struct([1, 2], [0, 4000], [dt.vector(300, 1, 2, "f4"), TYPES["struct"]])
        host = coded(20000)
        expected = np.zeros(datatype.size, np.uint8)
        HostPacker(host[4000:], datatype, 1).pack(expected)
        buffer, source = pinned(datatype.size + 512), cp.asarray(host)
        buffer.array[:] = GUARD
        packer = TraversalPacker(datatype, 1, DEVICE)
        packer.pack(int(source.data.ptr) + 4000, buffer.device_pointer + 256, stream())
        cp.cuda.get_current_stream().synchronize()
        assert (buffer.array[:256] == GUARD).all()
        assert (buffer.array[-256:] == GUARD).all()
        assert buffer.array[256:-256].tobytes() == expected.tobytes()
        buffer.close()

    @pytest.mark.parametrize("name", ["vector", "indexed", "many branches"])
    def test_captured_in_a_graph(self, name):
        datatype = TYPES[name]
        source, packed = cp.zeros(2 * HALF, "u1"), Guarded(datatype.size)
        packer = TraversalPacker(datatype, 1, DEVICE)
        packer.pack(int(source.data.ptr) + HALF, packed.pointer, stream())
        side = cp.cuda.Stream(non_blocking=True)
        cp.cuda.runtime.deviceSynchronize()
        with side:
            side.begin_capture()
            packer.pack(int(source.data.ptr) + HALF, packed.pointer, int(side.ptr))
            graph = side.end_capture()
            for value in (3, 4):
                source[:] = value
                graph.launch(side)
                side.synchronize()
                assert (packed.get() == value).all()

    def test_order_follows_the_stream(self):
        side = cp.cuda.Stream(non_blocking=True)
        datatype = TYPES["many branches"]
        source, packed = cp.zeros(2 * HALF, "u1"), Guarded(datatype.size)
        packer = TraversalPacker(datatype, 1, DEVICE)
        packer.pack(int(source.data.ptr) + HALF, packed.pointer, stream())
        large = cp.ones(1 << 25)
        cp.cuda.runtime.deviceSynchronize()
        with side:
            for _ in range(30):
                cp.sqrt(large, out=large)
            source[:] = 7
            packer.pack(int(source.data.ptr) + HALF, packed.pointer, int(side.ptr))
        side.synchronize()
        assert (packed.get() == 7).all()

    def test_from_several_threads_at_once(self):
        datatype = TYPES["struct of structs"]
        packer = TraversalPacker(datatype, 1, DEVICE)
        sources = [cp.full(2 * HALF, i, "u1") for i in range(8)]
        targets = [Guarded(datatype.size, offset=i % 3) for i in range(8)]
        cp.cuda.runtime.deviceSynchronize()
        failures = []

        def work(i):
            try:
                cp.cuda.Device(DEVICE).use()
                for _ in range(50):
                    packer.pack(int(sources[i].data.ptr) + HALF, targets[i].pointer, 0)
                cp.cuda.runtime.deviceSynchronize()
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        for i, target in enumerate(targets):
            assert (target.get() == i).all()

    def test_host_time_of_a_call(self):
        """A call is one launch, as for the strided packer; building the tree in each call would take far longer."""
        source, packed = cp.zeros(4000), cp.zeros(4000)
        datatype = dt.vector(1000, 1, 2, "f8")
        walked, strided = (kind(datatype, 1, DEVICE) for kind in (TraversalPacker, StridedPacker))
        arguments = (int(source.data.ptr), int(packed.data.ptr), stream())
        took = host_us(
            {
                "traversal": lambda: walked.pack(*arguments),
                "strided": lambda: strided.pack(*arguments),
            }
        )
        assert took["traversal"] < 3 * took["strided"]


def spilled(entry, **defines):
    """Bytes of local memory per thread of a kernel, which holds spilled registers."""
    pairs = tuple((name, str(value)) for name, value in defines.items())
    function = kernel("traversal", f"traversal_{entry}", DEVICE, pairs)
    return driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function.ptr)


@pytest.mark.parametrize("way", ["pack", "unpack"])
def test_kernels_spill_nothing(way):
    for word, in_flight in ((16, 1), (8, 2), (4, 4), (1, 4)):
        assert spilled(f"{way}_regular", WORD_BYTES=word, IN_FLIGHT=in_flight, THREADS=256) == 0
    for word, in_flight in ((16, 1), (16, 2), (16, 4), (8, 4), (1, 4)):
        for entry in (f"{way}_chain", way):
            found = spilled(entry, WORD_BYTES=word, IN_FLIGHT=in_flight, THREADS=256)
            assert found == 0, (entry, word, in_flight, found)


def device_us(packers, here, there, launches=40, rounds=15):
    """Return the time of a launch of each packer in microseconds.

    Each packer has a graph of many launches; the packers take turns, and the result is the minimum over all rounds.
    """
    side = cp.cuda.Stream(non_blocking=True)
    graphs = []
    with side:
        for packer in packers:
            packer.pack(here, there, int(side.ptr))
            side.synchronize()
            side.begin_capture()
            for _ in range(launches):
                packer.pack(here, there, int(side.ptr))
            graphs.append(side.end_capture())
            graphs[-1].launch(side)
        least = [float("inf")] * len(graphs)
        for _ in range(rounds):
            for i, graph in enumerate(graphs):
                start, stop = cp.cuda.Event(), cp.cuda.Event()
                start.record(side)
                graph.launch(side)
                stop.record(side)
                stop.synchronize()
                us = cp.cuda.get_elapsed_time(start, stop) * 1e3 / launches
                least[i] = min(least[i], us)
    return least


def test_times_beside_the_strided_packer():
    """The limit is loose, since other work may share the GPU; ``halox bench pack`` measures exactly."""
    source, packed = cp.zeros(1 << 25), cp.zeros(1 << 23)
    here, there = int(source.data.ptr), int(packed.data.ptr)
    for nbytes in (1 << 16, 1 << 20, 1 << 24, 1 << 26):
        for block in (8, 16, 128, 1024):
            datatype = dt.hvector(nbytes // block, 1, 2 * block, dt.contiguous(block // 8, "f8"))
            made = StridedPacker(datatype, 1, DEVICE), TraversalPacker(datatype, 1, DEVICE)
            strided, walked = device_us(made, here, there)
            assert walked < 2 * strided, (nbytes, block, strided, walked)
