"""Fields allocated anew in each step: halox reuses one plan, and shifts the addresses of its launches."""

from __future__ import annotations

import numpy as np
import pytest

import halox
from halox.errors import FieldError
from tests.support import require

require("gpu")

import cupy  # noqa: E402
from mpi4py import MPI  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["f8", "f4", "c16", "u1"])
def test_steps_of_new_arrays(dtype: str) -> None:
    options = {"periodic": True, "comm": MPI.COMM_SELF, "device": "gpu"}
    with halox.Grid((20, 14, 9), halo=(1, 2, 1), **options) as grid:
        kept = []
        for step in range(8):
            cells = np.random.default_rng(step).integers(0, 200, grid.rank_shape).astype(dtype)
            u = cupy.zeros(grid.padded_shape, dtype) + cupy.zeros((), dtype)
            grid.interior(u)[...] = cupy.asarray(cells)
            kept.append(u if step % 3 else None)  # reuse of freed memory varies the addresses
            grid.exchange(u)
            assert np.array_equal(u.get(), np.pad(cells, ((1, 1), (2, 2), (1, 1)), mode="wrap"))
            assert grid.domain.plans_made == 1
        for u in [one for one in kept if one is not None]:
            grid.exchange(u)
        assert grid.domain.plans_made == 1


def array_at(shape: tuple[int, ...], dtype: str, offset: int = 0) -> cupy.ndarray:
    """A new array, ``offset`` bytes after a multiple of 512."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return cupy.zeros(nbytes + offset, "u1")[offset:].view(dtype).reshape(shape)


def test_several_fields_of_any_alignment() -> None:
    """One plan serves new arrays of every alignment."""
    dtypes = ("f8", "u1", "c16")
    options = {"periodic": True, "comm": MPI.COMM_SELF, "device": "gpu"}
    with halox.Grid((20, 14, 9), halo=(1, 2, 1), **options) as grid:
        for step in range(9):
            sizes = [np.dtype(dtype).itemsize * (step % 3 == 2) for dtype in dtypes]
            fields, wanted = [], []
            for number, (dtype, offset) in enumerate(zip(dtypes, sizes, strict=True)):
                rng = np.random.default_rng((step, number))
                cells = rng.integers(0, 200, grid.rank_shape).astype(dtype)
                fields.append(array_at(grid.padded_shape, dtype, offset))
                grid.interior(fields[-1])[...] = cupy.asarray(cells)
                wanted.append(np.pad(cells, ((1, 1), (2, 2), (1, 1)), mode="wrap"))
            grid.exchange(*fields)
            assert all(np.array_equal(u.get(), one) for u, one in zip(fields, wanted, strict=True))
        assert grid.domain.plans_made == 1


def test_accumulation() -> None:
    options = {"periodic": True, "comm": MPI.COMM_SELF, "device": "gpu"}
    with halox.Grid((6, 8), halo=1, **options) as grid:
        for offset in (0, 8, 0, 64, 8):
            u = array_at(grid.padded_shape, "f8", offset)
            u[...] = 1
            grid.accumulate(u)
            ends = [(np.arange(n) == 0) * 1 + (np.arange(n) == n - 1) for n in grid.rank_shape]
            i, j = np.ix_(*(1 + one for one in ends))
            assert np.array_equal(grid.interior(u).get(), i * j)
            assert float(u.sum()) == (i * j).sum()
        assert grid.domain.plans_made == 1


def test_layouts_of_results() -> None:
    with halox.Grid((8, 8), halo=1, periodic=True, comm=MPI.COMM_SELF, device="gpu") as grid:
        u = grid.ones(staggered=0)
        for n in range(3):
            v = u * 2 + n
            assert grid.layout(v) is grid.layout(u)
            grid.exchange(v)
        w = grid.zeros_like(u, "f4")
        assert w.shape == u.shape and grid.layout(w) is grid.layout(u)
        grid.exchange(u, w)
        with pytest.raises(FieldError):
            grid.accumulate(u, u)
