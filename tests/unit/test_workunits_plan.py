"""Plans of work units: coverage of all bytes, forms, bounds and speed. No kernel runs."""

from __future__ import annotations

from time import thread_time

import numpy as np
import pytest

from halox import datatypes as dt
from halox.datatypes import BlockList
from halox.errors import DeviceError
from halox.packing import workunits_plan as wp


def bytes_of_segments(segments, words):
    """Return (array displacement, packed displacement) of every byte, from the tables."""
    pairs = []
    for s in segments:
        for item in range(s["items"]):
            array = int(s["array"]) + item * int(s["extent"])
            packed = int(s["packed"]) + item * int(s["item_bytes"])
            for unit in range(s["units"]):
                at, length = int(s["list"]), int(s["block_bytes"])
                if s["form"] >= wp.SHORT:
                    low, high, p_low, p_high = map(int, words[at + 4 * unit : at + 4 * unit + 4])
                    offset = int(np.int64(np.uint64(high << 32 | low)))
                    described = p_high << 32 | p_low
                    place, length = described >> 16, described & 0xFFFF
                    assert 0 < length <= s["block_bytes"]
                else:
                    index = unit if s["form"] == wp.REGULAR else int(words[at + unit])
                    offset, place = index * int(s["granule"]), unit * length
                pairs += [(array + offset + i, packed + place + i) for i in range(length)]
    return sorted(pairs, key=lambda pair: pair[1])


def segments_of(datatype, count=1, unit_bytes=512):
    part = wp.joined(wp.converted(datatype.blocks(), unit_bytes))
    return wp.repeated(part.rows, count, datatype.extent, datatype.size), part.words


