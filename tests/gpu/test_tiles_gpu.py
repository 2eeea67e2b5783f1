"""Tiled copies that permute axes on a GPU, compared with NumPy's transposes, with guard bytes around every target."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from tests.support import require

pytestmark = pytest.mark.gpu
require("gpu")

import cupy as cp  # noqa: E402

import halox  # noqa: E402
from halox.datatypes import slab  # noqa: E402
from halox.packing.refine import Copy, Side  # noqa: E402
from halox.packing.strided import StridedCopy  # noqa: E402
from halox.packing.strided_plan import plan  # noqa: E402
from halox.packing.tiles import LEAST_BYTES  # noqa: E402
from halox.runtime.gpu.streams import stream_pointer  # noqa: E402
from tests.gpu.guarded import DEVICE, Guarded  # noqa: E402

DTYPES = ("u1", "u2", "f4", "f8", "c16", "S3", "S12", "S20", "S24", "S32", "S64")
SHAPES = {2: (388, 516), 3: (52, 68, 100), 4: (12, 20, 28, 36)}
ORDERS = [order for n in SHAPES for order in permutations(range(n))]


def random_array(shape, dtype):
    """Host array of random bytes."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    numbers = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    return numbers.view(dtype).reshape(shape)


def side_of(pointer, view):
    """One side of a copy: the layout of a NumPy view at a GPU address."""
    datatype = slab(view.shape, view.strides, [0] * view.ndim, view.shape, view.dtype)
    return Side(pointer, datatype.strided)


def check(host, order, offset=0, **options):
    """Copy an array to an array with permuted axes and back; return whether the plan uses tiles."""
    source, turned = Guarded(host.nbytes + offset), Guarded(host.nbytes)
    cp.cuda.runtime.memcpy(source.pointer + offset, host.ctypes.data, host.nbytes, 1)
    expected = np.ascontiguousarray(host.transpose(order))
    back = np.argsort(order)
    view = expected.transpose(back)
    forward = Copy(side_of(source.pointer + offset, host), side_of(turned.pointer, view))
    StridedCopy([forward], device=DEVICE, **options).at(stream_pointer())
    assert turned.get().tobytes() == expected.tobytes()
    again = Guarded(host.nbytes)
    backward = Copy(side_of(turned.pointer, view), side_of(again.pointer, host))
    StridedCopy([backward], device=DEVICE, **options).at(stream_pointer())
    assert again.get().tobytes() == host.tobytes()
    return plan([forward], sms=132, tiles=True).tiled


class TestCopies:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("order", ORDERS)
    def test_all_orders_of_axes(self, order, dtype):
        tiled = check(random_array(SHAPES[len(order)], dtype), order)
        assert tiled or order[-1] == len(order) - 1

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "shape", [(1023, 517), (5, 40001), (40001, 7), (130, 131), (4, 100000), (514, 1026)]
    )
    def test_odd_extents(self, shape, dtype):
        host = random_array(shape, dtype)
        assert bool(check(host, (1, 0))) == (host.nbytes >= LEAST_BYTES)

    @pytest.mark.parametrize("offset", [1, 2, 4, 8])
    @pytest.mark.parametrize("dtype", ["f4", "f8", "c16"])
    def test_addresses_of_less_alignment(self, dtype, offset):
        check(random_array((300, 420), dtype), (1, 0), offset)

    @pytest.mark.parametrize("max_blocks", [1, 7])
    def test_a_limited_number_of_blocks(self, max_blocks):
        check(random_array((300, 420), "f8"), (1, 0), max_blocks=max_blocks)


class TestTransposes:
    @pytest.mark.parametrize("dtype", ["f4", "c16"])
    @pytest.mark.parametrize("axes", [(0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1), (1, 0, 2)])
    def test_permuted_axes(self, axes, dtype):
        """Arrays with halos, so that rows start at unaligned addresses."""
        shape = (61, 72, 83)
        a = halox.Grid(shape, halo=1, device="gpu")
        b = halox.Grid([shape[axis] for axis in axes], halo=(0, 2, 1), device="gpu")
        u, v, back = a.zeros(dtype), b.zeros(dtype), a.zeros(dtype)
        host = random_array(shape, "u2").astype(dtype)
        a.interior(u)[...] = cp.asarray(host)
        with halox.Transpose(a, b, axes=axes) as transpose:
            transpose.forward(u, v)
            transpose.backward(v, back)
        assert (b.interior(v).get() == host.transpose(axes)).all()
        assert (back.get() == u.get()).all()
        b.close()
        a.close()
