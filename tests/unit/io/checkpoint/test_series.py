"""Rounding of mantissas, against the BitRound filter of numcodecs."""

from __future__ import annotations

import numpy as np
import pytest

from halox.io.checkpoint.series import round_mantissas

bitround = pytest.importorskip("numcodecs.bitround")


@pytest.mark.parametrize("dtype", ["f2", "f4", ">f4", "f8", "c8", "c16"])
def test_rounds_as_bitround_does(dtype: str) -> None:
    real = np.dtype(dtype).type(0).real.dtype
    bits = np.random.default_rng(1).integers(0, 256, 24_000, np.uint8).view(real)
    bits = np.where(np.isfinite(bits), bits, 1)
    # Halves between two numbers of 3 bits, even and odd; numbers that round to the next power, to infinity and to 0.
    odd = [1.0625, 1.1875, -1.0625, -1.1875, 1.99, -0.0, 5e-8, np.finfo(real).max, np.inf, -np.inf]
    values = np.concatenate([np.array(odd, real), bits])
    for keepbits in (1, 3, np.finfo(real).nmant - 1, np.finfo(real).nmant):
        expected = bitround.BitRound(keepbits).encode(values.copy()).view(real)
        found = values.astype(np.dtype(dtype).newbyteorder("="))
        if found.dtype.kind == "c":
            found.imag = values[::-1]
        found = found.astype(dtype).reshape(2, -1)
        round_mantissas(found, keepbits, np)
        assert np.array_equal(found.real.ravel(), expected)
        if found.dtype.kind == "c":
            assert np.array_equal(found.imag.ravel(), expected[::-1])


def test_nan_stays_nan() -> None:
    for bits in (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF):
        values = np.array([bits], "u4").view("f4")
        round_mantissas(values, 1, np)
        assert values.view("u4") == bits
