"""Packing by fragments moves the same bytes as packing at once, and each byte in its own fragment.

NumPy executes the copies, on addresses. The result must equal MPI's packing.
"""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halox.packing.refine import Side, cut_parts, paired
from tests.datatype_strategies import Recipe, build, recipes
from tests.support import require, trials

require("mpi")
from tests import mpi_types as oracle  # noqa: E402

ARRAY, PACKED = 1 << 20, 1 << 24


def addresses(side: Side) -> np.ndarray:
    """Return the addresses of a side's bytes, in packed order."""
    blocks = side.strided
    found = np.array([side.pointer + blocks.offset])
    for count, stride in zip(blocks.counts, blocks.strides, strict=True):
        found = (found[:, None] + np.arange(count) * stride).ravel()
    return (found[:, None] + np.arange(blocks.block_bytes)).ravel()


def cuts(nbytes: int, positions: list[int]) -> list[int]:
    return [*sorted(p % (nbytes + 1) for p in positions), nbytes]


@settings(max_examples=trials(200))
@given(recipes(), st.lists(st.integers(0, 1 << 14), max_size=6), st.booleans())
def test_random_types(recipe: Recipe, positions: list[int], unpack: bool) -> None:
    datatype = build(recipe)
    ends = cuts(datatype.size, positions)
    parts = cut_parts(ARRAY, datatype, 1, PACKED, ends, unpack=unpack)
    if isinstance(parts, int):
        assert paired(ARRAY, datatype, 1, PACKED) is None
        assert ends[parts] == datatype.size if unpack else ends[parts] > 0
        return
    assert len(parts) == len(ends)
    assume(datatype.size and oracle.mpi_packs_rightly(datatype))
    memory = oracle.Memory(datatype, 1)
    memory.bytes[:] = np.random.default_rng(len(ends)).integers(0, 256, memory.bytes.size, np.uint8)
    packed = np.full(datatype.size, 0xA5, np.uint8)
    seen = np.zeros(datatype.size, int)
    for copies in parts:
        for copy in copies:
            array, there = (copy.target, copy.source) if unpack else (copy.source, copy.target)
            assert copy.source.strided.nbytes == copy.target.strided.nbytes > 0
            at = addresses(there) - PACKED
            packed[at] = memory.bytes[addresses(array) - ARRAY + memory.origin]
            seen[at] += 1
    assert (seen == 1).all()
    made = oracle.mpi_type(recipe, halves=oracle.OPEN_MPI)
    single = oracle.one_item(made, 1)
    assert np.array_equal(packed, oracle.mpi_pack(single, memory, datatype.size))
    made.Free()
    single.Free()
