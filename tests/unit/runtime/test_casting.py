"""Casts of values to a field's dtype: NumPy's casts, except for the losses in the table; fills of fields."""

from __future__ import annotations

import ctypes
import warnings
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.errors import FieldError
from halox.runtime.arrays import scalar_array
from halox.runtime.gpu.devices import fill, fill_value

PAIR = [("a", "u1"), ("b", "f4", 2)]

LOST: list[tuple[Any, Any, str]] = [
    ([1, 2j], "i4", "imaginary part"),
    (1e300, "f4", "overflow"),
    (10**30, "f2", "overflow"),
    (1e300j, "c8", "overflow"),
    (2.0**63, "i8", "int64 holds"),
    (-1, "u8", "uint64 holds"),
    (np.nan, "i4", "int32 holds"),
    (np.ma.array([1.0], mask=[True]), "f8", "masked array"),
    ((300, 1), PAIR, "out of bounds for uint8"),
    ((1, (2, 1e300)), PAIR, "overflow"),
]


@pytest.mark.parametrize(("value", "dtype", "why"), LOST, ids=str)
def test_nothing_is_lost_in_silence(value: Any, dtype: Any, why: str) -> None:
    with pytest.raises(FieldError, match=why):
        fill_value(value, np.dtype(dtype), (2,))


KEPT: list[tuple[Any, Any, Any]] = [
    (1 + 0j, "f8", 1.0),
    (0.1, "f4", np.float32(0.1)),
    (complex(np.inf, 1), "c8", complex(np.inf, 1)),
    (2.7, "i4", 2),
    (2**63, "u8", 2**63),
    (Fraction(1, 4), "f8", 0.25),
    (10**30, "f8", 1e30),
    (True, "f4", 1.0),
    ("ab", "S2", b"ab"),
    (np.datetime64("2020-01-01T12"), "M8[D]", np.datetime64("2020-01-01")),
]


@pytest.mark.parametrize(("value", "dtype", "expected"), KEPT, ids=str)
def test_other_values_are_cast_as_by_numpy(value: Any, dtype: str, expected: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fill_value(value, np.dtype(dtype), (2,))
    assert found.dtype == dtype and found[()] == expected


def test_fields_of_a_structured_dtype() -> None:
    expected = np.array((1, (2.0, 3.0)), PAIR)[()]
    for value in ((1, (2, 3)), np.array((1, (2.0, 3.0)), [("c", "i8"), ("d", "f8", 2)])):
        assert repr(fill_value(value, np.dtype(PAIR), (2,))[()]) == repr(expected)
    both = fill_value([7, 8], np.dtype(PAIR), (2,))
    assert both["a"].tolist() == [7, 8] and both["b"].tolist() == [[7, 7], [8, 8]]
    assert fill_value((1, 2), np.dtype(PAIR), (2,))["b"].tolist() == [2.0, 2.0]


def test_a_scalar_to_be_reduced_keeps_its_range() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scalar_array(0.5, np.dtype("f4")) == np.float32(0.5)
        assert np.isinf(scalar_array(float("inf"), np.dtype("f4")))
        for value, dtype in ((1e300, "f4"), (1e300j, "c8"), (1j, "f4"), (300, "u1")):
            with pytest.raises(FieldError):
                scalar_array(value, np.dtype(dtype))


def test_one_number_a_component() -> None:
    with pytest.raises(FieldError):
        fill_value([1, 2, 3], np.dtype("f8"), (3, 6, 8))


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


PADDED = {"names": ["a"], "formats": ["f8"], "offsets": [8], "itemsize": 24}
RECORD = [("a", "f8"), ("b", "S2")]


@pytest.mark.parametrize("place", [lambda array: array, OnGpu], ids=["host", "GPU"])
@pytest.mark.parametrize("dtype", ["f4", "?", "c16", "S3", "M8[s]", "V3", RECORD, PADDED], ids=str)
def test_filled_as_numpy_fills(place: Any, dtype: Any) -> None:
    dtype, shape = np.dtype(dtype), (3, 4)
    array = np.frombuffer(bytearray(b"\xff" * 12 * dtype.itemsize), dtype).reshape(shape)
    fill(place(array), None)
    assert not any(array.tobytes()), "padding is cleared, too"
    fill(place(array), fill_value(1, dtype, shape))
    np.testing.assert_array_equal(array, np.ones(shape, dtype))
    if dtype.names is None:
        row = [1, 0, 1, 1]
        fill(place(array), fill_value(row, dtype, shape))
        assert array.tobytes() == np.full(shape, row, dtype).tobytes()
