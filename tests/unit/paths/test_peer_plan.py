"""Plans of whole exchanges in one launch: words, chunks, their order and the table. No kernel runs."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from halox import datatypes as dt
from halox.datatypes import StridedBlocks
from halox.packing.refine import Copy, Level, Side, contiguous_side, paired
from halox.packing.strided_plan import LEVEL, StridedRow, region_dtype
from halox.paths.peer import table as peer_plan
from halox.paths.peer.negotiation import EXCHANGE
from halox.paths.peer.table import (
    CHUNK_BYTES,
    DIRECT_CHUNK_BYTES,
    EPOCH_SHIFT,
    LONG_CHUNK_BYTES,
    MOST_CHUNKS,
    TABLE_BYTES,
    TILE_BYTES,
    TILE_DATA_BYTES,
    Kind,
    MessageRun,
    Segment,
    chunk_bytes,
    in_even_chunks,
    plan,
    runs,
    segment_dtype,
)
from tests.fakes.cpu_peer import built
from tests.support import require

PARAMETER_BYTES = 4096
"""CUDA's limit on the parameters of a launch."""


def face(n, axis, dtype="f8"):
    """Return a face, one cell thick, of a block of n^3 cells with a halo of one cell."""
    subsizes = [n] * 3
    subsizes[axis] = 1
    return dt.subarray([n + 2] * 3, subsizes, [1, 1, 1], dtype)


def runs_of_type(datatype, *, packed=1, count=1, pointer=1 << 20, **options):
    pairs = paired(pointer, datatype, count, 0)
    return runs([Copy(*pair[:: 1 if packed else -1]) for pair in pairs], packed=packed, **options)


def line(words, word=8):
    """Return a row of contiguous words on both sides."""
    return StridedRow(1 << 20, 1 << 30, word, (Level(words, word, word),))


def segments_of(*groups):
    """Return one segment per (kind, words, chunk_words)."""
    return [Segment(kind, line(words), i, chunk) for i, (kind, words, chunk) in enumerate(groups)]


MIXED = segments_of(
    (Kind.TAKE_STAGED, 5000, 256),
    (Kind.COPY, 300, 0),
    (Kind.SEND_STAGED, 5000, 256),
    (Kind.TAKE_LL, 70, 0),
    (Kind.SEND_LL, 1, 0),
    (Kind.TAKE_DIRECT, 1, 1),
    (Kind.SEND_WIDE, 3000, 0),
    (Kind.TAKE_WIDE, 448, 0),
    (Kind.SEND_DIRECT, 513, 256),
)


class TestTable:
    def test_its_layout_is_the_kernels(self):
        """Struct sizes, offsets and constants agree between the C++ source and Python."""
        require("cxx")
        dtypes = {
            "Segment": segment_dtype(5),
            "Region": region_dtype(5),
            "Level": LEVEL,
            "Chunk": np.dtype([("segment", "u4"), ("number", "u4")]),
            "State": np.dtype([("count", "u8"), ("failed", "u8")]),
            "Exchange": EXCHANGE,
        }
        constants = {
            **{kind.name: int(kind) for kind in Kind},
            "EPOCH_SHIFT": EPOCH_SHIFT,
            "TILE_BYTES": TILE_BYTES,
            "32 * WIDE_BYTES": TILE_DATA_BYTES,
            "sizeof(Packets8)": 8 * peer_plan.PACKET_EXPANSION,
        }
        texts, expected = list(constants), list(constants.values())
        for struct, dtype in dtypes.items():
            texts += [
                f"sizeof({struct})",
                *(f"__builtin_offsetof({struct}, {m})" for m in dtype.names),
            ]
            expected += [dtype.itemsize, *(dtype.fields[m][1] for m in dtype.names)]
        extra = f'extern "C" {{ unsigned long layout[] = {{{", ".join(texts)}}}; }}'
        library = ctypes.CDLL(str(built((("MAX_LEVELS", "5"), ("TABLE_SEGMENTS", "0")), extra)))
        found = (ctypes.c_ulong * len(expected)).in_dll(library, "layout")
        assert dict(zip(texts, found, strict=True)) == dict(zip(texts, expected, strict=True))

    @pytest.mark.parametrize("levels", [1, 5])
    @pytest.mark.parametrize("n", [1, 4, 5, 12, 13, 40])
    def test_it_travels_with_the_launch_where_it_fits(self, n, levels):
        row = StridedRow(0, 0, 8, tuple(Level(2, 1000 * k, 8 * k) for k in range(levels, 0, -1)))
        planned = plan([Segment(Kind.SEND_LL, row, 0)] * n, sms=132)
        assert planned.inline >= n if n <= 12 else planned.inline in (0, *range(n, 64))
        if planned.inline:
            assert planned.table.nbytes <= TABLE_BYTES
            assert planned.table.nbytes == planned.inline * planned.segments.itemsize
            assert planned.table.nbytes + EXCHANGE.itemsize <= PARAMETER_BYTES
            assert planned.table[: planned.segments.nbytes].tobytes() == planned.segments.tobytes()
        else:
            assert planned.table.nbytes == planned.segments.nbytes + 8 * planned.chunks


