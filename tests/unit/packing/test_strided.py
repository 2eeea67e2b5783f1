"""The strided kernels, compiled as C++ and run on the CPU: tables, marks, runs, folds and additions, against NumPy.

The suite compares packing and unpacking of one datatype.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halox
from halox import datatypes as dt
from halox.datatypes import StridedBlocks
from halox.packing.ordering import rounds
from halox.packing.refine import Copy, Side, contiguous_side, paired
from halox.packing.strided import _ELEMENTS, addition_element
from halox.packing.strided_plan import LEVEL, MAX_LEVELS, plan, region_dtype
from halox.plans.halo import halo_draft
from halox.runtime.arrays import describe
from halox.runtime.gpu.marks import Mark
from tests.fakes.cpu_kernels import GUARD, aligned, coded, compiled, run
from tests.strategies import folds
from tests.support import require, trials

require("cxx")

SMS = 4


def copy_on_cpu(copies, *, backwards=False, **options):
    run("strided_copy", plan(copies, sms=SMS, **options), backwards=backwards)


def add_on_cpu(planned, element):
    run("strided_add", planned, (("ELEMENT", element),))


def field(shape, dtype, offset=0):
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    return aligned(nbytes, offset).view(dtype).reshape(shape)


def pack(array, datatype, count=1, offset=0, **options):
    """Pack with the kernel to a buffer between guards and check the guards."""
    nbytes = count * datatype.size
    guarded = aligned(nbytes + 64, offset)
    guarded[:] = GUARD
    at = guarded.ctypes.data + 32
    copy_on_cpu(
        [Copy(side, packed) for side, packed in paired(array.ctypes.data, datatype, count, at)],
        **options,
    )
    assert (guarded[:32] == GUARD).all() and (guarded[32 + nbytes :] == GUARD).all()
    return guarded[32 : 32 + nbytes]


class TestCopy:
    def test_addresses_are_relative_to_those_of_the_launch(self):
        """The bases are far from the arrays; one base is above, so that an offset is negative."""
        array = coded(field((5, 6, 7), "f8"))
        packed = aligned(4 * 5 * 8 + 64)
        packed[:] = GUARD
        face = dt.subarray((5, 6, 7), (4, 5, 1), (1, 1, 6), "f8")
        origin = 1 << 40
        sides = Side(-origin, face.strided, 1), contiguous_side(origin, face.size)
        copies = [Copy(sides[0], sides[1]._replace(array=3))]
        shifts = [7, array.ctypes.data + origin, 7, packed.ctypes.data + 32 - origin]
        run("strided_copy", plan(copies, sms=SMS, max_word=8), shifts=shifts)
        assert packed[32:-32].tobytes() == array[1:, 1:, 6].tobytes()
        assert (packed[:32] == GUARD).all() and (packed[-32:] == GUARD).all()

    @pytest.mark.parametrize("is_end", [False, True])
    def test_leaves_a_mark(self, is_end):
        """With MARKED, one block of the launch writes the mark; the copy stays the same."""
        array = coded(field((40, 6, 7), "f8"))
        packed = field((38, 5), "f8")
        face = dt.subarray((40, 6, 7), (38, 5, 1), (1, 1, 6), "f8")
        sides = (
            Side(array.ctypes.data, face.strided),
            contiguous_side(packed.ctypes.data, face.size),
        )
        planned = plan([Copy(*sides)], sms=SMS, max_blocks=3, max_word=8)
        words = np.array([7] * 8, "u4")
        run("strided_copy", planned, mark=Mark(words[2:].ctypes.data, is_end))
        assert words.tolist() == [7, 7, *([0, 1] if is_end else [1, 7]), 7, 7, 7, 7]
        assert packed.tobytes() == array[1:39, 1:, 6].tobytes()

    @pytest.mark.parametrize("messages", [1, 3, 700])
    def test_checks_the_names_of_messages(self, messages):
        """An end mark reports a message with another name: that name and the message's number, counted from 1.

        There are up to 700 messages, more than the threads of a block.
        """
        array, packed = coded(field((40,), "f8")), field((40,), "f8")
        both = (contiguous_side(x.ctypes.data, 320) for x in (array, packed))
        planned = plan([Copy(*both)], sms=SMS)
        names = np.full(2 * messages, 5, "u4")
        names[1::2] = 9  # the kernel must ignore the word after a name
        places = names.ctypes.data + 8 * np.arange(messages, dtype="u8")
        words = np.zeros(4, "u4")
        mark = Mark(words.ctypes.data, True, places.ctypes.data, messages, 5)
        run("strided_copy", planned, mark=mark)
        assert words.tolist() == [0, 1, 0, 0] and packed.tobytes() == array.tobytes()
        for wrong in {0, messages // 2, messages - 1}:
            words[:], names[::2] = 0, 5
            names[2 * wrong] = 6
            run("strided_copy", planned, mark=mark)
            assert words.tolist() == [0, 1, 6, wrong + 1]

    @pytest.mark.parametrize("max_blocks", [2, None])
    @pytest.mark.parametrize("run", [31, 64, 1025, 3001])
    @pytest.mark.parametrize(("rows", "gap"), [((1,), 0), ((7,), 1), ((2, 2, 3), 5)])
    def test_runs_of_no_alignment(self, run, rows, gap, max_blocks):
        """Rows of bytes at odd distances, and whole words in the same launch."""
        strides = [(run + gap) * prod(rows[i + 1 :]) + i for i in range(len(rows))]
        blocks = StridedBlocks.canonical(3, rows, strides, run)
        span = int(bytes_of(blocks).max()) + 1
        array = coded(aligned(span, 1))
        wide, wide_copy = coded(field((50,), "f8")), field((50,), "f8")
        target = aligned(blocks.nbytes + 64, 6)
        target[:] = GUARD
        at = target.ctypes.data + 32
        copy_on_cpu(
            [
                Copy(Side(array.ctypes.data, blocks), contiguous_side(at, blocks.nbytes)),
                Copy(*(contiguous_side(x.ctypes.data, 400) for x in (wide, wide_copy))),
            ],
            max_blocks=max_blocks,
        )
        assert target[32:-32].tobytes() == array[bytes_of(blocks)].tobytes()
        assert (target[:32] == GUARD).all() and (target[-32:] == GUARD).all()
        assert wide.tobytes() == wide_copy.tobytes()
        back = aligned(span, 1)
        back[:] = GUARD
        expected = back.copy()
        expected[bytes_of(blocks)] = array[bytes_of(blocks)]
        copy_on_cpu([Copy(contiguous_side(at, blocks.nbytes), Side(back.ctypes.data, blocks))])
        assert back.tobytes() == expected.tobytes()

    @pytest.mark.parametrize("n_regions", [1, 6, 7, 31, 32, 200])
    @pytest.mark.parametrize("max_blocks", [3, None])
    @pytest.mark.part(2)
    def test_tables_of_every_size(self, n_regions, max_blocks):
        """Small tables are launch parameters, larger ones are in memory."""
        source, target = coded(field((n_regions, 40), "f8")), field((n_regions, 40), "f8")
        sizes = np.random.default_rng(n_regions).integers(1, 41, n_regions)
        expected = target.copy()
        copies = []
        for i, size in enumerate(sizes.tolist()):
            expected[i, :size] = source[i, :size]
            places = (x.ctypes.data + i * 320 for x in (source, target))
            copies.append(Copy(*(contiguous_side(place, size * 8) for place in places)))
        copy_on_cpu(copies, max_blocks=max_blocks)
        assert target.tobytes() == expected.tobytes()

    @settings(max_examples=trials(24), derandomize=True, print_blob=True)
    @given(st.none() | folds(1), st.booleans())
    def test_halos_across_connections(self, case, backwards):
        """Boxes walked backwards, and boxes of a cube's faces with swapped axes; MPI packs what is sent alike."""
        require("mpi")
        from mpi4py import MPI

        from halox.cubed_sphere import CubedSphere

        rng = np.random.default_rng(20261126)
        cube = CubedSphere(4, 2, comm=MPI.COMM_SELF, device="cpu")
        with cube, case.grid(MPI.COMM_SELF) if case else nullcontext(cube) as grid:
            array = case.make(grid)[0] if case else grid.zeros("f4", components=2, sign="vector")
            bytes_of_array = array.view("u1")
            bytes_of_array[...] = rng.integers(0, 255, bytes_of_array.shape)
            on_gpu = replace(describe(array), device=0)  # where all boxes move at once
            read = [(on_gpu, grid.layout(array))]
            draft = halo_draft((array,), read, operation="copy", corners=True)
            moved, expected = array.copy(), array.copy()
            copies = []
            for send, receive in zip(draft.sends, draft.receives, strict=True):
                for sent, received in zip(send.parts, receive.parts, strict=True):
                    packed = np.zeros(sent.datatype.size, np.uint8)
                    theirs = sent.datatype.to_mpi()
                    MPI.COMM_SELF.Sendrecv([expected, 1, theirs], 0, recvbuf=packed)
                    theirs.Free()
                    assert pack(expected, sent.datatype).tobytes() == packed.tobytes()
                    halox.unpack(packed, received.datatype, expected)
                    sides = (
                        Side(moved.ctypes.data, one.datatype.strided) for one in (sent, received)
                    )
                    copies.append(Copy(*sides))
            copy_on_cpu(copies, backwards=backwards)
            assert moved.tobytes() == expected.tobytes()
            assert copies or not any(map(any, grid.halo))

    @pytest.mark.parametrize("dtype", ["f8", "u1"])
    @pytest.mark.parametrize("steps", [(1, -1), (-1, 1), (-1, -1)])
    @pytest.mark.part(2)
    def test_large_boxes_backwards_and_with_swapped_axes(self, steps, dtype):
        """Boxes that the kernel moves in tiles, as between the faces of a large cube."""
        array = coded(field((20, 130, 140), dtype))
        axes = [(20, array.strides[0], 0, 20)]
        for n, stride, step in zip((140, 130), array.strides[:0:-1], steps, strict=True):
            axes += [(n, stride, n - 1, 1), (n, -stride, 0, n)] if step < 0 else [(n, stride, 0, n)]
        expected = array.transpose(0, 2, 1)[:, :: steps[0], :: steps[1]]
        assert pack(array, dt.slab(*zip(*axes, strict=True), dtype)).tobytes() == expected.tobytes()


