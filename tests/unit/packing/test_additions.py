"""Additions of a plan by the compiled kernel: halos that overlap, and both sides of a fold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halox import datatypes as dt
from halox.packing import device
from halox.runtime.arrays import describe
from tests.fakes.cpu_kernels import aligned
from tests.fakes.cpu_packers import STREAM, cpu_backend

SHAPE = 20, 22, 24
BOXES = [
    (slice(1, 5), slice(2, 20), slice(3, 4)),
    (slice(1, 5), slice(2, 20), slice(3, 9)),
    (slice(0, 20), slice(0, 1), slice(0, 24)),
]


def numbers(shape: Any, dtype: str, seed: int) -> np.ndarray:
    array = aligned(int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
    array[:] = np.random.default_rng(seed).integers(0, 50, shape)
    return array


@pytest.mark.parametrize("dtype", ["f4", "f8", "c16", "i2"])
def test_additions(dtype: str) -> None:
    a, b = numbers(SHAPE, dtype, 0), numbers(SHAPE, dtype, 1)
    expected, moves, packed = a.copy(), [], []
    for number, box in enumerate(BOXES):
        starts, sizes = [s.start for s in box], [s.stop - s.start for s in box]
        packed.append(numbers(sizes, dtype, 2 + number))
        expected[box] += packed[-1]
        end = device.Endpoint(describe(a), dt.slab(SHAPE, a.strides, starts, sizes, dtype), 1, 0)
        moves.append((end, packed[-1].ctypes.data))
    with cpu_backend("strided"):
        device.launch_add(moves, 0).at(STREAM)
        assert (a == expected).all()
        source = dt.slab(SHAPE, b.strides, (0, 0, 0), (3, 5, 4), dtype)
        turned = dt.slab((4, 5, 3), a.strides[::-1], (0, 0, 0), (4, 5, 3), dtype)
        pair = [
            (device.Endpoint(describe(x), kind, 1, n))
            for n, (x, kind) in enumerate([(b, source), (a, turned)])
        ]
        device.launch_between([(pair[0], pair[1])], "add", 0).at(STREAM)
    expected[:3, :5, :4] += b[:3, :5, :4].reshape(4, 5, 3).T
    assert (a == expected).all()
