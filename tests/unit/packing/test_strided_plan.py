"""Plans of strided copies: common levels, words, chunks and order. No kernel runs."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from halox import datatypes as dt
from halox.datatypes import StridedBlocks
from halox.errors import DatatypeError, DeviceError
from halox.packing.ordering import rounds
from halox.packing.refine import Copy, Level, Side, contiguous_side, paired, pieces
from halox.packing.strided_plan import (
    MAX_LEVELS,
    MAX_WORDS,
    plan,
)


def pack_of(datatype, pointer=0, packed=1 << 40):
    side = Side(pointer, datatype.strided)
    return Copy(side, contiguous_side(packed, side.strided.nbytes))


def face(n, axis, dtype="f8"):
    """Return a face, one cell thick, of a block of n^3 cells with a halo of one cell."""
    subsizes = [n] * 3
    subsizes[axis] = 1
    return dt.subarray([n + 2] * 3, subsizes, [1, 1, 1], dtype)


class TestPieces:
    def test_a_pack_is_one_piece(self):
        (piece,) = pieces(pack_of(face(8, 0)))
        assert piece.levels == (Level(8, 80, 64), Level(64, 1, 1))

    def test_blocks_of_8_and_12_bytes_repeat_after_24(self):
        """Blocks become four pieces rather than one piece per block, since their pattern repeats after 24 bytes."""
        a = Side(0, StridedBlocks(0, (3000,), (16,), 8))
        b = Side(1 << 30, StridedBlocks(0, (2000,), (20,), 12))
        found = pieces(Copy(a, b))
        assert len(found) == 4
        assert {piece.levels[0] for piece in found} == {Level(1000, 48, 40)}
        assert sum(prod(level.steps for level in piece.levels) for piece in found) == 24000

    def test_nothing_to_move_and_sides_that_differ(self):
        assert pieces(Copy(contiguous_side(0, 0), contiguous_side(8, 0))) == []
        with pytest.raises(DatatypeError):
            pieces(Copy(contiguous_side(0, 8), contiguous_side(64, 16)))


def test_few_parts_for_structs_and_none_for_long_lists():
    item = dt.struct([1, 1, 2], [0, 13, 40], ["f8", "i1", dt.vector(3, 1, 2, "f4")])
    assert len(paired(0, item, 1, 0)) == len(paired(0, item, 100000, 0)) == 3
    places = np.cumsum(np.random.default_rng(2).integers(2, 9, 65))
    assert paired(0, dt.indexed_block(1, places[:64], "f8"), 1, 0) is not None
    assert paired(0, dt.indexed_block(1, places, "f8"), 1, 0) is None


class TestWords:
    @pytest.mark.parametrize("pointer", [0, 1, 2, 4, 6, 8, 16])
    def test_the_widest_that_divides_the_addresses(self, pointer):
        planned = plan([Copy(contiguous_side(pointer, 4096), contiguous_side(8192, 4096))], sms=4)
        word = int(np.gcd(16, pointer))
        found = (int(planned.regions["word_bytes"][0]), int(planned.regions["run_bytes"][0]))
        assert found == ((word, 0) if word > 2 else (0, 4096))

    @pytest.mark.parametrize(
        ("block", "stride", "word"),
        [(32, 48, 16), (32, 40, 8), (32, 36, 4), (10, -34, 2), (10, 33, 1), (32, -34, 0)],
    )
    def test_the_widest_that_divides_the_strides(self, block, stride, word):
        side = Side(1 << 20, StridedBlocks(0, (7,), (stride,), block))
        planned = plan([Copy(side, contiguous_side(0, 7 * block))], sms=4)
        assert planned.regions["word_bytes"][0] == word
        assert planned.regions["words"][0] == (7 * block // word if word else 7 * 4)
        assert planned.nbytes == 7 * block

    def test_additions_keep_whole_elements(self):
        copies = [Copy(contiguous_side(4, 64), contiguous_side(1024, 64))]
        assert plan(copies, sms=4, element_bytes=4).regions["word_bytes"][0] == 4
        with pytest.raises(DatatypeError):
            plan(copies, sms=4, element_bytes=8)


class TestChunks:
    @pytest.mark.parametrize("max_blocks", [1, 5, 16])
    def test_max_blocks_caps_the_grid(self, max_blocks):
        planned = plan(
            [pack_of(face(n, a)) for n in (30, 60) for a in range(3)],
            sms=132,
            max_blocks=max_blocks,
        )
        assert planned.blocks == max_blocks
        assert planned.chunks >= max_blocks

    def test_nothing_to_do(self):
        planned = plan([], sms=8)
        assert (planned.chunks, planned.blocks, planned.nbytes) == (0, 0, 0)
        with pytest.raises(DeviceError):
            plan([], sms=8, max_blocks=0)

    def test_huge_regions_are_cut(self):
        """36 GiB in words of 4 bytes: the number of words exceeds 32 bits."""
        nbytes = 36 << 30
        copy = Copy(contiguous_side(4, nbytes), contiguous_side((1 << 40) + 8, nbytes))
        planned = plan([copy], sms=132)
        assert len(planned.regions) == 5
        assert planned.regions["words"].max() <= MAX_WORDS
        assert planned.nbytes == nbytes
        ends = planned.regions["source"] + planned.regions["words"] * np.uint64(4)
        assert (ends[:-1] == planned.regions["source"][1:]).all()

    def test_long_runs_are_cut(self):
        """5 GiB at odd addresses: the bytes of the run exceed 32 bits."""
        nbytes = (5 << 30) + 7
        copy = Copy(contiguous_side(1, nbytes), contiguous_side((1 << 40) + 2, nbytes))
        planned = plan([copy], sms=132)
        assert planned.regions["run_bytes"].tolist() == [1 << 30] * 5 + [7]
        assert planned.nbytes == nbytes

    def test_more_levels_than_a_region_has(self):
        counts, strides = (3, 2, 5, 3, 2, 3), (10**6, 10**5, 10**4, 10**3, 100, 20)
        side = Side(0, StridedBlocks(0, counts, strides, 16))
        planned = plan([Copy(side, contiguous_side(1 << 40, side.strided.nbytes))], sms=4)
        assert planned.levels == MAX_LEVELS
        assert planned.nbytes == side.strided.nbytes
        assert len(planned.regions) == 4, "the two shortest levels are unrolled"


class TestRounds:
    def box(self, starts, subsizes, shape=(6, 6, 6), pointer=4096):
        side = Side(pointer, dt.subarray(shape, subsizes, starts, "f8").strided)
        return Copy(contiguous_side(1 << 30, side.strided.nbytes), side)

    def test_disjoint_boxes_of_one_array_share_a_launch(self):
        """The byte ranges of opposite faces overlap, but no byte is in both faces."""
        opposite = [self.box((0, 0, 0), (6, 6, 1)), self.box((0, 0, 5), (6, 6, 1))]
        assert rounds(opposite) == [opposite]

    def test_the_accumulation_of_26_halos_takes_few_launches(self):
        """The halo values of face, edge and corner neighbours are added to the same outermost cells of the owner."""
        copies = []
        # Faces come first, then edges, then corners, each sorted by axes, so that opposite regions share a launch.
        # Lexicographic order would need 14 launches.
        in_order = sorted(np.ndindex(3, 3, 3), key=lambda d: (-d.count(1), [x == 1 for x in d]))
        for direction in in_order:
            if direction != (1, 1, 1):
                starts = [{0: 1, 1: 1, 2: 4}[d] for d in direction]
                copies.append(self.box(starts, [4 if d == 1 else 1 for d in direction]))
        dealt = rounds(copies)
        assert sum(map(len, dealt)) == 26
        assert len(dealt) == 7
        turn = {id(copy): i for i, together in enumerate(dealt) for copy in together}
        cells = [set(map(tuple, self.cells(copy))) for copy in copies]
        for i in range(26):
            for j in range(i):
                if cells[i] & cells[j]:
                    assert turn[id(copies[j])] < turn[id(copies[i])]

    def cells(self, copy):
        blocks = copy.target.strided
        array = np.arange(6**3 * 8, dtype=np.int64)
        view = np.lib.stride_tricks.as_strided(
            array[blocks.offset :], blocks.counts, [s * 8 for s in blocks.strides]
        )
        return [(int(first) + i,) for first in view.ravel() for i in range(blocks.block_bytes)]
