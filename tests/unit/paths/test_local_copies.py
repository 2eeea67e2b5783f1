"""Exchanges of a rank with itself: array layouts and dtypes, and arrays that take the place of a plan's array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halox.decomposition import FieldLayout, FieldSpec, decompose
from halox.exchange.halo import halo_draft
from halox.paths.base import Job
from halox.paths.local import LocalHostChannel
from halox.runtime.arrays import borrow, describe

SHAPE, HALO = (6, 7, 5), ((1, 2), (2, 1), (1, 1))
DTYPES = ["f8", "u1", "i2", "c16", "S3", "S7", "f8,i4", "V24", "?", "M8[s]"]


def array_of(dtype: str, form: str) -> np.ndarray:
    """Return an array of zeros, with the halo, in the given memory layout."""
    n, m, k = (size + low + high for size, (low, high) in zip(SHAPE, HALO, strict=True))
    made: dict[str, Any] = {
        "C": lambda: np.zeros((n, m, k), dtype),
        "F": lambda: np.zeros((n, m, k), dtype, order="F"),
        "every other": lambda: np.zeros((n, 2 * m, k), dtype)[:, ::2],
        "reversed": lambda: np.zeros((n, m, k), dtype)[::-1, :, ::-1],
        "inside": lambda: np.zeros((n + 2, m + 1, k + 3), dtype)[1:-1, 1:, 2:-1],
        "of no alignment": lambda: np.zeros((n, m, k), [("a", "i1"), ("b", dtype)])["b"],
    }
    return made[form]()


@pytest.mark.parametrize("form", ["C", "F", "every other", "reversed", "inside", "of no alignment"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_periodic_exchange(dtype: str, form: str) -> None:
    """Exchange an array, then other arrays of the same layout; guard bytes stay unchanged."""
    layout = FieldLayout(decompose(SHAPE, 1, periodic=True), 0, FieldSpec(HALO))
    u, v = array_of(dtype, form), array_of(dtype, form)
    draft = halo_draft((u,), [(describe(u), layout)], operation="copy", corners=True)
    channel = LocalHostChannel(Job([borrow(u)], draft.sends, draft.receives))
    assert channel.is_movable
    inner = tuple(slice(low, low + n) for n, (low, _) in zip(SHAPE, HALO, strict=True))
    for seed, array in enumerate((u, v, u)):
        memory = borrow(array)
        everything = np.frombuffer(memory.memory, "u1")
        everything[:] = 7
        cells = np.random.default_rng(seed).integers(0, 256, (*SHAPE, array.itemsize), "u1")
        array[inner] = cells.view(array.dtype)[..., 0]
        channel.bind(channel.views([memory.memory]))
        channel.start()
        numbers = np.pad(np.arange(np.prod(SHAPE)).reshape(SHAPE), HALO, mode="wrap")
        wanted = cells.reshape(-1, array.itemsize)[numbers]
        found = np.ascontiguousarray(array).view("u1").reshape(*array.shape, array.itemsize)
        assert np.array_equal(found, wanted)
        at = np.arange(array.itemsize) + memory.origin
        for n, stride in zip(array.shape, array.strides, strict=True):
            at = ((np.arange(n) * stride)[:, None] + at).ravel()
        everything[at] = 7
        assert (everything == 7).all(), "nothing between the elements was written"