@st.composite
def layouts(draw, nbytes_factors):
    """Draw disjoint strided blocks of a given size; the stride of each level exceeds the span of the inner levels."""
    factors = draw(st.permutations(nbytes_factors))
    cuts = sorted(draw(st.lists(st.integers(0, len(factors)), max_size=3)))
    groups = [factors[a:b] for a, b in zip([0, *cuts], [*cuts, len(factors)], strict=True)]
    *outer, block = [prod(group) for group in groups]
    span, strides = block, []
    for count in reversed(outer):
        step = span + draw(st.sampled_from([0, 0, 1, 2, 4, 8, 5]))
        strides.insert(0, step)
        span = step * count
    return StridedBlocks.canonical(0, outer, strides, block), span


@settings(max_examples=trials(300))
@given(st.data())
def test_any_two_layouts_of_equal_size(data):
    """Copy between any strided layouts; the oracle enumerates all bytes."""
    factors = data.draw(st.lists(st.sampled_from([2, 2, 2, 3, 4, 5, 7, 8]), max_size=5))
    (a, a_span), (b, b_span) = data.draw(layouts(factors)), data.draw(layouts(factors))
    source = coded(aligned(a_span, data.draw(st.sampled_from([0, 1, 2, 4, 8]))))
    target = aligned(b_span, data.draw(st.sampled_from([0, 1, 2, 4, 8])))
    target[:] = GUARD
    expected = target.copy()
    expected[bytes_of(b)] = source[bytes_of(a)]
    copy_on_cpu(
        [Copy(Side(source.ctypes.data, a), Side(target.ctypes.data, b))],
        max_words=data.draw(st.sampled_from([1, 7, 2**31 - 4096])),
        backwards=data.draw(st.booleans()),
    )
    assert target.tobytes() == expected.tobytes()


