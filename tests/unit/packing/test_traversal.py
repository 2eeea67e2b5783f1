"""The traversal packer's algorithm: trees, words, prefix sums and records; the suite compares the bytes."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.errors import DatatypeError
from halox.packing.strided_plan import divisor
from halox.packing.traversal import TraversalPacker
from halox.packing.traversal_plan import plan
from halox.packing.traversal_tree import (
    Branch,
    Gather,
    Regular,
    Repeat,
    Search,
    common_word,
    nesting,
    simplified,
)
from tests.fakes.cpu_kernels import FLAGS, HERE, SHIM
from tests.packers import HALF, TYPES, check
from tests.support import require, trials
from tests.unit.packing.cpu_backend import cpu_backend

LIST = dt.indexed([1, 2], [0, 3], "f8")


@pytest.fixture(scope="module")
def backend():
    with cpu_backend("traversal", tree=True) as made:
        yield made


@st.composite
def branching(draw):
    """Draw structs of structs and lists, which are rare among random types."""
    types = [
        dt.primitive("i4"),
        dt.vector(3, 2, 5, "i2"),
        dt.indexed([2, 1, 5], [0, 9, 3], "i4"),
    ]
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.lists(st.sampled_from(range(len(types))), min_size=2, max_size=5))
        olds = [types[i] for i in chosen]
        gaps = draw(st.lists(st.sampled_from([0, 4, 20]), min_size=len(olds), max_size=len(olds)))
        starts = np.cumsum([3 * old.extent + gap for old, gap in zip(olds, gaps, strict=True)])
        lengths = [draw(st.integers(0, 3)) for _ in olds]
        made = dt.struct(lengths, starts - starts[0], olds)
        types += [made, dt.vector(2, 1, 2, made)]
    small = [one for one in types if one.size and abs(one.ub) + abs(one.lb) < HALF // 4]
    return small[-1 - draw(st.integers(0, min(2, len(small) - 1)))]


@settings(max_examples=trials(200), deadline=None)
@given(branching(), st.sampled_from([1, 3]), st.sampled_from([0, 1, 2, 4, 8, 12]), st.booleans())
def test_random_branches(backend, datatype, count, at, backwards):
    backend.backwards = backwards
    check(backend, datatype, count, at=at)


@pytest.mark.parametrize("name", ["rows", "indexed", "struct of structs", "many branches"])
def test_64_bit_numbers(name):
    with cpu_backend("traversal", tree=True, index_bits=64) as made:
        check(made, TYPES[name])


class TestTree:
    @pytest.mark.parametrize(
        "datatype",
        [
            dt.vector(5, 3, 7, "f4"),
            dt.subarray((9, 8, 7), (3, 4, 5), (1, 2, 1), "f8", order="F"),
            dt.indexed_block(2, np.arange(100) * 5, "f8"),
            dt.struct([1, 2], [0, 8], ["f8", "i4"]),
            dt.resized(dt.dup(dt.hvector(4, 1, -12, "i2")), 8, 100),
        ],
    )
    def test_regular_types_are_one_leaf(self, datatype):
        offset, tree = simplified(datatype)
        assert isinstance(tree, Regular) and offset == datatype.strided.offset

    def test_lists_of_one_length_need_no_search(self):
        chosen = np.random.default_rng(1).permutation(1180)[:1024]
        offset, tree = simplified(dt.indexed_block(1, chosen, "f8"), 50)
        assert isinstance(tree, Repeat) and isinstance(tree.child, Gather)
        assert (offset + tree.child.displacements).tolist() == (chosen * 8).tolist()

    @pytest.mark.parametrize("few_units", [0, 4096])
    def test_prefix_sums_are_the_ends_of_blocks(self, few_units):
        """Long runs stay one entry each."""
        lengths = [1000003, 17, 999983, 5]
        datatype = dt.hindexed(lengths, [0, 2000000, 3000000, 9000000], "u1")
        _, tree = simplified(datatype, few_units=few_units)
        assert isinstance(tree, Search)
        assert tree.ends.tolist() == np.cumsum(lengths).tolist()

    def test_repetition_does_not_expand_lists(self):
        irregular = dt.indexed([1, 2, 1], [0, 5, 3], "f8")
        datatype = dt.struct([10**9, 10**8], [0, 10**12], [irregular, dt.vector(3, 1, 2, "f4")])
        _, tree = simplified(dt.contiguous(10**3, datatype), 7)
        assert tree.size == 7000 * datatype.size
        run = dt.indexed_block(1, [0, 1, 2], "f8")  # contiguous in disguise
        offset, tree = simplified(dt.struct([10**9] * 2, [0, 10**11], [run, "i4"]), few_units=0)
        assert isinstance(tree, Search)
        assert (offset, tree.ends.tolist()) == (0, [24 * 10**9, 28 * 10**9])

    def test_shared_subtrees_are_simplified_once(self):
        datatype = LIST
        for level in range(30):
            datatype = dt.struct([1, 2], [0, 100 * 3**level], [datatype, datatype])
        _, tree = simplified(datatype)
        assert tree.size == 24 * 3**30

    def test_small_irregular_types_may_become_one_list(self):
        inner = dt.struct([1, 1, 3], [0, 16, 32], ["f8", "i4", dt.vector(2, 1, 2, "i4")])
        datatype = dt.struct([1, 1], [0, 200], [inner, LIST])
        assert not isinstance(simplified(datatype)[1], Branch)
        assert isinstance(simplified(datatype, flat_blocks=0)[1], Branch)

    @pytest.mark.parametrize(
        ("datatype", "count"),
        [
            (dt.contiguous(0, "f8"), 3),
            (dt.struct([], [], []), 3),
            (dt.indexed([0, 0], [1, 2], "f8"), 3),
            (dt.primitive("f8"), 0),
        ],
    )
    def test_no_bytes(self, datatype, count):
        assert simplified(datatype, count) is None

    @pytest.mark.parametrize(
        ("datatype", "word"),
        [
            (dt.contiguous(32, "f8"), 16),
            (dt.vector(3, 1, 2, "f8"), 8),
            (dt.vector(3, 2, 4, "f8"), 16),
            (dt.hvector(3, 1, 12, "f8"), 4),
            (dt.hvector(3, 1, -6, "i2"), 2),
            (dt.hindexed([16, 32], [0, 33], "u1"), 1),
            (dt.hindexed([16, 34], [0, 64], "u1"), 2),
            (dt.struct([1, 1], [0, 40], [dt.indexed([1, 3], [0, 5], "f8"), "i4"]), 4),
        ],
        ids=str,
    )
    def test_the_word_divides_everything(self, datatype, word):
        assert common_word(simplified(datatype)[1]) == word

    def test_a_limit_on_nested_irregular_constructors(self):
        assert nesting(dt.contiguous(9, dt.vector(2, 1, 2, "f8"))) == 0
        datatype = LIST
        for _ in range(70):
            datatype = dt.resized(dt.struct([1, 1], [0, 200], [datatype, "i4"]), 0, 400)
        assert "nested" in str(TraversalPacker.why_not(datatype, 1))
        with pytest.raises(DatatypeError):
            TraversalPacker(datatype, 1, 0)


class TestRecords:
    def planned(self, datatype, count=1, word=None, **options):
        _, tree = simplified(datatype, count, flat_blocks=0)
        return plan(tree, word or common_word(tree), sms=132, **options)

    def test_equal_children_share_a_record(self):
        types = [dt.vector(3, 1, 2, "f8"), dt.vector(3, 2, 5, "f8")] * 500
        made = self.planned(dt.struct([1] * 1000, np.arange(1000) * 400, types))
        assert len(made.nodes) < 10

    def test_64_bits_only_where_needed(self):
        assert self.planned(dt.contiguous(2**31, "f8")).index_bits == 32
        huge = self.planned(dt.contiguous(2**31, "f8"), word=1)
        assert (huge.index_bits, huge.words) == (64, 2**34)

    @pytest.mark.parametrize("max_blocks", [None, 1, 5, 10**6])
    @pytest.mark.parametrize("words", [1, 127, 8192, 10**6, 10**8, 2**31 - 2**14])
    def test_every_word_has_its_chunk_and_blocks_are_capped(self, words, max_blocks):
        for datatype in (dt.contiguous(words, "i4"), dt.vector(words, 1, 2, "i4")):
            made = self.planned(datatype, word=4, max_blocks=max_blocks)
            shape, chunks = made.shape, -(-words // made.shape.chunk_words)
            assert shape.chunk_words % (shape.threads * shape.in_flight) == 0
            assert 1 <= shape.blocks <= min(chunks, max_blocks or chunks)
            assert made.table(0)["chunks"] == chunks and chunks + shape.blocks < 2**32


@given(st.sampled_from([32, 64]), st.data())
@example(32, None)
@example(64, None)
@settings(max_examples=trials(400))
def test_division_by_multiplying(bits, data):
    top = 2 ** (bits - 1) - 1
    pairs = [(2, top), (top, top), (3, top), (2 ** (bits - 2) + 1, top)]
    if data is not None:
        pairs = [(data.draw(st.integers(2, top)), data.draw(st.integers(0, top)))]
    for count, w in pairs:
        magic, shift = divisor(count, bits)
        assert 0 < magic < 2**bits and 0 <= shift < bits
        for word in (w, w - w % count, max(0, w - w % count - 1), top):
            assert (word * magic >> bits) >> shift == word // count


def test_a_barrier_that_some_threads_miss_is_noticed(tmp_path):
    """A kernel that would deadlock on a GPU must fail on the CPU, too."""
    require("cxx")
    text = f"""#include "{SHIM}"
static void kernel() {{ if (threadIdx.x != 3) __syncthreads(); }}
int main() {{ char shared[1]; launch_with_barriers(1, 8, false, shared, 1, kernel); }}
"""
    (tmp_path / "kernel.cpp").write_text(text)
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    program = tmp_path / "kernel"
    command = ["g++", f"-I{HERE}", *flags, str(tmp_path / "kernel.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    result = subprocess.run([program], capture_output=True, text=True, timeout=500)
    assert result.returncode != 0 and "wait at a barrier" in result.stderr
