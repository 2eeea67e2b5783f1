"""Records and lists of the traversal packer, and the shapes of its launches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.packing.strided_plan import divisor
from halox.packing.traversal_plan import plan
from halox.packing.traversal_tree import common_word, simplified

SMS = 132


def planned(datatype, count=1, word=None, *, sms=SMS, flat_blocks=64, few_units=4096, **options):
    _, tree = simplified(datatype, count, flat_blocks=flat_blocks, few_units=few_units)
    return plan(tree, word or common_word(tree), sms=sms, **options)


def scattered(n, step=9):
    """Return irregular displacements without adjacent elements."""
    rng = np.random.default_rng(n)
    return np.arange(n) * step + rng.integers(0, 4, n)


class TestRecords:
    def test_equal_children_share_a_record(self):
        line, plane = dt.vector(3, 1, 2, "f8"), dt.vector(3, 2, 5, "f8")
        types = [line, plane] * 500
        starts = np.arange(1000) * 400
        made = planned(dt.struct([1] * 1000, starts, types), flat_blocks=0)
        assert len(made.nodes) < 10
        assert len(made.displacements) == 1000

    def test_64_bits_only_where_needed(self):
        assert planned(dt.contiguous(2**31, "f8")).index_bits == 32
        huge = planned(dt.contiguous(2**31, "f8"), word=1)
        assert huge.index_bits == 64
        assert huge.words == 2**34

    def test_strides_wrap_as_addresses_do(self):
        made = planned(dt.hvector(2, 1, -(2**62), dt.contiguous(4, "f8")))
        assert made.nodes["stride"][0] == -(2**62)


@given(st.integers(2, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_32_bit_division(count, w):
    check_division(count, w, 32)


@given(st.integers(2, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_64_bit_division(count, w):
    check_division(count, w, 64)


def check_division(count, w, bits):
    magic, shift = divisor(count, bits)
    assert magic < 2**bits
    assert 0 <= shift < bits
    for word in (w, w - w % count, max(0, w - w % count - 1), 2 ** (bits - 1) - 1):
        found = (word * magic >> bits) >> shift
        assert found == word // count


class TestShapes:
    @pytest.mark.parametrize("max_blocks", [None, 1, 5, 10**6])
    @pytest.mark.parametrize("words", [1, 127, 8192, 131072, 10**6, 10**8, 2**31 - 2**14])
    def test_every_word_has_its_chunk_and_blocks_are_capped(self, words, max_blocks):
        for datatype in (dt.contiguous(words, "i4"), dt.vector(words, 1, 2, "i4")):
            made = planned(datatype, word=4, max_blocks=max_blocks)
            shape = made.shape
            chunks = -(-words // shape.chunk_words)
            assert shape.chunk_words % (shape.threads * shape.in_flight) == 0
            assert 1 <= shape.blocks <= min(chunks, max_blocks or chunks)
            assert made.table(0)["chunks"] == chunks
            assert chunks + shape.blocks < 2**32

    def test_small_launches_have_a_word_a_thread_and_few_blocks(self):
        for n in (1 << 13, 1 << 17):  # 64 KiB, 1 MiB
            made = planned(dt.vector(n, 1, 4, "f8"))
            assert made.shape.in_flight == 1
            assert made.shape.blocks <= 4 * SMS

    def test_short_lists_travel_in_the_launch(self):
        made = planned(dt.indexed_block(1, scattered(100), "f8"), 4)
        assert made.inline
        assert made.copied == made.image.size == 400
        assert made.table(12345)["image"] == 0
        assert made.table(0)["inline"][:400].tobytes() == made.image.tobytes()
        many = planned(dt.indexed_block(1, scattered(100), "f8"), 10**5)
        assert not many.inline, "many blocks would each read it word by word"
        assert many.table(12345)["image"] == 12345

    def test_what_is_searched_is_copied_as_far_as_it_is_short(self):
        def searched(n):
            lengths = np.where(np.arange(n) % 2, 997, 1)
            return planned(dt.indexed(lengths, scattered(n, 2000), "f8"), few_units=0)

        short, middle, long = searched(80), searched(300), searched(5000)
        assert short.copied == short.image.size
        assert middle.copied == middle.table(0)["displacements"] < middle.image.size
        assert long.copied == 0

    def test_what_is_only_gathered_is_not_copied(self):
        made = planned(dt.indexed_block(1, scattered(1000), "f8"), 1000)
        assert made.image.size == 4000
        assert made.copied == 0

    def test_chunks_grow_where_blocks_copy(self):
        lengths = np.where(np.arange(200) % 2, 97, 1)
        datatype = dt.indexed(lengths, scattered(200, 200), "f8")
        made = planned(datatype, 10**4, few_units=0)
        assert made.shape.chunk_words * 8 >= 2 * made.copied
        assert made.shape.blocks >= 8 * SMS
