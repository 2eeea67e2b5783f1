"""The traversal kernels, compiled as C++ and run on the CPU, against NumPy and the host packer."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.packing.host import HostPacker
from halox.packing.traversal_plan import (
    CHAIN_NODES,
    INLINE_BYTES,
    RecordKind,
    Shape,
    node_dtype,
    plan,
    table_dtype,
)
from halox.packing.traversal_tree import simplified
from tests.support import require, trials
from tests.unit.cpu_kernels import FLAGS, GUARD, HERE, SHIM, aligned, before_a_forbidden_page, coded
from tests.unit.cpu_traversal import library, move
from tests.unit.datatype_strategies import build, recipes
from tests.unit.traversal_types import HALF, TYPES, items

require("cxx")

MAP_NORESERVE = 0x4000  # the value on Linux; mmap has the name since Python 3.13
RNG = np.random.default_rng(7)
SMALL = Shape(threads=8, in_flight=4, chunk_words=64, blocks=3)


SOURCE = coded(aligned(2 * HALF + 16))


def host_packed(base, datatype, count):
    expected = np.zeros(datatype.size * count, np.uint8)
    HostPacker(base, datatype, count).pack(expected)
    return expected


def check(datatype, count=1, *, at=0, to=0, **options):
    """Pack, and unpack if no blocks overlap, between addresses of any alignment; returns the plan."""
    base = SOURCE[HALF + at :]
    expected = host_packed(base, datatype, count)
    n = expected.size
    guarded = aligned(n + 64, to)
    guarded[:] = GUARD
    packed = guarded.ctypes.data + 32
    made = move(base.ctypes.data, datatype, count, packed, **options)
    assert guarded[32 : 32 + n].tobytes() == expected.tobytes()
    assert (guarded[:32] == GUARD).all() and (guarded[32 + n :] == GUARD).all()
    if not datatype.overlaps(count):
        target = aligned(SOURCE.size)
        target[:] = GUARD
        wanted = target.copy()
        HostPacker(wanted[HALF + at :], datatype, count).unpack(expected)
        here = target[HALF + at :].ctypes.data
        move(here, datatype, count, packed, unpack=True, **options)
        assert target.tobytes() == wanted.tobytes()
    return made


OFFSETS = st.sampled_from([0, 0, 0, 1, 2, 4, 8, 3, 12])


@settings(max_examples=trials(400))
@given(
    recipe=recipes(),
    count=st.sampled_from([1, 2, 3]),
    at=OFFSETS,
    to=OFFSETS,
    limits=st.sampled_from([(0, 0), (0, 0), (64, 0), (64, 4096)]),
    shape=st.sampled_from([SMALL, SMALL._replace(in_flight=1, chunk_words=8, blocks=5)]),
    bits=st.sampled_from([32, 32, 32, 64]),
    backwards=st.booleans(),
)
def test_random_types(recipe, count, at, to, limits, shape, bits, backwards):
    check(
        build(recipe),
        count,
        at=at,
        to=to,
        flat_blocks=limits[0],
        few_units=limits[1],
        shape=shape,
        index_bits=bits,
        backwards=backwards,
    )


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


@settings(max_examples=trials(200))
@given(branching(), st.sampled_from([1, 3]), OFFSETS, st.booleans())
def test_random_branches(datatype, count, at, backwards):
    check(datatype, count, at=at, shape=SMALL, backwards=backwards)


class TestConstructors:
    @pytest.mark.parametrize("flat_blocks", [0, 64])
    @pytest.mark.parametrize(("name", "count"), items(1, 4))
    def test_packs_and_unpacks(self, name, count, flat_blocks):
        check(TYPES[name], count, flat_blocks=flat_blocks, shape=SMALL)

    @pytest.mark.parametrize("at", [1, 2, 4, 8])
    @pytest.mark.parametrize("to", [0, 1, 2, 4, 8])
    @pytest.mark.parametrize("name", ["vector", "indexed_block", "struct"])
    def test_any_alignment(self, name, at, to):
        check(TYPES[name], 2, at=at, to=to, shape=SMALL)
        check(TYPES[name], 2, at=to, to=at, shape=SMALL)

    @pytest.mark.parametrize("max_blocks", [1, 2, 7, None])
    @pytest.mark.parametrize("name", ["vector", "indexed", "struct of structs"])
    def test_the_shapes_that_are_chosen(self, name, max_blocks):
        for sms in (1, 132):
            check(TYPES[name], 3, sms=sms, max_blocks=max_blocks)

    def test_64_bit_numbers(self):
        for name, count in items(2):
            check(TYPES[name], count, shape=SMALL, index_bits=64)

    def test_every_kind_of_record_and_kernel_has_been_met(self):
        met = [check(one, flat_blocks=0, shape=SMALL) for one in TYPES.values()]
        met = [made for made in met if made is not None]
        met.append(self.far())
        assert {made.entry for made in met} == {"", "_chain", "_regular"}
        assert {made.word_bytes for made in met} == {1, 2, 4, 8, 16}
        assert {kind for made in met for kind in made.nodes["kind"]} == set(RecordKind)

    def far(self):
        datatype = dt.hindexed_block(1, [0, 1 << 50, 8], dt.contiguous(4, "f8"))
        return plan(simplified(datatype, flat_blocks=0)[1], 8, sms=4)

    @pytest.mark.parametrize("flat_blocks", [0, 64])
    def test_absolute_addresses(self, flat_blocks):
        arrays = [coded(np.zeros(40, "f8")) for _ in range(3)]
        for i, array in enumerate(arrays):
            array.view("u1")[:] ^= i
        places = [array.ctypes.data for array in arrays]
        starts = [places[2], places[0] + 80, places[1] + 8]
        expected = [arrays[2][:20:2], arrays[0][10:30:2], arrays[1][1:21:2]]
        evens = dt.vector(10, 1, 2, "f8")
        packed = dt.hindexed_block(1, starts, evens), dt.struct([1, 1, 1], starts, [evens] * 3)
        for datatype in packed:
            out = np.zeros(240, np.uint8)
            move(0, datatype, 1, out.ctypes.data, shape=SMALL, flat_blocks=flat_blocks)
            assert out.tobytes() == np.concatenate(expected).tobytes()

    @pytest.mark.parametrize("gap", [1 << 33, 1 << 36])
    def test_displacements_beyond_32_bits(self, gap):
        """Blocks are far apart in an array; only the pages of the blocks occupy memory."""
        memory = mmap.mmap(-1, gap + 4096, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
        array = np.frombuffer(memory, np.uint8)
        coded(array[:4096])
        array[gap:] = array[4095::-1]
        datatype = dt.hindexed_block(8, [0, 256, gap + 16, 512], "u1")
        expected = np.concatenate([array[start : start + 8] for start in (0, 256, gap + 16, 512)])
        out = np.zeros(32, np.uint8)
        made = move(array.ctypes.data, datatype, 1, out.ctypes.data, shape=SMALL)
        assert out.tobytes() == expected.tobytes()
        assert made.nodes["kind"][0] == (
            RecordKind.GATHER if gap < 1 << 34 else RecordKind.FAR_GATHER
        )


class TestLists:
    @pytest.mark.parametrize("n", [20, 80, 300, 3000])
    @pytest.mark.parametrize("searched", [False, True])
    def test_wherever_they_lie(self, n, searched):
        """Lists in the launch's parameters, in shared memory, or in device memory."""
        starts = np.arange(n) * 20 + RNG.integers(0, 3, n)
        lengths = np.where(np.arange(n) % 3, 17, 1) if searched else np.full(n, 5)
        check(dt.hindexed(lengths, starts, "u1"), shape=SMALL)

    def test_a_few_long_runs_among_many_short_ones(self):
        """In the table that guides the search, most buckets hold one entry, the last one hundreds."""
        lengths = [9001, *[1] * 500, 7, 9000]
        starts = np.cumsum([0, *np.array(lengths[:-1]) + 3])
        check(dt.hindexed(lengths, starts, "u1"), shape=SMALL)

    def test_few_records_and_many_children(self):
        """Records are in shared memory; the lists do not fit there."""
        types = [dt.vector(2, 1, 2, "u1"), dt.vector(3, 1, 2, "u1")] * 700
        datatype = dt.struct([1] * 1400, RNG.permutation(1400) * 7, types)
        made = check(datatype, shape=SMALL)
        assert 0 < made.copied == made.table(0)["numbers"] < 500

    @pytest.mark.parametrize("n", [10, 100, 800])
    def test_branches_of_many_kinds(self, n):
        """Records that do not fit in shared memory are read from device memory."""
        types = [dt.vector(2, 1, 2 + i, "u1") for i in range(n)]
        starts = np.cumsum([0, *(one.extent + 1 for one in types[:-1])])
        scaled = starts % 50000
        check(dt.struct([1] * n, scaled, types), shape=SMALL)