def bytes_of(blocks: StridedBlocks) -> np.ndarray:
    """Return the offsets of all bytes in packed order."""
    offsets = np.array([blocks.offset])
    for count, stride in zip(blocks.counts, blocks.strides, strict=True):
        offsets = (offsets[:, None] + np.arange(count) * stride).ravel()
    return (offsets[:, None] + np.arange(blocks.block_bytes)).ravel()


class TestAdd:
    @pytest.mark.parametrize("dtype", list(_ELEMENTS))
    @pytest.mark.parametrize("start", [0, 1])
    @pytest.mark.part(2)
    def test_adds_as_numpy_does(self, dtype, start):
        rng = np.random.default_rng(5)
        source, target = field((6, 7, 8), dtype), field((6, 7, 8), dtype)
        for array in (source, target):
            values = rng.integers(0, 2000, array.shape).astype(dtype)
            array[:] = values / np.array(3, "f4").astype(dtype)
        expected = target.copy()
        box = (slice(1, 5), slice(2, 7), slice(start, start + 4))
        expected[box] += source[box]
        assert (expected != target).any()
        datatype = dt.subarray((6, 7, 8), (4, 5, 4), (1, 2, start), dtype)
        self.add(source, target, datatype)
        assert target.tobytes() == expected.tobytes()

    @pytest.mark.parametrize("dtype", ["i1", "u1", "f2", "i2"])
    @pytest.mark.parametrize("columns", [33, 1100])
    def test_long_blocks_between_odd_addresses(self, dtype, columns):
        """A copy moves misaligned blocks as runs of bytes; an addition needs whole words."""
        rng = np.random.default_rng(columns)
        shape = (3, columns + 2)
        source, target = (field(shape, dtype, start) for start in (2, 0))
        for array in (source, target):
            array[:] = rng.integers(0, 60, shape).astype(dtype)
        expected = target.copy()
        expected[:, 1:-1] += source[:, 1:-1]
        self.add(source, target, dt.subarray(shape, (3, columns), (0, 1), dtype))
        assert target.tobytes() == expected.tobytes()

    def add(self, source, target, datatype):
        a, b = (Side(x.ctypes.data, datatype.strided) for x in (source, target))
        element, nbytes = addition_element(target.dtype)
        for together in rounds([Copy(a, b)]):
            add_on_cpu(plan(together, sms=SMS, element_bytes=nbytes), element)

    def test_half_precision_is_ieee(self):
        """Every exponent, subnormals, overflow to infinity, not-a-number."""
        rng = np.random.default_rng(6)
        source, target = (
            rng.integers(0, 2**16, 4096, dtype=np.uint16).view("f2") for _ in range(2)
        )
        with np.errstate(all="ignore"):
            expected = target + source
        self.add(source, target, dt.contiguous(4096, "f2"))
        assert np.isinf(expected).any() and np.isnan(expected).any()
        np.testing.assert_array_equal(target, expected)

    def test_overlapping_targets_add_in_the_order_given(self):
        """The float32 sum of 1e8, 1 and -1e8 depends on the order."""
        target = np.ones(8, "f4")
        sources = [np.full(5, v, "f4") for v in (1e8, -1e8, 3.0)]
        copies, expected = [], target.copy()
        for first, source in zip((0, 2, 3), sources, strict=True):
            expected[first : first + 5] += source
            copies.append(
                Copy(
                    contiguous_side(source.ctypes.data, 20),
                    contiguous_side(target.ctypes.data + 4 * first, 20),
                )
            )
        dealt = rounds(copies)
        for together in dealt:
            add_on_cpu(plan(together, sms=SMS, element_bytes=4), "float")
        assert len(dealt) == 3
        assert target.tobytes() == expected.tobytes()


def test_the_tables_layout_is_the_kernels():
    """Struct sizes and offsets agree between g++ and the table's NumPy dtype."""
    members = {
        "Region": ("source", "target", "words", "first_chunk", "word_bytes", "run_bytes", "level"),
        "Level": ("source_stride", "target_stride", "count", "magic", "shift", "extent"),
    }
    numbers = ", ".join(
        f"sizeof({struct}), " + ", ".join(f"__builtin_offsetof({struct}, {m})" for m in names)
        for struct, names in members.items()
    )
    extra = f'extern "C" {{ unsigned long layout[] = {{{numbers}, MAX_LEVELS}}; }}'
    library = compiled("strided_copy", (), extra)
    dtypes = {"Region": region_dtype(MAX_LEVELS), "Level": LEVEL}
    expected = [
        number
        for struct, names in members.items()
        for number in (dtypes[struct].itemsize, *(dtypes[struct].fields[m][1] for m in names))
    ]
    found = (ctypes.c_ulong * (len(expected) + 1)).in_dll(library, "layout")
    assert list(found) == [*expected, MAX_LEVELS]
