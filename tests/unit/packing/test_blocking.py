"""Copies in tiles against plain NumPy copies of the same views, and the rule when to use tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.datatypes import contiguous, resized, vector
from halox.packing.blocking import blocked, copy_all, in_tiles, tile_of
from halox.packing.pack import pack, unpack
from tests.support import trials

GUARD = 0xA5
DTYPES = ["i1", "f2", "f4", "f8", "c16", "V3", "V12"]


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def strides_of(order: tuple[int, ...], extents: list[int], itemsize: int) -> list[int]:
    """Return the strides of an array for an order of its axes in memory, slowest first."""
    strides, step = [0] * len(order), itemsize
    for axis in reversed(order):
        strides[axis] = step
        step *= extents[axis]
    return strides


@st.composite
def views(draw: Any, shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Draw a view with any order of axes, gaps and directions; returns it with all bytes of its memory."""
    order = draw(st.permutations(range(len(shape))))
    extents = [n + draw(st.integers(0, 2)) for n in shape]
    strides = strides_of(tuple(order), extents, dtype.itemsize)
    memory = np.full(int(np.prod(extents)) * dtype.itemsize + 64, GUARD, np.uint8)
    view = np.ndarray(shape, dtype, memory.data, 16, strides)
    flips = tuple(slice(None, None, draw(st.sampled_from([1, -1]))) for _ in shape)
    return view[flips], memory


@given(st.data(), st.lists(st.integers(1, 9), min_size=2, max_size=4), st.sampled_from(DTYPES))
@settings(max_examples=trials(400), derandomize=True)
def test_tiles_of_any_shape_as_by_one_copy(data: Any, shape: list[int], name: str) -> None:
    dtype = np.dtype(name)
    target, memory = data.draw(views(tuple(shape), dtype))
    source, given_memory = data.draw(views(tuple(shape), dtype))
    given_memory[:] = random_bytes(given_memory.size)
    np.copyto(target, source)
    wanted, before = memory.copy(), given_memory.copy()
    memory[:] = GUARD
    tile = tuple(data.draw(st.integers(1, n)) for n in shape)
    moves = [*in_tiles(target, source, tile)]
    copy_all(moves)
    np.testing.assert_array_equal(memory, wanted)
    np.testing.assert_array_equal(given_memory, before)
    numbers = [-(-n // most) for n, most in zip(shape, tile, strict=True)]
    assert len(moves) == 2 * np.prod(numbers)


@pytest.mark.parametrize("itemsize", [1, 4, 16])
@pytest.mark.parametrize("axes", [(1, 0), (2, 1, 0), (1, 2, 0), (2, 0, 1), (3, 2, 1, 0)])
def test_large_permutations_are_cut(itemsize: int, axes: tuple[int, ...]) -> None:
    extent = {2: 4096, 3: 256, 4: 64}[len(axes)]
    shape = (extent,) * len(axes)
    natural = tuple(range(len(axes)))
    source = strides_of(natural, [*shape], itemsize)
    target = strides_of(natural, [*shape], itemsize)
    turned = tuple(source[axis] for axis in axes)
    tile = tile_of(shape, itemsize, tuple(target), turned)
    assert tile is not None
    nbytes = itemsize * np.prod(tile)
    assert nbytes <= 2 << 20 and np.prod(shape) >= np.prod(tile)
    runs = [tile[axis] * itemsize for axis in (natural[-1], axes.index(natural[-1]))]
    assert all(run >= min(extent * itemsize, 256) for run in runs)
    # The inverse copy is cut, too.
    assert tile_of(shape, itemsize, turned, tuple(target)) is not None


def test_views_of_common_memory_stay_whole() -> None:
    """A single NumPy call handles the overlap; a sequence of tiles would not."""
    n = 512
    memory = random_bytes(8 * n * n).view("f4")
    a, b = (memory[start:][: n * n].reshape(n, n) for start in (0, 2 * n))
    wanted = b.T.copy()
    (move,) = blocked([(a, b.T)])
    copy_all([move])
    np.testing.assert_array_equal(a, wanted)


@pytest.mark.parametrize(("dtype", "misaligned"), [("u1", 0), ("f4", 0), ("f4", 3), ("c16", 0)])
@pytest.mark.parametrize("shape", [(512, 512), (511, 379)])
def test_transposed_vectors(dtype: str, misaligned: int, shape: tuple[int, int]) -> None:
    """Pack and unpack the transpose of a matrix as a datatype; guard bytes must stay unchanged."""
    rows, columns = shape
    itemsize = np.dtype(dtype).itemsize
    matrix = np.ndarray(shape, f"V{itemsize}", random_bytes(rows * columns * itemsize).data)
    turned = contiguous(columns, resized(vector(rows, 1, columns, dtype), 0, itemsize))
    memory = np.full(matrix.nbytes + 128, GUARD, np.uint8)[misaligned:]
    target = memory[64:][: matrix.nbytes]
    target[:] = matrix.reshape(-1).view(np.uint8)
    packed = pack(target, turned)
    assert packed.tobytes() == matrix.T.tobytes()
    target[:] = GUARD
    unpack(packed, turned, target)
    assert target.tobytes() == matrix.tobytes()
    assert (memory[:64] == GUARD).all() and (memory[64 + target.size :] == GUARD).all()