@pytest.mark.parametrize("unit_bytes", wp.UNIT_BYTES)
def test_long_blocks_become_equal_units_and_residues(unit_bytes):
    datatype = dt.hindexed([10_000, 1, 4096, 513] * 5, np.arange(20) * 16_000, "u1")
    segments, words = segments_of(datatype, unit_bytes=unit_bytes)
    lengths = []
    for s in segments:
        units = words[s["list"] :][: 4 * s["units"]].reshape(-1, 4)
        lengths += (units[:, 2] & 0xFFFF).tolist()
    whole_units = 5 * sum(n // unit_bytes for n in (10_000, 1, 4096, 513))
    assert lengths.count(unit_bytes) == whole_units
    assert max(lengths) == unit_bytes
    assert sum(lengths) == datatype.size


class TestForms:
    def forms(self, datatype):
        segments, _ = segments_of(datatype)
        return segments["form"].tolist()

    def test_a_million_equal_steps_are_one_row(self):
        segments, words = segments_of(dt.vector(200_000, 1, 3, "f8"))
        assert segments["form"].tolist() == [wp.REGULAR] and words.size == 0

    def test_blocks_alike_take_four_bytes_each(self):
        datatype = dt.indexed_block(1, [0, 5, 7, 30, 31, 40], "f8")
        segments, words = segments_of(dt.indexed_block(3, [0, 5, 70, 30, 10], "f8"))
        assert segments["form"].tolist() == [wp.LISTED] and words.size == 8  # padded
        assert self.forms(datatype) == [wp.LISTED]  # 8, 8, 16, 8: pieces of 8

    def test_short_multiples_of_a_granule_become_granules(self):
        rng = np.random.default_rng(0)
        lengths = rng.choice([1, 2, 6], 1000)
        datatype = dt.indexed(lengths, np.cumsum(lengths + 3) - lengths, "f4")
        segments, words = segments_of(datatype)
        assert segments["form"].tolist() == [wp.LISTED]
        assert segments["block_bytes"].tolist() == [4]
        assert words.size <= int(lengths.sum()) + 3

    def test_stretches_have_rows_of_their_own(self):
        lengths = np.repeat([6, 1, 4], [10, 20, 30])
        starts = np.random.default_rng(1).permutation(60) * 7
        assert self.forms(dt.indexed(lengths, starts, "f8")) == [wp.LISTED] * 3

    def test_a_few_large_blocks_need_no_list(self):
        segments, words = segments_of(dt.hindexed([12, 4000, 400_000], [0, 100, 8000], "u1"))
        assert segments["form"].tolist() == [wp.REGULAR] * 3 and words.size == 0

    def test_lanes_follow_lengths(self):
        lengths = np.random.default_rng(2).permutation(np.arange(1, 80))
        segments, _ = segments_of(dt.indexed(lengths, np.cumsum(lengths + 2) - lengths, "f8"))
        assert segments["form"].tolist() == [wp.SHORT] * 6 + [wp.LONG]
        assert segments["lanes_log"].tolist() == [0, 1, 2, 3, 4, 5, 5]
        assert segments["block_bytes"].tolist()[:6] == [8, 16, 32, 64, 128, 256]
        assert (segments["word"] == 8).all()

    def test_displacements_past_32_bits(self):
        """Blocks are 5 GiB apart and more, so that indices of granules of 4 bytes exceed 32 bits."""
        offsets = np.array([0, 5 << 30, (40 << 30) + 4, 7])
        segments, words = segments_of(dt.hindexed([8, 8, 8, 1], offsets, "u1"))
        assert bytes_of_segments(segments, words)[16][0] == (40 << 30) + 4
        segments, words = segments_of(dt.hindexed_block(8, [0, 5 << 30, (40 << 30) + 4], "u1"))
        assert [a for a, p in bytes_of_segments(segments, words)][8::8] == [5 << 30, (40 << 30) + 4]

    def test_a_block_of_terabytes_has_no_segment_past_31_bits(self):
        segments, words = segments_of(dt.contiguous(3 << 40, "u1"))
        sizes = segments["units"].astype(np.int64) * segments["items"] * segments["block_bytes"]
        assert sizes.sum() == 3 << 40 and sizes.max() < 1 << 31
        assert words.size == 0

    def test_many_items_have_no_segment_past_31_bits(self):
        datatype = dt.resized(dt.indexed_block(1, [0, 5, 7, 31, 40], "f8"), 0, 1 << 20)
        segments, _ = segments_of(datatype, 1 << 28)
        sizes = segments["units"].astype(np.int64) * segments["items"] * segments["block_bytes"]
        assert sizes.sum() == 40 << 28 and sizes.max() < 1 << 31
        launch = wp.launch_of(segments, sms=132)
        assert launch.blocks == launch.tiles < 1 << 31


class TestLaunch:
    def test_a_small_message_spreads_over_the_sms(self):
        segments, _ = segments_of(dt.vector(512, 16, 32, "f8"))
        launch = wp.launch_of(segments, sms=132)
        assert launch.blocks >= 64 and launch.threads == 64

    def test_unit_bytes_follow_the_message(self):
        chosen = [
            wp.unit_bytes_of(None, n) for n in (0, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 1 << 40)
        ]
        assert chosen == [512, 512, 1024, 2048, 2048, 2048]

    def test_wrong_unit_bytes(self):
        with pytest.raises(DeviceError):
            wp.unit_bytes_of(100, 32)


@pytest.mark.parametrize("kind", ["alike", "mixed", "granules", "odd"])
def test_a_million_blocks_convert_without_a_loop_over_them(kind):
    """A Python loop would take a second; the conversion takes about 30 ms."""
    rng, n = np.random.default_rng(4), 1_000_000
    if kind == "alike":
        blocks = BlockList(rng.permutation(2 * n)[:n] * 8, np.full(n, 8))
    else:
        lengths = {
            "mixed": rng.integers(1, 60, n) * 8,
            "granules": rng.choice([4, 8, 24], n),
            "odd": rng.integers(1, 60, n),
        }[kind]
        blocks = BlockList(np.cumsum(lengths + 8) - lengths, lengths)
    took = []
    for _ in range(3):
        start = thread_time()  # CPU time, since other processes may be busy
        parts = list(wp.converted(blocks, 4096))
        took.append(thread_time() - start)
    assert min(took) < 0.4
    assert sum(part.words.size for part in parts) <= wp.most_words(blocks, 4096)
