"""The traversal packer on a GPU, compared with NumPy and HostPacker, with guard bytes around every target."""

from __future__ import annotations

import numpy as np
import pytest

from halox import datatypes as dt
from halox.packing.host import HostPacker
from tests.support import require

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
from tests.gpu.guarded import DEVICE, GUARD, Guarded, coded, on_device  # noqa: E402
from tests.unit.traversal_types import HALF, TYPES, items  # noqa: E402


def stream():
    return int(cp.cuda.get_current_stream().ptr)


def check(datatype, count=1, max_blocks=None):
    """Compare with HostPacker: pack, and unpack unless the blocks overlap."""
    host = coded(2 * HALF)
    expected = np.zeros(datatype.size * count, np.uint8)
    HostPacker(host[HALF:], datatype, count).pack(expected)
    source, packed = on_device(host), Guarded(expected.size)
    packer = TraversalPacker(datatype, count, DEVICE, max_blocks)
    packer.pack(source.pointer + HALF, packed.pointer, stream())
    assert packed.get().tobytes() == expected.tobytes()
    if datatype.overlaps(count):
        return
    target = Guarded(host.size)
    wanted = np.full(host.size, GUARD, np.uint8)
    HostPacker(wanted[HALF:], datatype, count).unpack(expected)
    packer.unpack(packed.pointer, target.pointer + HALF, stream())
    assert target.get().tobytes() == wanted.tobytes()


class TestConstructors:
    @pytest.mark.parametrize(("name", "count"), items(1, 4))
    def test_packs_and_unpacks(self, name, count):
        check(TYPES[name], count)

    @pytest.mark.parametrize("name", ["struct", "struct of structs", "indexed over vector"])
    def test_small_lists_are_walked_as_well(self, name, monkeypatch):
        """Disables the simplification that flattens small subtrees to one list."""

        def unflattened(datatype, count):
            return simplified(datatype, count, flat_blocks=0, few_units=0)

        monkeypatch.setattr(traversal, "simplified", unflattened)
        check(TYPES[name], 3)

    @pytest.mark.parametrize("max_blocks", [1, 3, 16, 100_000])
    @pytest.mark.parametrize("name", ["vector", "indexed", "many branches"])
    def test_any_number_of_blocks(self, name, max_blocks):
        check(TYPES[name], 1, max_blocks=max_blocks)

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
        chosen = np.random.default_rng(7).permutation(1180)[:1024]
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


def test_nothing_to_do():
    packer = TraversalPacker(dt.contiguous(0, "f8"), 3, DEVICE)
    packer.pack(0, 0, stream())
    packer.unpack(0, 0, stream())


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
