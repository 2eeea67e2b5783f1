"""Bounds checks of datatypes with absolute addresses; a table takes the driver's place."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.errors import DatatypeError, FieldError
from halox.packing.absolute import check_absolute
from halox.runtime.gpu import memory
from halox.runtime.gpu.memory import MemoryKind
from tests.support import trials


class Table:
    """Allocations (first address, bytes, kind, device), and the addresses that were looked up."""

    def __init__(self, *allocations):
        self.allocations = allocations
        self.looked_up = []

    def find(self, address):
        for base, nbytes, kind, device in self.allocations:
            if base <= address < base + nbytes:
                return base, nbytes, kind, device
        return None

    def memory_range(self, address):
        self.looked_up.append(address)
        found = self.find(address)
        return found[:2] if found and found[2] in ("device", "managed") else None

    def memory_kind(self, address):
        found = self.find(address)
        if found is None:
            return MemoryKind("unregistered", None, None)
        return MemoryKind(found[2], found[3], address)

    def check(self, datatype, count=1, device=0):
        with patch.multiple(memory, memory_range=self.memory_range, memory_kind=self.memory_kind):
            check_absolute(datatype, count, device)


GPU = Table(
    (0x1000, 0x1000, "device", 0),
    (0x2000, 0x1000, "device", 0),  # adjacent to the first
    (0x4000, 0x1000, "managed", 1),
    (0x6000, 0x1000, "device", 1),
    (0x8000, 0x1000, "pinned", 0),
)


@pytest.fixture(autouse=True)
def forget():
    GPU.looked_up.clear()


def blocks(*ranges):
    return dt.hindexed([b - a for a, b in ranges], [a for a, _ in ranges], "u1")


class TestCheckAbsolute:
    def test_inside_one_allocation_is_one_look_up(self):
        GPU.check(dt.hvector(1000, 1, 4, blocks((0x1000, 0x1001))))
        assert GPU.looked_up == [0x1000]

    def test_an_allocation_is_looked_up_once(self):
        both = [0x1000 + 8 * i for i in range(200)] + [0x4000 + 8 * i for i in range(200)]
        GPU.check(dt.hindexed_block(4, np.random.default_rng(0).permutation(both), "u1"))
        assert GPU.looked_up == [0x1000, 0x1000, 0x4000]

    def test_up_to_the_last_byte(self):
        GPU.check(blocks((0x4000, 0x5000)))
        with pytest.raises(
            FieldError, match=r"bytes \[0x5000, 0x5001\) of its items are in no GPU"
        ):
            GPU.check(blocks((0x4000, 0x5001)))
        with pytest.raises(FieldError, match=r"bytes \[0xfff, 0x1010\) of its items are in no GPU"):
            GPU.check(blocks((0xFFF, 0x1010)))

    def test_neighbours(self):
        GPU.check(blocks((0x1800, 0x2800)))
        assert len(GPU.looked_up) == 3

    def test_overlapping_and_nested_blocks(self):
        GPU.check(blocks((0x4100, 0x4200), (0x4000, 0x4F00), (0x4150, 0x4160), (0x1000, 0x1001)))
        with pytest.raises(FieldError, match=r"\[0x5000, 0x5010\)"):
            GPU.check(blocks((0x4100, 0x5010), (0x4200, 0x4210), (0x1000, 0x1001)))

    def test_a_hole_between_two_allocations(self):
        GPU.check(blocks((0x2FF0, 0x3000), (0x4000, 0x4010)))
        with pytest.raises(FieldError, match=r"\[0x3000, 0x3001\)"):
            GPU.check(blocks((0x2FF0, 0x3001), (0x4000, 0x4010)))
        with pytest.raises(FieldError, match=r"\[0x3800, 0x3801\)"):
            GPU.check(blocks((0x2FF0, 0x3000), (0x3800, 0x3801), (0x4000, 0x4010)))

    def test_host_memory(self):
        with pytest.raises(
            FieldError, match="no GPU's memory: host pointers where device ones are"
        ):
            GPU.check(blocks((0x1000, 0x1001), (0x9000, 0x9010)))
        with pytest.raises(FieldError, match="page-locked host memory: host pointers where device"):
            GPU.check(blocks((0x1000, 0x1001), (0x8000, 0x8010)))

    def test_another_gpu(self):
        with pytest.raises(FieldError, match="memory of GPU 1, and GPU 0 would pack"):
            GPU.check(blocks((0x6000, 0x6010)))
        GPU.check(blocks((0x6000, 0x6010)), device=1)

    def test_items(self):
        item = dt.resized(blocks((0x4000, 0x4010)), 0, 0x100)
        GPU.check(item, 16)
        with pytest.raises(FieldError, match=r"\[0x5000, 0x5010\)"):
            GPU.check(item, 17)
        backwards = dt.resized(blocks((0x4F00, 0x4F10)), 0, -0x100)
        GPU.check(backwards, 16)
        with pytest.raises(FieldError, match=r"\[0x3f00, 0x3f10\)"):
            GPU.check(backwards, 17)
        with pytest.raises(DatatypeError):
            GPU.check(item, -1)

    def test_nothing(self):
        GPU.check(blocks((0x9000, 0x9010)), 0)
        GPU.check(blocks((0x9000, 0x9000)))
        assert not GPU.looked_up

    def test_no_addresses(self):
        with pytest.raises(FieldError, match=r"from -0x10 to 0x10, which are no addresses"):
            GPU.check(blocks((0x8, 0x10), (-0x10, -0x8)))

    def test_the_name_of_the_argument(self):
        with pytest.raises(FieldError, match=r"^datatype: bytes \[0x9000"):
            GPU.check(blocks((0x9000, 0x9001)))

    @given(
        st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=6),
        st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=6),
    )
    @settings(max_examples=trials(300), deadline=None)
    def test_against_every_byte(self, ranges, gaps):
        allocations, at = [], 0
        for gap, nbytes in gaps:
            allocations.append((at + gap, nbytes, "device", 0))
            at += gap + nbytes
        table = Table(*allocations)
        touched = {byte for start, n in ranges for byte in range(start, start + n)}
        outside = [byte for byte in sorted(touched) if table.find(byte) is None]
        datatype = blocks(*((start, start + n) for start, n in ranges))
        if not outside:
            table.check(datatype)
            assert len(table.looked_up) <= 1 + len(allocations)
        else:
            with pytest.raises(FieldError, match=rf"bytes \[{outside[0]:#x}, "):
                table.check(datatype)
