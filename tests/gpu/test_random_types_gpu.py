"""Random nested datatypes on a GPU: every packer that supports a datatype writes the same bytes as the host packer.

tests/unit/packing/test_host_against_mpi.py compares the host packer with ``MPI_Pack``. HALOX_RANDOM_TYPES is the
number of datatypes. HALOX_RANDOM_SHARD divides them among processes: with 1/4, this process tests the second of four
parts.
"""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from halox.packing.host import HostPacker
from tests.datatype_strategies import build, recipes
from tests.support import require

pytestmark = pytest.mark.gpu
require("gpu")

import cupy as cp  # noqa: E402

from halox.packing.choosing import packers  # noqa: E402
from tests.gpu.guarded import GUARD  # noqa: E402

SHARD, SHARDS = map(int, (os.environ.get("HALOX_RANDOM_SHARD") or "0/1").split("/"))
EXAMPLES = int(os.environ.get("HALOX_RANDOM_TYPES", "10000")) // SHARDS
SPAN = 1 << 17  # bytes of the array, displacement 0 in the middle
PACKED = 1 << 16


class Memory:
    """An array and a packed buffer on the host and on the GPU, shared by all random datatypes."""

    def __init__(self):
        rng = np.random.default_rng(11)
        self.array = rng.integers(0, 256, SPAN, dtype=np.uint8)
        self.bytes = rng.integers(0, 256, PACKED, dtype=np.uint8)
        self.on_gpu, self.scratch = cp.asarray(self.array), cp.empty(SPAN, np.uint8)
        self.packed = cp.empty(PACKED, np.uint8)
        self.stream = cp.cuda.get_current_stream().ptr


@pytest.fixture(scope="module")
def memory():
    return Memory()


def test_every_packer_equals_the_host_packer(memory):
    taken: Counter[str] = Counter()
    tried = 0

    @seed(SHARD)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        recipes(),
        st.integers(0, 3),
        st.integers(0, 15),
        st.integers(0, 15),
        st.sampled_from([None, None, None, 1, 5]),
    )
    def check(recipe, count, array_offset, packed_offset, max_blocks):
        nonlocal tried
        tried += 1
        datatype = build(recipe)
        origin, at = SPAN // 2 + array_offset, 256 + packed_offset
        nbytes = datatype.size * count
        assert nbytes + at + 256 <= PACKED
        expected = np.full(PACKED, GUARD, np.uint8)
        HostPacker(memory.array[origin:], datatype, count).pack(expected[at : at + nbytes])
        receivable = not datatype.overlaps(count)
        unpacked = np.full(SPAN, GUARD, np.uint8)
        if receivable:
            HostPacker(unpacked[origin:], datatype, count).unpack(memory.bytes[:nbytes])
        for method, packer in packers().items():
            if packer.why_not(datatype, count) is not None:
                continue
            taken[method] += 1
            made = packer(datatype, count, 0, max_blocks)
            memory.packed.fill(GUARD)
            made.pack(memory.on_gpu.data.ptr + origin, memory.packed.data.ptr + at, memory.stream)
            wrong = np.flatnonzero(memory.packed.get() != expected)
            assert not wrong.size, (
                f"{method} packs byte {wrong[0] - at} of {nbytes} wrong: {recipe}"
            )
            if receivable:
                memory.packed[at : at + nbytes] = cp.asarray(memory.bytes[:nbytes])
                memory.scratch.fill(GUARD)
                array = memory.scratch.data.ptr + origin
                made.unpack(memory.packed.data.ptr + at, array, memory.stream)
                wrong = np.flatnonzero(memory.scratch.get() != unpacked)
                assert not wrong.size, f"{method} unpacks byte {wrong[0] - origin} wrong: {recipe}"

    check()
    print(f"\n{tried} datatypes; taken by {dict(taken)}")
    assert tried >= EXAMPLES
    assert taken["workunits"] == taken["traversal"] == tried, "these take every type"
    assert min(taken["strided"], taken["copy_engine"]) > tried // 2
