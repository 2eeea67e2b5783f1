"""Random datatypes against MPI's types: sizes, bounds, packing, unpacking, and conversion in both directions.

MPI packs an array in which each byte holds its own position, so that the packed bytes show the order. The environment
variable ``HALOX_EXAMPLES`` sets the number of random datatypes.
"""

from __future__ import annotations

import os

import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from halox.datatypes import from_mpi
from halox.packing.host import HostPacker
from tests.datatype_strategies import Recipe, build, recipes
from tests.mpi_types import (
    GUARD,
    OPEN_MPI,
    Memory,
    mpi_pack,
    mpi_packs_rightly,
    mpi_type,
    mpi_unpack,
    one_item,
)
from tests.support import trials

EXAMPLES = int(os.environ.get("HALOX_EXAMPLES", trials(800)))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
@given(recipe=recipes(), count=st.sampled_from((1, 2, 3, 0)))
def test_random_datatypes_agree_with_mpi(recipe: Recipe, count: int) -> None:
    ours = build(recipe)
    theirs = mpi_type(recipe)
    assert from_mpi(theirs) == ours
    theirs.Free()
    ours_for_mpi = ours.to_mpi()
    assert from_mpi(ours_for_mpi) == ours
    ours_for_mpi.Free()
    if mpi_packs_rightly(ours):
        compare_packing(recipe, count)


def compare_packing(recipe: Recipe, count: int) -> None:
    ours = build(recipe)
    nbytes = ours.size * count
    to_pack = mpi_type(recipe, halves=OPEN_MPI)
    single = one_item(to_pack, count)
    to_pack.Free()
    try:
        memory = Memory(ours, count)
        positions = np.arange(memory.bytes.size)
        expected = np.zeros(nbytes, int)
        packed = np.zeros(nbytes, int)
        for shift in (0, 8):
            memory.bytes[:] = positions >> shift & 255
            expected += mpi_pack(single, memory, nbytes).astype(int) << shift
            out = np.full(nbytes + GUARD, 0xA5, np.uint8)
            HostPacker(memory.array, ours, count).pack(out)
            assert (out[nbytes:] == 0xA5).all()
            packed += out[:nbytes].astype(int) << shift
        np.testing.assert_array_equal(packed, expected)

        overlapping = np.unique(expected).size < nbytes
        assert ours.overlaps(count) == overlapping
        event("overlapping" if overlapping else "distinct")
        event("with bytes" if nbytes else "without bytes")
        event("strided" if ours.strided is not None else "irregular")
        if not overlapping:  # MPI forbids unpacking to overlapping blocks
            values = (np.arange(nbytes + GUARD) * 37 + 11).astype(np.uint8)
            mine, mpis = Memory(ours, count), Memory(ours, count)
            mine.bytes[:] = mpis.bytes[:] = 0x5A
            mpi_unpack(values[:nbytes], single, mpis)
            HostPacker(mine.array, ours, count).unpack(values)
            np.testing.assert_array_equal(mine.bytes, mpis.bytes)
    finally:
        single.Free()
