"""Datatypes on views with gaps: access to the view's own elements, or an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halox import datatypes as dt
from halox import pack, unpack
from halox.errors import FieldError

A = np.arange(24.0).reshape(4, 6)
COLUMN = A[:, 1]


@pytest.mark.parametrize(
    ("view", "datatype", "count"),
    [
        (COLUMN, "f8", 4),
        (COLUMN, dt.contiguous(4, "f8"), 1),
        (COLUMN, "u1", 9),
        (COLUMN, dt.vector(4, 2, 6, "f8"), 1),
        (COLUMN, dt.indexed([1, 1], [0, 7], "f8"), 1),
        (COLUMN, dt.indexed_block(1, [-1], "f8"), 1),
        (A[:, ::2], dt.contiguous(3, "f8"), 1),
        (A[:, 1:], dt.contiguous(6, "f8"), 1),
        (A[:, ::-1], "f8", 2),  # the second element would be in the next row
        (A[::-1], "f8", 12),
        (A.T[1:], dt.contiguous(7, "f8"), 1),
        (A[1:3, 2:5], dt.subarray((4, 6), (2, 3), (1, 2), "f8"), 1),  # two offsets
        (np.zeros(4, "f8,i4")["f0"], "f8", 2),
        (np.broadcast_to(A[0, :1], (4,)), "f8", 4),
    ],
)
def test_memory_between_the_elements_is_refused(view: Any, datatype: Any, count: int) -> None:
    packed = np.zeros(200, np.uint8)
    before = view.tobytes()
    with pytest.raises(FieldError):
        pack(view, datatype, count, out=packed)
    target = view if view.flags.writeable else np.zeros((4, 2))[:, 0]
    with pytest.raises(FieldError):
        unpack(packed + 1, datatype, target, count)
    assert view.tobytes() == before and not packed.any()


@pytest.mark.parametrize(
    ("view", "datatype", "count", "expected"),
    [
        (COLUMN, dt.slab((4,), (48,), (0,), (4,), "f8"), 1, [1, 7, 13, 19]),
        (COLUMN, dt.resized("f8", 0, 48), 4, [1, 7, 13, 19]),
        (COLUMN, dt.indexed_block(1, [18, 0], "f8"), 1, [19, 1]),
        (COLUMN[::-1], dt.hvector(4, 1, -48, "f8"), 1, [19, 13, 7, 1]),
        (A[1:3, 2:5], dt.vector(2, 3, 6, "f8"), 1, [8, 9, 10, 14, 15, 16]),
        (A[::-1], "f8", 6, [18, 19, 20, 21, 22, 23]),
        (A[:, ::2], dt.vector(6, 1, 2, "f8"), 1, [0, 2, 4, 6, 8, 10]),
        (A[::2, ::3], dt.indexed([1, 1, 1], [0, 15, 3], "f8"), 1, [0, 15, 3]),
        (A[:, 1:2], "f8", 0, []),
        # The elements of the view fill one contiguous range, in any order: the datatype applies to it, as in MPI.
        (A.T, "f8", 3, [0, 1, 2]),
        (A[1], dt.indexed_block(1, [-6, 6], "f8"), 1, [0, 12]),
        (A[1, 2:3], "f8", 3, [8, 9, 10]),
    ],
)
def test_own_elements_are_moved(view: Any, datatype: Any, count: int, expected: list[int]) -> None:
    packed = pack(view, datatype, count)
    assert packed.view("f8").tolist() == expected
    whole, wanted = np.zeros_like(A), np.where(np.isin(A, expected), A, 0)
    offset = view.__array_interface__["data"][0] - A.__array_interface__["data"][0]
    unpack(packed, datatype, np.ndarray(view.shape, "f8", whole, offset, view.strides), count)
    np.testing.assert_array_equal(whole, wanted)


def test_any_box_of_a_view_is_its_own() -> None:
    whole = np.arange(5 * 6 * 7.0).reshape(5, 6, 7)
    for view in (whole[1:, ::2], whole[::-1, :, 1::3], whole.transpose(2, 0, 1)[::-2, 1:]):
        for starts in np.ndindex(2, 2, 2):
            sizes = [n - start - 1 for n, start in zip(view.shape, starts, strict=True)]
            box = dt.slab(view.shape, view.strides, starts, sizes, "f8")
            place = tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
            assert pack(view, box).tobytes() == view[place].tobytes()
