"""Fill values of fields, on the host and on a fake GPU array."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.errors import FieldError
from halox.runtime.gpu.devices import fill, fill_value


class OnGpu:
    """The part of a CuPy array that `fill` uses; like CuPy's kernels, it supports numbers but no strings."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.shape, self.dtype, self.nbytes = values.shape, values.dtype, values.nbytes
        self.data = SimpleNamespace(memset_async=self._memset)

    def _memset(self, value: int, nbytes: int) -> None:
        ctypes.memset(self.values.ctypes.data, value, nbytes)

    def __setitem__(self, index: Any, value: Any) -> None:
        assert self.dtype.kind in "biufc" and np.ndim(value) == 0
        self.values[index] = value

    def set(self, values: np.ndarray) -> None:
        assert values.dtype == self.dtype and values.shape == self.shape
        assert values.flags.c_contiguous
        self.values[...] = values


RECORD = [("a", "f8"), ("b", "S2")]


@pytest.mark.parametrize("place", [lambda array: array, OnGpu], ids=["host", "GPU"])
@pytest.mark.parametrize("dtype", ["f4", "?", "c16", "S3", "M8[s]", "V3", RECORD], ids=str)
def test_filled_as_numpy_fills(place: Any, dtype: Any) -> None:
    shape = (3, 4)
    array = np.full((3, 4, np.dtype(dtype).itemsize), 255, "u1").view(dtype)[..., 0]
    array = np.ascontiguousarray(array)
    fill(place(array), None)
    assert array.tobytes() == np.zeros(shape, dtype).tobytes()
    fill(place(array), fill_value(1, array.dtype, shape))
    assert array.tobytes() == np.ones(shape, dtype).tobytes()
    if array.dtype.names is None:
        row = [1, 0, 1, 1]
        fill(place(array), fill_value(row, array.dtype, shape))
        assert array.tobytes() == np.full(shape, row, dtype).tobytes()


def test_padding_is_cleared() -> None:
    dtype = np.dtype({"names": ["a"], "formats": ["f8"], "offsets": [8], "itemsize": 24})
    array = np.full((5, 24), 255, "u1").view(dtype)[:, 0]
    fill(array, None)
    assert not any(array.tobytes())


def test_a_long_value_is_shown_in_short() -> None:
    with pytest.raises(FieldError) as caught:
        fill_value(["x"] * 1000, np.dtype("f8"), (1000,))
    assert len(str(caught.value)) < 350
