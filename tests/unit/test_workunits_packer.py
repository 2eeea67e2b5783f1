"""The work-unit packer and its lists on a fake GPU: when lists are created, shared, copied and evicted."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from halox import datatypes as dt
from halox.errors import DeviceError
from halox.packing import device_packer, workunits, workunits_lists
from halox.packing.host import HostPacker
from halox.packing.workunits import WorkUnitsCopy, WorkUnitsPacker
from halox.packing.workunits_lists import ListCache, UnitList, layout_key, unit_list
from halox.packing.workunits_plan import SEGMENT, Units
from halox.runtime.gpu import memory
from tests.support import require
from tests.unit.cpu_kernels import aligned, run_workunits

require("cxx")

STREAM = 77


class Machine:
    """A fake GPU: device memory is host memory, and launches block. ``events`` records its operations."""

    def __init__(self):
        self.events = []
        self.capturing = False
        runtime = SimpleNamespace(streamIsCapturing=lambda stream: self.capturing)
        self.cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))


class Memory:
    machine: Machine

    def __init__(self, nbytes, device):
        self.nbytes = nbytes
        self.array = aligned(nbytes)
        self.array[:] = 0xEE
        self.pointer = self.array.ctypes.data
        self.machine.events.append(("allocate", nbytes))

    def write(self, at, values):
        text = values.reshape(-1).view(np.uint8)
        assert at + text.size <= self.nbytes, "the list outgrew its memory"
        self.array[at : at + text.size] = text
        self.machine.events.append(("upload", text.size))

    def order(self, stream):
        assert stream == STREAM
        self.machine.events.append(("order",))

    def wait(self):
        pass


class Launch:
    machine: Machine

    def __init__(self, function, grid, block, args, *, device, shared_bytes):
        self.shape = (function, grid, block, args)

    def launch_at(self, stream, array, packed):
        function, grid, block, args = self.shape
        self.machine.events.append(("launch", function))
        run_workunits(function, bytes(args[2].raw), grid, block, array, packed)

    def launch(self, stream):
        self.launch_at(stream, 0, 0)


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(Memory, "machine", made, raising=False)
    monkeypatch.setattr(Launch, "machine", made, raising=False)
    monkeypatch.setattr(workunits, "cupy", lambda: made.cupy)
    monkeypatch.setattr(workunits, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(device_packer, "PreparedLaunch", Launch)
    monkeypatch.setattr(
        device_packer, "kernel", lambda name, function, *_: function.removeprefix("workunits_")
    )
    monkeypatch.setattr(memory, "DeviceBytes", Memory)
    monkeypatch.setattr(workunits_lists, "DeviceBytes", Memory)
    monkeypatch.setattr(workunits_lists, "cache", ListCache(1 << 20))
    return made


def kinds(machine, kind):
    return [event[1:] for event in machine.events if event[0] == kind]


def irregular(n, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, n)
    return dt.indexed(lengths, np.cumsum(lengths + 2) - lengths, "f8")


def field(datatype, count=1):
    items = dt.contiguous(count, datatype)
    array = aligned(items.true_ub)
    array[:] = np.random.default_rng(1).integers(0, 256, array.size, dtype=np.uint8)
    return array


def packed_by_host(array, datatype, count=1):
    out = np.zeros(datatype.size * count, np.uint8)
    HostPacker(array, datatype, count).pack(out)
    return out


def pack(packer, array):
    out = aligned(packer.nbytes)
    packer.pack(array.ctypes.data, out.ctypes.data, STREAM)
    return out


class TestPacker:
    @pytest.mark.parametrize("n", [3, 40, 700])
    @pytest.mark.parametrize("count", [1, 4])
    def test_packs_and_unpacks(self, machine, n, count):
        datatype = irregular(n)
        array = field(datatype, count)
        packer = WorkUnitsPacker(datatype, count, 0)
        expected = packed_by_host(array, datatype, count)
        assert pack(packer, array).tobytes() == expected.tobytes()
        target = np.zeros_like(array)
        wanted = np.zeros_like(array)
        HostPacker(wanted, datatype, count).unpack(expected)
        packer.unpack(expected.ctypes.data, target.ctypes.data, STREAM)
        assert target.tobytes() == wanted.tobytes()

    def test_a_small_list_needs_no_device_memory(self, machine):
        datatype = irregular(40)
        pack(WorkUnitsPacker(datatype, 1, 0), field(datatype))
        assert machine.events == [("launch", "pack_inline")]

    def test_later_calls_only_launch(self, machine):
        datatype = irregular(700)
        array, packer = field(datatype), WorkUnitsPacker(datatype, 1, 0)
        pack(packer, array)
        machine.events.clear()
        machine.capturing = True
        pack(packer, array)
        packer.unpack(pack(packer, array).ctypes.data, array.ctypes.data, STREAM)
        assert machine.events == [("launch", "pack")] * 2 + [("launch", "unpack")]

    def test_nothing_to_move(self, machine):
        packer = WorkUnitsPacker(dt.contiguous(0, "f8"), 5, 0)
        packer.pack(0, 0, STREAM)
        packer.unpack(0, 0, STREAM)
        assert machine.events == []

    def test_equal_layouts_share_a_list(self, machine):
        lengths, starts = [3, 1, 7, 2] * 200, np.arange(800) * 11
        first = dt.indexed(lengths, starts, "f8")
        second = dt.hindexed(np.array(lengths) * 8, starts * 8, "u1")
        array = field(first, 2)
        a, b = WorkUnitsPacker(first, 1, 0), WorkUnitsPacker(dt.resized(second, 0, 80_000), 2, 0)
        pack(a, array)
        array = np.resize(array, 200_000)
        assert pack(b, array).tobytes() == packed_by_host(array, b.datatype, 2).tobytes()
        assert len(kinds(machine, "upload")) == 1

    def test_a_first_use_while_capturing_is_refused(self, machine):
        datatype = irregular(10)
        packer = WorkUnitsPacker(datatype, 1, 0)
        machine.capturing = True
        with pytest.raises(DeviceError):
            packer.pack(1, 1, STREAM)
        machine.capturing = False
        array = field(datatype)
        assert pack(packer, array).tobytes() == packed_by_host(array, datatype).tobytes()

    @pytest.mark.parametrize("unpacking", [False, True])
    @pytest.mark.parametrize("count", [1, 2])
    def test_a_pipelined_first_use(self, machine, monkeypatch, count, unpacking):
        monkeypatch.setattr(workunits, "PIPELINED_BLOCKS", 1000)
        monkeypatch.setattr("halox.packing.workunits_plan._PART_BLOCKS", 500)
        datatype = irregular(3210, longest=30)
        array = field(datatype, count)
        packer = WorkUnitsPacker(datatype, count, 0)
        expected = packed_by_host(array, datatype, count)
        if unpacking:
            target = np.zeros_like(array)
            packer.unpack(expected.ctypes.data, target.ctypes.data, STREAM)
            wanted = np.zeros_like(array)
            HostPacker(wanted, datatype, count).unpack(expected)
            assert target.tobytes() == wanted.tobytes()
        else:
            assert pack(packer, array).tobytes() == expected.tobytes()
        moves = [event[0] for event in machine.events if event[0] in ("order", "launch")]
        assert moves == ["order", "launch"] * 7, "each part is launched once it is ordered"
        machine.events.clear()
        assert pack(packer, array).tobytes() == expected.tobytes()
        assert machine.events == [("launch", "pack")], "the whole list is there now"
        other = WorkUnitsPacker(datatype, 1, 0, unit_bytes=packer.unit_bytes)
        assert pack(other, array).tobytes() == expected[: datatype.size].tobytes()
        assert not kinds(machine, "upload")[1:], "at most the segments"

    @pytest.mark.parametrize("kind", ["alike", "granules", "odd", "bytes"])
    def test_a_pipelined_list_fits_its_memory(self, machine, monkeypatch, kind):
        monkeypatch.setattr(workunits, "PIPELINED_BLOCKS", 100)
        monkeypatch.setattr("halox.packing.workunits_plan._PART_BLOCKS", 90)
        rng = np.random.default_rng(2)
        lengths = {
            "alike": np.full(1000, 40),
            "granules": rng.choice([4, 8, 24, 60], 1000),
            "odd": rng.integers(1, 100, 1000),
            "bytes": np.where(np.arange(1000) < 999, 1, 9000),
        }[kind]
        starts = rng.permutation(1000) * 64 + 4
        datatype = dt.hindexed(lengths, starts, "u1")
        array = field(datatype)
        packer = WorkUnitsPacker(datatype, 1, 0)
        assert pack(packer, array).tobytes() == packed_by_host(array, datatype).tobytes()

    def test_two_threads_prepare_once(self, machine):
        datatype = irregular(700)
        array, packer = field(datatype), WorkUnitsPacker(datatype, 1, 0)
        expected, wrong = packed_by_host(array, datatype).tobytes(), []

        def work():
            for _ in range(3):
                # On the CPU, the kernel's block and thread indices are global variables.
                with one_at_a_time:
                    if pack(packer, array).tobytes() != expected:
                        wrong.append(True)

        one_at_a_time = threading.Lock()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert len(kinds(machine, "upload")) == 1

    def test_wrong_arguments(self, machine):
        with pytest.raises(DeviceError):
            WorkUnitsPacker(irregular(3), 1, 0, unit_bytes=1000)
        with pytest.raises(DeviceError):
            WorkUnitsPacker(irregular(3), 1, 0, max_blocks=0)


class TestCopy:
    @pytest.mark.parametrize("sizes", [(5, 9), (5, 700, 30), (3,) * 40, ()])
    @pytest.mark.parametrize("unpack", [False, True])
    def test_several_messages_in_one_launch(self, machine, sizes, unpack):
        parts, checks = [], []
        for i, n in enumerate(sizes):
            datatype, count = irregular(n, seed=i), 1 + i % 2
            array = field(datatype, count)
            packed = packed_by_host(array, datatype, count)
            target = np.zeros_like(array) if unpack else np.zeros_like(packed)
            wanted = np.zeros_like(target)
            if unpack:
                HostPacker(wanted, datatype, count).unpack(packed)
                parts.append((datatype, count, target.ctypes.data, packed.ctypes.data))
            else:
                wanted[:] = packed
                parts.append((datatype, count, array.ctypes.data, target.ctypes.data))
            checks.append((target, wanted, array, packed))
        copy = WorkUnitsCopy(parts, unpack=unpack, device=0)
        assert copy.nbytes == sum(datatype.size * count for datatype, count, _, _ in parts)
        copy.launch(STREAM)
        assert len(kinds(machine, "launch")) == (1 if sizes else 0)
        for target, wanted, _, _ in checks:
            assert target.tobytes() == wanted.tobytes()


class TestCache:
    def list_of(self, n_words):
        return UnitList(Units(np.zeros(1, SEGMENT), np.zeros(n_words, np.uint32)), 0)

    def test_the_least_recently_used_list_is_dropped(self, machine):
        size = self.list_of(512).nbytes
        cache = ListCache(3 * size)
        made = {key: cache.put(0, key, self.list_of(512)) for key in "abc"}
        assert cache.get(0, "a") is made["a"]
        cache.put(0, "d", self.list_of(512))
        assert [key for key in "abcd" if cache.get(0, key)] == ["a", "c", "d"]
        assert cache.nbytes(0) == 3 * size
        assert cache.get(1, "a") is None, "devices have lists of their own"
        cache.clear()
        assert cache.nbytes(0) == 0

    def test_the_first_of_two_equal_lists_stays(self, machine):
        cache = ListCache(1 << 20)
        first = cache.put(0, "a", self.list_of(1))
        assert cache.put(0, "a", self.list_of(1)) is first

    def test_a_list_in_use_outlives_the_cache(self, machine):
        datatype = irregular(700)
        array, packer = field(datatype), WorkUnitsPacker(datatype, 1, 0)
        pack(packer, array)
        workunits_lists.cache.clear()
        assert pack(packer, array).tobytes() == packed_by_host(array, datatype).tobytes()

    def test_a_list_larger_than_the_cache_is_not_kept(self, machine, monkeypatch):
        monkeypatch.setattr(workunits_lists, "cache", ListCache(1000))
        datatype = irregular(700)
        kept = unit_list(datatype, 512, 0)
        assert workunits_lists.cache.nbytes(0) == 0
        assert kept.n_words

    def test_keys_tell_layouts_apart_and_nothing_else(self):
        lengths, starts = [3, 1, 7], [0, 10, 30]
        key = layout_key(dt.indexed(lengths, starts, "f8"))
        assert key == layout_key(dt.hindexed([24, 8, 56], [0, 80, 240], "u1"))
        assert key == layout_key(dt.resized(dt.indexed(lengths, starts, "f8"), 0, 999))
        assert key != layout_key(dt.indexed(lengths, [0, 10, 31], "f8"))
        assert key != layout_key(dt.indexed([3, 1, 6], starts, "f8"))
        assert layout_key(dt.vector(3, 1, 2, "f8")) == layout_key(dt.hvector(3, 8, 16, "u1"))
