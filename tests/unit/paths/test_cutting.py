"""Packing by fragments moves the same bytes as packing at once, and each byte in its own fragment.

NumPy executes the copies, on addresses. The result must equal MPI's packing.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halox.datatypes import hindexed, indexed_block, subarray, vector
from halox.errors import DatatypeError
from halox.packing.refine import Copy, Side, contiguous_side, cut, cut_parts, paired
from halox.paths.fragments import FRAGMENT_BYTES, MOST_FRAGMENTS, cutter, ends_of
from halox.paths.messages import Message, Part
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


FACES = {
    "x": subarray((40, 50, 60), (38, 48, 1), (1, 1, 1), "f8"),
    "y": subarray((40, 50, 60), (38, 1, 58), (1, 1, 1), "f4"),
    "z": subarray((40, 50, 60), (1, 50, 60), (1, 0, 0), "f8"),
    "links": vector(70, 9, 23, "c16"),
}


@pytest.mark.parametrize("unpack", [False, True])
@pytest.mark.parametrize("name", FACES)
def test_faces_are_cut_at_the_byte(name: str, unpack: bool) -> None:
    """Each fragment moves its own bytes only, in few copies, and the cuts leave whole elements as words."""
    datatype = FACES[name]
    ends = [16 * k for k in (100, 100, 257, 500) if 16 * k < datatype.size] + [datatype.size]
    parts = cut_parts(ARRAY, datatype, 1, PACKED, ends, unpack=unpack)
    assert not isinstance(parts, int)
    for (start, end), copies in zip(pairwise([0, *ends]), parts, strict=True):
        there = [copy.source if unpack else copy.target for copy in copies]
        at = [*np.concatenate([addresses(s) - PACKED for s in there])] if there else []
        assert at == [*range(start, end)]
        assert len(copies) <= 5
        assert all(s.strided.block_bytes % 4 == 0 for copy in copies for s in copy)


def test_what_is_scattered_goes_with_its_first_or_last_fragment() -> None:
    """Parts with interleaved packed bytes cannot be cut: the first fragment packs them, the last one unpacks them."""
    # 40 items of two blocks: the first blocks of all items are one part, 24 bytes apart in the packed bytes.
    datatype = hindexed([8, 16], [0, 40], "u1")
    pairs = paired(ARRAY, datatype, 40, PACKED)
    assert pairs is not None and any(place.strided.counts for _, place in pairs)
    ends = [100, 500, 960]
    early = cut_parts(ARRAY, datatype, 40, PACKED, ends, unpack=False)
    late = cut_parts(ARRAY, datatype, 40, PACKED, ends, unpack=True)
    assert not isinstance(early, int) and not isinstance(late, int)
    assert [len(copies) for copies in early] == [len(pairs), 0, 0]
    assert [len(copies) for copies in late] == [0, 0, len(pairs)]


def test_irregular_types_stay_whole() -> None:
    rng = np.random.default_rng(1)
    datatype = indexed_block(1, rng.permutation(3000)[:1000], "f8")
    assert cut_parts(ARRAY, datatype, 1, PACKED, [0, 10, 8000], unpack=False) == 1
    assert cut_parts(ARRAY, datatype, 1, PACKED, [10, 8000, 8000], unpack=True) == 1


def test_cutting_refuses_what_does_not_fit() -> None:
    with pytest.raises(DatatypeError):
        cut(Copy(contiguous_side(0, 12), contiguous_side(100, 8)), [12])


@settings(max_examples=trials(100))
@given(st.integers(0, 1 << 30), st.sampled_from([4096, 100_000, FRAGMENT_BYTES]))
def test_rule_of_fragments(nbytes: int, fragment_bytes: int) -> None:
    ends = ends_of(nbytes, fragment_bytes)
    sizes = [b - a for a, b in pairwise((0, *ends))]
    assert ends[-1] == nbytes and len(ends) <= MOST_FRAGMENTS
    assert len(ends) == 1 or all(
        size > 0 and end % 4096 == 0 for size, end in zip(sizes, ends[:-1], strict=False)
    )
    if nbytes < 2 * fragment_bytes:
        assert ends == (nbytes,)
    else:
        assert len(ends) > 1 and max(sizes) >= fragment_bytes


def test_both_ends_cut_alike() -> None:
    strided, dense = vector(1 << 18, 1, 2, "f8"), vector(1, 1 << 18, 1 << 18, "f8")
    send, receive = (
        Message(1, "send", (Part(0, strided),)),
        Message(0, "receive", (Part(0, dense),)),
    )
    cut_it = cutter(1 << 19)
    assert cut_it(send) == cut_it(receive) and len(cut_it(send)) == 4
