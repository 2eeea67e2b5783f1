"""Scattering of whole arrays, the inverse of a gather: dtypes, layouts, parts of any size, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError, MismatchError
from tests.limits import move_in_parts
from tests.mpi.test_gather import OUT_OF_ORDER, OVERLAPPING, WITH_HOLES, grid

pytestmark = pytest.mark.usually(1, 3)


def whole_array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array of random bytes, the same on all ranks."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(5).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(f"V{dtype.itemsize}")[..., 0].view(dtype)


def check(g: halox.Grid, whole: np.ndarray, root: int, **options: Any) -> None:
    """Scatter an array; compare each byte of this rank's cells with the array, and of the halo with its old value."""
    mine = whole if g.rank == root else None
    u = g.scatter(mine, root, **options)
    layout, raw = g.layout(u), f"V{whole.itemsize}"
    before = (slice(None),) * len(layout.spec.components_before)
    expected = whole.view(raw)[(*before, *layout.owned)]
    assert u.dtype == whole.dtype
    assert u.view(raw)[layout.interior].tobytes() == expected.tobytes()
    u.view(np.uint8)[...] = 7
    assert g.scatter(mine, root, out=u) is u
    assert u.view(raw)[layout.interior].tobytes() == expected.tobytes()
    cells = np.ones(u.shape, bool)
    cells[layout.interior] = False
    assert set(u.view(raw)[cells].tobytes()) <= {7}


@pytest.mark.parametrize("part_bytes", [1, 1000, None])
def test_layouts_in_parts_of_any_size(
    part_bytes: int | None, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    if part_bytes is not None:
        move_in_parts(monkeypatch, part_bytes)
    n = 2 * comm.size
    with grid(comm, (4, 2 * n), checkerboard=True) as g:
        check(g, whole_array((4, 2 * n), "i4"), 0)
        check(g, whole_array((2, 4, 2 * n, 3), "u2"), comm.size - 1)
        check(g, whole_array((5, 2 * n), "i8"), 0, staggered=0)
        check(g, whole_array((4, 2 * n + 1), "i8"), 0, staggered=1)
        check(g, whole_array((4, n), "i2"), 0, parity="odd")
        turned = whole_array((2 * n, 4), "i4").T
        check(g, turned, comm.size // 2)


@pytest.mark.parametrize("dtype", ["?", "S3", ">f8", OUT_OF_ORDER, WITH_HOLES, OVERLAPPING])
def test_dtypes(dtype: Any, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        check(g, whole_array(g.grid_shape, "V1" if dtype == "?" else dtype).view(dtype), 0)


def test_a_file_mapped_into_memory(comm: MPI.Intracomm, tmp_path: Any) -> None:
    with grid(comm) as g:
        values = whole_array(g.grid_shape, "i4")
        np.save(tmp_path / "u.npy", values)
        check(g, np.load(tmp_path / "u.npy", mmap_mode="r"), 0)


Call = Callable[[halox.Grid, np.ndarray], Any]
BAD: dict[str, tuple[Call, type[Exception], str]] = {
    "no array": (lambda g, w: g.scatter(None), FieldError, "whole"),
    "a list": (lambda g, w: g.scatter([1.0]), FieldError, "whole"),
    "shape": (lambda g, w: g.scatter(w[1:]), FieldError, "whole"),
    "staggered": (lambda g, w: g.scatter(w, staggered=0), FieldError, "whole"),
    "shape of out": (lambda g, w: g.scatter(w, out=g.zeros(components=2)), FieldError, "whole"),
    "dtype": (lambda g, w: g.scatter(w.astype("f4"), out=g.zeros()), MismatchError, "dtype"),
    "two layouts": (
        lambda g, w: g.scatter(w, out=g.zeros(), components=2),
        FieldError,
        "components",
    ),
    "root": (lambda g, w: g.scatter(w, root=g.size), FieldError, "root"),
    "option": (lambda g, w: g.scatter(w, colour=1), FieldError, "colour"),
}


def test_bad_input_is_one_error_on_all_ranks(comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        whole = np.ones(g.grid_shape)
        for call, kind, word in BAD.values():
            with pytest.raises(kind, match=word):
                call(g, whole)
            assert g.sum(g.scatter(whole)) == whole.size, "the grid goes on"


@pytest.mark.ranks(2, 3)
def test_what_differs_between_ranks(comm: MPI.Intracomm) -> None:
    last = comm.rank == comm.size - 1
    with grid(comm) as g:
        whole, u = np.ones(g.grid_shape), g.zeros()
        with pytest.raises(MismatchError):
            g.scatter(whole, out=u if last else None)
        with pytest.raises(MismatchError):
            g.scatter(whole, root=int(last))
        with pytest.raises(MismatchError):
            g.scatter(np.ones((6, g.grid_shape[1])), staggered=1 if last else 0)
