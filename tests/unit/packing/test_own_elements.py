"""Datatypes on views with gaps: access to the view's own elements, or an error."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox import datatypes as dt
from halox import pack, unpack
from halox.datatypes import Datatype
from halox.errors import FieldError
from halox.packing import pack_device as device_packing
from halox.packing.own_elements import check_own_elements

A = np.arange(24.0).reshape(4, 6)
COLUMN = A[:, 1]
REFUSED = r"view of shape .* not all its own: .*datatypes\.slab\(a\.shape, a\.strides"


def values(view: np.ndarray, datatype: Any, count: int = 1) -> list[float]:
    return pack(view, datatype, count).view("f8").tolist()


@pytest.mark.parametrize(
    ("view", "datatype", "count"),
    [
        (COLUMN, "f8", 4),
        (COLUMN, dt.contiguous(4, "f8"), 1),
        (COLUMN, dt.contiguous(2, "f8"), 2),
        (COLUMN, "u1", 9),
        (COLUMN, "c16", 1),
        (COLUMN, dt.vector(4, 2, 6, "f8"), 1),
        (COLUMN, dt.indexed([1, 1], [0, 7], "f8"), 1),
        (COLUMN, dt.indexed_block(1, [-1], "f8"), 1),
        (COLUMN, dt.vector(5, 1, 6, "f8"), 1),
        (A[:, ::2], dt.contiguous(3, "f8"), 1),
        (A[:, 1:], dt.contiguous(6, "f8"), 1),
        (A[:, ::-1], "f8", 2),  # the second element would be in the next row
        (A[::-1], "f8", 12),
        (A[::2], dt.contiguous(12, "f8"), 1),
        (A.T[1:], dt.contiguous(7, "f8"), 1),
        (A[1:3, 2:5], dt.subarray((4, 6), (2, 3), (1, 2), "f8"), 1),  # two offsets
        (np.zeros(4, "f8,i4")["f0"], "f8", 2),
        (np.zeros(4, "f8,i4")[::2], "f8,i4", 2),
        (np.broadcast_to(A[0, :1], (4,)), "f8", 4),
        (np.lib.stride_tricks.sliding_window_view(A[0, :5], 3), "f8", 6),
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
        (COLUMN, "f8", 1, [1]),
        (COLUMN, dt.slab((4,), (48,), (0,), (4,), "f8"), 1, [1, 7, 13, 19]),
        (COLUMN, dt.vector(4, 1, 6, "f8"), 1, [1, 7, 13, 19]),
        (COLUMN, dt.resized("f8", 0, 48), 4, [1, 7, 13, 19]),
        (COLUMN, dt.indexed_block(1, [18, 0], "f8"), 1, [19, 1]),
        (COLUMN, dt.vector(9, 1, 0, "f8"), 1, [1] * 9),
        (COLUMN[::-1], dt.hvector(4, 1, -48, "f8"), 1, [19, 13, 7, 1]),
        (A[1:3, 2:5], dt.contiguous(3, "f8"), 1, [8, 9, 10]),  # a row of the view
        (A[1:3, 2:5], dt.vector(2, 3, 6, "f8"), 1, [8, 9, 10, 14, 15, 16]),
        (A[::-1], "f8", 6, [18, 19, 20, 21, 22, 23]),
        (A[:, ::2], dt.vector(6, 1, 2, "f8"), 1, [0, 2, 4, 6, 8, 10]),
        (A[::2, ::3], dt.indexed([1, 1, 1], [0, 15, 3], "f8"), 1, [0, 15, 3]),
        (A[:, 1:2], "f8", 0, []),
        (A[2:, :], "f8", 12, list(range(12, 24))),
        # The elements of the view fill one contiguous range, in any order: the datatype applies to it, as in MPI.
        (A.T, "f8", 3, [0, 1, 2]),
        (A.reshape(2, 2, 6).transpose(2, 0, 1), "f8", 24, list(range(24))),
        (A[1], dt.indexed_block(1, [-6, 6], "f8"), 1, [0, 12]),
        (A[1, 2:3], "f8", 3, [8, 9, 10]),
    ],
)
def test_own_elements_are_moved(view: Any, datatype: Any, count: int, expected: list[int]) -> None:
    assert values(view, datatype, count) == expected
    if len(set(expected)) < len(expected):
        return
    whole = np.zeros_like(A)
    offset = view.__array_interface__["data"][0] - A.__array_interface__["data"][0]
    place = np.ndarray(view.shape, "f8", whole, offset, view.strides)
    unpack(pack(view, datatype, count), datatype, place, count)
    assert sorted(whole[whole != 0]) == sorted(n for n in expected if n)
    assert (whole[whole != 0] == A[whole != 0]).all()


def views(rng: random.Random) -> np.ndarray:
    """Draw a view of a small array, with any steps and order of axes."""
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 3))]
    index: list[Any] = []
    for n in shape:
        cut = slice(rng.randint(0, n - 1), None, rng.choice((1, 1, 2, -1, -2, 3)))
        index.append(rng.choice((cut, cut, slice(None), n - 1)))
    view = np.zeros(shape)[tuple(index)]
    return view.transpose(rng.sample(range(view.ndim), view.ndim))


def drawn(rng: random.Random, view: np.ndarray) -> Datatype:
    """Draw a datatype, with the view's strides or others."""
    steps = (*view.strides, 8, 16)
    return {
        0: lambda: dt.contiguous(rng.randint(1, 4), "f8"),
        1: lambda: dt.vector(rng.randint(1, 4), rng.randint(1, 2), rng.randint(-3, 6), "f8"),
        2: lambda: dt.hvector(
            rng.randint(1, 4), 1, rng.choice(steps), dt.hvector(2, 1, rng.choice(steps), "f8")
        ),
        3: lambda: dt.indexed_block(1, [rng.randint(-3, 8) for _ in range(3)], "f8"),
    }[rng.randint(0, 3)]()