class TestNothingElse:
    @pytest.mark.parametrize("nbytes", [8, 24, 1000, 1032, 4104])
    def test_not_a_byte_past_the_end_is_touched(self, nbytes):
        """Even a read beyond the end would kill the process, as it may on a GPU."""
        source, target = coded(before_a_forbidden_page(nbytes)), before_a_forbidden_page(nbytes)
        lengths = np.diff([0, *sorted({nbytes // 3, nbytes // 2, nbytes})])
        starts = np.cumsum(lengths) - lengths
        datatype = dt.hindexed(lengths[::-1], starts[::-1], "u1")
        assert datatype.size == datatype.true_ub == nbytes
        expected = host_packed(source, datatype, 1)
        for shape in (None, SMALL):
            target[:] = GUARD
            move(source.ctypes.data, datatype, 1, target.ctypes.data, shape=shape)
            assert target.tobytes() == expected.tobytes()

    def test_numpy_agrees(self):
        field = coded(np.zeros((9, 10, 11), "f8"))
        out = np.zeros(5 * 6 * 3, "f8")
        box = dt.subarray(field.shape, (5, 6, 3), (2, 3, 7), "f8")
        move(field.ctypes.data, box, 1, out.ctypes.data)
        assert out.tobytes() == field[2:7, 3:9, 7:10].tobytes()
        chosen = RNG.permutation(990)[:200]
        out = np.zeros((4, 200))
        flat = coded(np.zeros((4, 990)))
        listed = dt.resized(dt.indexed_block(1, chosen, "f8"), 0, 990 * 8)
        move(flat.ctypes.data, listed, 4, out.ctypes.data, shape=SMALL)
        assert out.tobytes() == flat[:, chosen].tobytes()


def test_the_tables_layout_is_the_kernels():
    """Struct sizes and offsets agree between g++ and the tables' NumPy dtypes."""
    names = {
        "Node": [name for name in node_dtype(32).names if name != "unused"],
        "Table": list(table_dtype(32, inline=False).names),
        "ListedTable": ["table", "lists"],
    }
    numbers = ", ".join(
        f"sizeof({struct}), " + ", ".join(f"__builtin_offsetof({struct}, {m})" for m in members)
        for struct, members in names.items()
    )
    constants = f"CHAIN_NODES, INLINE_BYTES, {', '.join(kind.name for kind in RecordKind)}"
    extra = f'extern "C" {{{{ unsigned long layout[] = {{{{{numbers}, {constants}}}}}; }}}}'
    for bits in (32, 64):
        small, large = (table_dtype(bits, inline=inline) for inline in (False, True))
        node = node_dtype(bits)
        expected = [
            node.itemsize,
            *(node.fields[name][1] for name in names["Node"]),
            small.itemsize,
            *(small.fields[name][1] for name in names["Table"]),
            *(large.itemsize, 0, large.fields["inline"][1]),
            *(CHAIN_NODES, INLINE_BYTES, *RecordKind),
        ]
        found = (ctypes.c_ulong * len(expected)).in_dll(
            library((("INDEX_BITS", str(bits)),), extra.format()), "layout"
        )
        assert list(found) == expected


def test_a_barrier_that_some_threads_miss_is_noticed(tmp_path):
    """A kernel that would deadlock on a GPU must fail on the CPU, too."""
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
    assert result.returncode != 0
    assert "wait at a barrier" in result.stderr


def test_every_variant_compiles_for_real():
    require("nvrtc")
    from tests.unit.test_kernels_nvrtc import compiled

    for word, bits, threads, in_flight in [(16, 32, 512, 4), (8, 32, 128, 8), (1, 64, 256, 4)]:
        values = {
            "WORD_BYTES": word,
            "INDEX_BITS": bits,
            "THREADS": threads,
            "IN_FLIGHT": in_flight,
        }
        ptx = compiled("traversal", tuple((k, str(v)) for k, v in values.items()), "compute_90").ptx
        assert ".local" not in ptx
        assert not re.search(r"\b(div|rem)\.", ptx)
        assert f"mul.hi.u{bits}" in ptx
        for way in ("pack", "unpack"):
            for entry in ("_regular", "_chain", ""):
                assert f".entry traversal_{way}{entry}(" in ptx
