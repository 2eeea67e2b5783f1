"""Parts of NumPy arrays as indices: the same bytes in the same order as a selection by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halox.paths.host.slices import Slice, slices_of

DTYPES = ["f8", "f4", "u1", "c16", "i2", "V3", [("a", "i4"), ("b", "f8")]]


def numbered(rng: np.random.Generator, dtype: Any) -> np.ndarray:
    """Return an array of random bytes with any order of axes in memory, sometimes without its first plane."""
    shape = rng.choice([1, 2, 3, 4, 5, 8, 20], rng.integers(1, 5))
    order = rng.permutation(len(shape)) if rng.random() < 0.6 else np.arange(len(shape))
    stored = np.empty(shape[order], dtype)
    stored.reshape(-1).view("u1")[...] = rng.integers(0, 256, stored.nbytes, "u1")
    array = stored.transpose(np.argsort(order).tolist())
    return array[1:] if len(array) > 2 and rng.random() < 0.15 else array


def chosen(rng: np.random.Generator, array: np.ndarray) -> tuple[np.ndarray, Slice | None]:
    """Return a box of the array with any order of axes, and the index that halox finds for it."""
    low = [int(rng.integers(n)) for n in array.shape]
    cuts = [
        slice(at, int(rng.integers(at + 1, n + 1))) for at, n in zip(low, array.shape, strict=True)
    ]
    order = rng.permutation(array.ndim) if rng.random() < 0.3 else np.arange(array.ndim)
    box = array[tuple(cuts)].transpose(order.tolist())
    shape, strides, dtype = [*box.shape], [*box.strides], array.dtype
    if rng.random() < 0.6:  # merge contiguous axes to one block
        nbytes = dtype.itemsize
        while shape and (shape[-1] == 1 or strides[-1] == nbytes):
            strides.pop()
            nbytes *= shape.pop()
        dtype = np.dtype(f"V{nbytes}") if nbytes > dtype.itemsize else dtype
    offset = box.ctypes.data - array.ctypes.data
    made = slices_of([(0, tuple(shape), dtype, offset, tuple(strides))], [array])
    return box, None if made is None else made[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_and_their_order(dtype: Any) -> None:
    rng = np.random.default_rng([59, np.dtype(dtype).itemsize])
    turned = 0
    for _ in range(150):
        array = numbered(rng, dtype)
        box, found = chosen(rng, array)
        if found is None:
            continue
        form = array if found.base is None else found.base.of(array)
        packed = np.empty(box.nbytes, "u1")
        found.packed(packed)[...] = form[found.at]
        assert packed.tobytes() == box.tobytes(), (array.shape, array.strides, found)
        packed[...] = rng.integers(0, 256, box.nbytes, "u1")
        form[found.at] = found.packed(packed)
        assert box.tobytes() == packed.tobytes(), (array.shape, array.strides, found)
        turned += found.order != tuple(range(len(found.order)))
    assert turned, "some are packed in another order than that of the axes"