class TestChunks:
    def test_what_is_sent_comes_first(self):
        planned = plan(MIXED, sms=4)
        taken = planned.segments["kind"] >= Kind.TAKE_STAGED
        assert taken.tolist() == sorted(taken) and not taken[0] and taken[-1]
        of_chunks = taken[planned.order[:, 0]]
        assert not of_chunks[: planned.send_chunks].any()
        assert of_chunks[planned.send_chunks :].all()

    @pytest.mark.parametrize("sms", [1, 132, 10**6])
    def test_blocks_are_counted_in_the_epochs_low_bits(self, sms):
        many = segments_of((Kind.SEND_STAGED, 1 << 20, 16), (Kind.TAKE_STAGED, 1 << 20, 16))
        planned = plan(many, sms=sms)
        assert 2 * planned.send_blocks == planned.blocks
        assert planned.send_blocks <= 4 * sms
        assert planned.blocks < 1 << EPOCH_SHIFT

    def test_wide_chunks_are_whole_tiles(self):
        """Each warp of a block has one tile of a chunk, for any number of words."""
        for words in (3000, 1 << 18):
            planned = plan(
                segments_of((Kind.SEND_WIDE, words, 0), (Kind.TAKE_WIDE, words, 0)), sms=4
            )
            of_a_warp = TILE_DATA_BYTES // 8
            assert set(planned.segments["chunk_words"] // of_a_warp) == {planned.threads // 32}
            assert not (planned.segments["chunk_words"] % of_a_warp).any()


class TestRuns:
    def test_both_ends_of_a_halo_have_the_same_signature(self):
        for axis in range(3):
            for dtype in ("f4", "f8", "c16"):
                kinds = face(70, axis, dtype)
                sent, received = (
                    runs_of_type(kinds, packed=p, pointer=4096 + 16 * p) for p in (1, 0)
                )
                assert [s.signature for s in sent] == [s.signature for s in received]
                assert all(s.packed >= 0 for s in sent)

    def test_packed_bytes_with_gaps_are_no_run_of_the_message(self):
        """A side with six levels becomes several runs, since a row has fewer levels; some have gaps when packed."""
        shape = (3, 2, 5, 3, 2, 3)
        strides = (10**6, 10**5, 10**4, 10**3, 100, 20)
        side = Side(0, StridedBlocks(0, shape, strides, 16))
        copy = Copy(side, contiguous_side(0, side.strided.nbytes))
        found = runs([copy], packed=1)
        assert len(found) > 1 and sum(s.row.nbytes for s in found) == side.strided.nbytes
        for run in found:
            places = packed_bytes(run.row, 1)
            dense = (np.diff(places) == 1).all()
            assert (run.packed == places[0]) if dense else (run.packed == -1)
        assert any(run.packed == -1 for run in found)

    @pytest.mark.parametrize("most", [CHUNK_BYTES[1], LONG_CHUNK_BYTES])
    def test_chunks_are_powers_of_two_that_grow(self, most):
        run_bytes = [1 << n for n in range(4, 40)]
        sizes = [chunk_bytes(nbytes, most) for nbytes in run_bytes]
        assert sizes == sorted(sizes)
        assert all(size & (size - 1) == 0 and size >= CHUNK_BYTES[0] for size in sizes)
        chunks = [-(-nbytes // size) for nbytes, size in zip(run_bytes, sizes, strict=True)]
        assert max(chunks) <= MOST_CHUNKS

    @pytest.mark.parametrize("sms", [3, 132])
    @pytest.mark.parametrize(
        "nbytes",
        [(16,), (4096, 64), (9 << 20, 1 << 17), (1 << 35,)],
    )
    def test_blocks_have_equally_many_direct_chunks(self, nbytes, sms):
        total = sum(nbytes)
        for n in nbytes:
            run = in_even_chunks(
                MessageRun(StridedRow(0, 0, 16, (Level(n // 16, 16, 16),)), -1), total, sms
            )
            size = 16 * run.chunk_words
            assert size % 512 == 0 and size <= max(DIRECT_CHUNK_BYTES[1], n // MOST_CHUNKS)
            assert run.chunks <= MOST_CHUNKS + sms
            rounds = total / (sms * size)
            # If the chunks need several rounds of the blocks, the last round is nearly full.
            assert rounds <= 1 or rounds > np.ceil(rounds) * (1 - 512 / size) - 1e-9
            assert run.chunks == -(-n // size)

    def test_lanes_of_a_run_share_a_chunk(self):
        for lanes in (1, 4, 32):
            row = StridedRow(0, 0, 0, (Level(1000, 333, 333), Level(lanes, 0, 0)), 8 * lanes)
            assert MessageRun(row, -1).chunk_words % lanes == 0


def packed_bytes(row, side):
    """Return the addresses of a row's bytes on one side, in the order of its words."""
    places = np.array([(row.source, row.target)[side]])
    for level in row.levels:
        places = (places[:, None] + np.arange(level.steps) * level[1 + side]).ravel()
    return (places[:, None] + np.arange(row.word_bytes)).ravel()
