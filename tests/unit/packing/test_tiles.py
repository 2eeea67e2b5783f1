"""Copies in tiles that permute axes: the plan, and the kernel on the CPU against NumPy's transposes."""

from __future__ import annotations

from itertools import permutations
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.datatypes import slab
from halox.packing import tiles
from halox.packing.refine import Copy, Level, Side
from halox.packing.strided_plan import plan
from halox.packing.tiles import MEMORY_BYTES, tiled
from tests.fakes.cpu_kernels import aligned, run
from tests.support import trials

SMS = 2
DTYPES = ("u1", "u2", "f4", "f8", "c16", "S3", "S12", "S20", "S24", "S32", "S64")
PERMUTATIONS = [order for n in (2, 3, 4) for order in permutations(range(n))]


@pytest.fixture(autouse=True)
def small_copies_are_tiled(monkeypatch):
    monkeypatch.setattr(tiles, "LEAST_BYTES", 1)


def memory_of(shape, dtype, order, padding, offset=0):
    """Return memory of random bytes, and an array of a shape in it with a given order of axes and padding."""
    dtype = np.dtype(dtype)
    padded = [shape[axis] + padding for axis in order]
    memory = aligned(prod(padded) * dtype.itemsize, offset)
    memory[:] = np.random.default_rng(prod(padded)).integers(0, 256, memory.size, dtype=np.uint8)
    view = memory.view(dtype).reshape(padded).transpose(np.argsort(order))
    return memory, view[tuple(slice(padding // 2, padding // 2 + n) for n in shape)]


def side_of(view):
    datatype = slab(view.shape, view.strides, [0] * view.ndim, view.shape, view.dtype)
    return Side(view.__array_interface__["data"][0], datatype.strided)


def copied(source, target, **options):
    """Copy between two views with the kernel, and compare the target's whole memory with NumPy's copy."""
    memory, into = target
    expected = memory.copy()
    np.copyto(
        np.ndarray(into.shape, into.dtype, expected.data, offset_of(memory, into), into.strides),
        source,
    )
    planned = plan([Copy(side_of(source), side_of(into))], sms=SMS, tiles=True, **options)
    run("strided_copy", planned)
    assert memory.tobytes() == expected.tobytes()
    return planned


def offset_of(memory, view):
    return view.__array_interface__["data"][0] - memory.ctypes.data


class TestShape:
    @pytest.mark.parametrize(("n", "side"), [(400, 4), (402, 2), (401, 1)])
    def test_squares_need_extents_and_strides_that_they_divide(self, n, side):
        _, tile = tiled([Level(n, 4, 1600), Level(400, 4 * n, 4)], 4, 16)
        assert tile.side == side
        _, tile = tiled([Level(400, 4, 4 * n), Level(n, 1600, 4)], 4, 16)
        assert tile.side == side
        _, tile = tiled([Level(9, 4 * n, 1 << 20), Level(400, 4, 1600), Level(400, 1600, 4)], 4, 16)
        assert tile.side == side

    @pytest.mark.parametrize(
        "levels",
        [
            [Level(100, 800, 800), Level(100, 8, 8)],
            [Level(100, 800, 1600), Level(50, 16, 16)],
            [Level(3, 8, 8000), Level(1000, 24, 8)],  # few streams
            [Level(1000, 4096, 8)],  # a column
            [Level(100, 80000, 800), Level(100, 800, 8)],  # a face: all elements are far apart
            [Level(100, 128, 12800), Level(100, 12800, 128), Level(16, 8, 8)],  # large elements
            [Level(100, 48, 4800), Level(100, 4800, 48), Level(6, 8, 8)],
        ],
    )
    def test_what_does_not_permute_is_left(self, levels):
        assert tiled(levels, 8, 16) is None

    @settings(max_examples=trials(800))
    @given(
        st.integers(4, 5000),
        st.integers(4, 5000),
        st.integers(1, 64),
        st.sampled_from([1, 2, 4, 8, 16]),
        st.sampled_from([1, 2, 4, 8, 16]),
    )
    def test_every_tile_fits_in_memory(self, a, b, words, word, alignment):
        element = words * word
        inner = [Level(words, word, word)] if words > 1 else []
        far = 1 << 20
        found = tiled(
            [Level(a, element, far), Level(b, far + 64, element), *inner], word, alignment
        )
        if element > tiles.MOST_ELEMENT_BYTES or (element > 32 and words & (words - 1)):
            assert found is None
            return
        _, tile = found
        # The distance of two rows in shared memory, as in the kernel.
        row = -(-tile.along_source * element // 4) if word < 4 else tile.along_source
        pitch = (row | 1) * (4 if word < 4 else element)
        assert pitch * tile.along_target <= MEMORY_BYTES
        assert pitch >= tile.along_source * element
        assert max(tile.along_source, tile.along_target) <= tiles.MOST_ROW_ELEMENTS
        assert tile.along_source % tile.side == tile.along_target % tile.side == 0
        form = tile.form
        assert (form & 511, form >> 9 & 511, (form >> 18 & 63) + 1, 1 << (form >> 30)) == tile


class TestKernel:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(70, 131), (72, 140), (129, 4), (5, 300), (9, 40)])
    @pytest.mark.part(3)
    def test_matrices(self, shape, dtype):
        _, source = memory_of(shape, dtype, (0, 1), 0)
        planned = copied(source, memory_of(shape, dtype, (1, 0), 0))
        assert planned.tiled
        for padding in (3, 4):
            _, padded = memory_of(shape, dtype, (1, 0), padding)
            assert copied(padded, memory_of(shape, dtype, (0, 1), padding)).tiled

    @pytest.mark.parametrize("order", PERMUTATIONS)
    @pytest.mark.part(2)
    def test_all_orders_of_axes(self, order):
        shape = (5, 12, 9, 8)[-len(order) :]
        natural = tuple(range(len(order)))
        for dtype in ("f4", "c16"):
            _, source = memory_of(shape, dtype, natural, 2)
            planned = copied(source, memory_of(shape, dtype, order, 1))
            assert planned.tiled or order[-1] == natural[-1]
            _, source = memory_of(shape, dtype, order, 0)
            copied(source, memory_of(shape, dtype, natural, 3))

    def test_negative_strides_and_bytes_that_are_not_aligned(self):
        _, source = memory_of((40, 50), "f4", (0, 1), 0, offset=1)
        copied(source[::-1, ::-1], memory_of((40, 50), "f4", (1, 0), 0))
        _, source = memory_of((40, 50), "f8", (0, 1), 0, offset=4)
        copied(source[:, ::-1], memory_of((40, 50), "f8", (1, 0), 1))

    def test_beside_regions_of_other_kinds(self):
        memory, whole = memory_of((64, 96), "f4", (1, 0), 0)
        _, source = memory_of((64, 96), "f4", (0, 1), 0)
        _, row = memory_of((1000,), "f8", (0,), 0)
        there, line = memory_of((1000,), "f8", (0,), 0)
        copies = [Copy(side_of(source), side_of(whole)), Copy(side_of(row), side_of(line))]
        for max_blocks in (None, 3):
            memory[:], there[:] = 0, 0
            planned = plan(copies, sms=SMS, tiles=True, max_blocks=max_blocks)
            run("strided_copy", planned)
            assert planned.tiled and whole.tobytes() == source.tobytes()
            assert line.tobytes() == row.tobytes()

    @settings(max_examples=trials(60))
    @given(st.data())
    def test_random_copies(self, data):
        n = data.draw(st.integers(2, 4))
        shape = data.draw(st.lists(st.integers(1, (90, 24, 9)[n - 2]), min_size=n, max_size=n))
        dtype = data.draw(st.sampled_from(DTYPES))
        orders = st.permutations(range(n))
        _, source = memory_of(shape, dtype, data.draw(orders), data.draw(st.integers(0, 3)))
        target = memory_of(shape, dtype, data.draw(orders), data.draw(st.integers(0, 3)))
        copied(source, target, max_blocks=data.draw(st.sampled_from([None, 1, 5])))