def test_random_views_against_the_set_of_their_elements() -> None:
    rng, seen = random.Random(3), set()
    for _ in range(2500):
        view = views(rng)
        places = {
            sum(i * step for i, step in zip(index, view.strides, strict=True)): index
            for index in np.ndindex(view.shape)
        }
        made, count = drawn(rng, view), rng.choice((1, 1, 2))
        strided = made.items(count).strided
        blocks = made.blocks(count)
        runs = (
            zip(blocks.offsets.tolist(), blocks.lengths.tolist(), strict=True)
            if strided is None
            else [(start, strided.block_bytes) for start in strided.offsets().tolist()]
        )
        backwards = [axis for axis, step in enumerate(view.strides) if step < 0]
        own = True
        for start, length in runs:
            touched = [places.get(at) for at in range(start, start + length, 8)]
            own &= None not in touched
            own = own and not any(
                one[axis] != other[axis]  # no run continues along a reversed axis
                for one, other in itertools.pairwise(touched)
                for axis in backwards
            )
        lowest, span = min(places), max(places) - min(places) + 8
        dense = not lowest and len(places) * 8 == span
        try:
            check_own_elements("a", view.shape, view.strides, 8, made, count)
            found = True
        except FieldError:
            found = False
        assert found == (own or dense), (view.shape, view.strides, made, count)
        seen.add((found, dense))
        starts = [rng.randint(0, n - 1) for n in view.shape]
        sizes = [rng.randint(1, n - a) for n, a in zip(view.shape, starts, strict=True)]
        box = dt.slab(view.shape, view.strides, starts, sizes, "f8")
        check_own_elements("a", view.shape, view.strides, 8, box, 1)
    assert seen == {(True, True), (True, False), (False, False)}


def test_large_boxes_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A box with a million blocks is checked axis by axis, without a list of its blocks."""
    shape, strides = (1000, 1000, 10), (160000, 80, 8)

    def refuse(_: Any) -> Any:
        raise AssertionError("the blocks were listed")

    monkeypatch.setattr(dt.StridedBlocks, "offsets", refuse)
    box = dt.slab(shape, strides, (1, 1, 1), (998, 998, 8), "f8")
    check_own_elements("a", (1000, 1000, 9), strides, 8, box, 1)
    with pytest.raises(FieldError, match=REFUSED):
        check_own_elements("a", (500, 1000, 9), strides, 8, box, 1)


class FakeArray:
    """A view in device memory, with the attributes that the check reads."""

    itemsize = 8

    def __init__(self, view: np.ndarray) -> None:
        self.shape, self.strides, self.flags = view.shape, view.strides, view.flags
        memory = SimpleNamespace(ptr=4096, size=4096)
        self.data = SimpleNamespace(ptr=4096, mem=memory, device_id=0)


def test_the_rule_holds_for_arrays_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_packing, "cupy", lambda: SimpleNamespace(ndarray=FakeArray))
    four = device_packing._Call(dt.primitive("f8"), 4, "auto", None)
    for _ in range(2):
        with pytest.raises(FieldError):
            four.array(FakeArray(COLUMN), "source")
        assert four.array(FakeArray(A[0]), "source") == (4096, 0)
        assert four.array(FakeArray(A[:, 1:]), "source") == (4096, 0)
    strided = device_packing._Call(dt.vector(4, 1, 6, "f8"), 1, "auto", None)
    assert strided.array(FakeArray(COLUMN), "target", writable=True) == (4096, 0)
