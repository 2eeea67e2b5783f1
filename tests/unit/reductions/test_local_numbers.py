"""Local reductions on the host, block by block, against NumPy on whole copies."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from halox.decomposition.blocks import BLOCK
from halox.reductions.host.cell_sums import dot, sum_of_squares
from halox.reductions.operations import wide_dtype

SHAPES = [
    (),
    (0,),
    (3, 0),
    (5,),
    (40, 30, 20),
    (3, 20000),
    (2, 2, BLOCK + 3),
    (BLOCK, 1),
    (1, 1, 7),
]


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i8", "u8", "f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers(shape, dtype):
    rng = np.random.default_rng(3)
    kind = np.dtype(dtype).kind
    a, b = (np.asarray(rng.normal(size=shape) * 20) for _ in range(2))
    if kind == "c":
        a = a + 1j * rng.normal(size=shape)
    if kind == "u":
        a, b = np.abs(a), np.abs(b)
    a, b = a.astype(dtype), b.astype(dtype)
    exact = np.result_type(dtype, "c16") if kind == "c" else np.dtype("f8")
    x, y = a.astype(exact), b.astype(exact)
    squares, product = sum_of_squares(a), dot(a, b)
    assert squares.dtype == np.dtype("f8") and product.dtype == wide_dtype(np.dtype(dtype))
    np.testing.assert_allclose(squares, (np.abs(x) ** 2).sum(), rtol=1e-13)
    np.testing.assert_allclose(product, (np.conj(x) * y).sum(), rtol=1e-10, atol=1e-9)


def test_no_copy_is_made_and_the_bits_stay():
    u = np.random.default_rng(0).normal(size=(66, 130, 130))
    cells = u[1:-1, 1:-1, 1:-1]
    first = sum_of_squares(cells).tobytes(), dot(cells, cells).tobytes()
    tracemalloc.start()
    assert (sum_of_squares(cells).tobytes(), dot(cells, cells).tobytes()) == first
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < cells.nbytes / 10
