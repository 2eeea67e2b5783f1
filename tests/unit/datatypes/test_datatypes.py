"""Constructors, canonical layouts, bounds, block lists and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.datatypes import (
    BlockList,
    Datatype,
    StridedBlocks,
    as_datatype,
    contiguous,
    dup,
    hindexed,
    hindexed_block,
    hvector,
    indexed,
    indexed_block,
    primitive,
    resized,
    slab,
    struct,
    subarray,
    vector,
)
from halox.errors import DatatypeError
from tests.datatype_strategies import Recipe, build, recipes
from tests.packers import displacements
from tests.support import trials


def joined(entries: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge consecutive entries that are adjacent in memory."""
    runs: list[tuple[int, int]] = []
    for at, size in entries:
        if runs and sum(runs[-1]) == at:
            runs[-1] = (runs[-1][0], runs[-1][1] + size)
        else:
            runs.append((at, size))
    return runs


def pairs(blocks: BlockList) -> list[tuple[int, int]]:
    return list(zip(blocks.offsets.tolist(), blocks.lengths.tolist(), strict=True))


@settings(max_examples=trials(400))
@given(recipe=recipes(), count=st.integers(0, 3))
def test_blocks_follow_the_definitions(recipe: Recipe, count: int) -> None:
    made = build(recipe)
    item, touched = displacements(made), displacements(made, count).tolist()
    assert made.size == item.size
    assert (made.true_lb, made.true_ub) == ((item.min(), item.max() + 1) if item.size else (0, 0))
    assert pairs(made.blocks(count)) == joined((byte, 1) for byte in touched)
    assert made.overlaps(count) == (len(set(touched)) < len(touched))


@settings(max_examples=trials(400))
@given(recipe=recipes())
def test_strided_form_is_a_function_of_the_bytes_alone(recipe: Recipe) -> None:
    made = build(recipe)
    blocks = made.blocks()
    listed = hindexed(blocks.lengths, blocks.offsets, "u1")
    assert made.strided == listed.strided
    assert made.same_layout(listed) and listed.same_layout(made)
    assert contiguous(2, made).strided == contiguous(2, resized(listed, 0, made.extent)).strided
    form = made.strided
    if form is None:
        return
    assert pairs(form.block_list()) == pairs(blocks)
    assert (form.nbytes, form.n_blocks) == (made.size, form.offsets().size)
    assert StridedBlocks.canonical(form.offset, form.counts, form.strides, form.block_bytes) == form
    assert 1 not in form.counts
    assert not form.counts or form.strides[-1] != form.block_bytes


X, Y, Z = 4, 5, 6

SAME_LAYOUTS: dict[str, list[Datatype]] = {
    "a face of a 3-d array": [
        subarray((X, Y, Z), (X, Y, 1), (0, 0, 2), "f8"),
        hindexed([1], [16], vector(X * Y, 1, Z, "f8")),
        hindexed_block(1, range(16, 16 + 48 * X * Y, 48), "f8"),
        indexed_block(1, np.arange(X * Y) * Z + 2, "f8"),
        indexed_block(8, (np.arange(X * Y) * Z + 2) * 8, "u1"),
        slab((X, Y, Z), (Y * Z * 8, Z * 8, 8), (0, 0, 2), (X, Y, 1), "f8"),
        subarray((Z, Y, X), (1, Y, X), (2, 0, 0), "f8", order="F"),
        struct([1] * X, [16 + i * Y * Z * 8 for i in range(X)], [vector(Y, 1, Z, "f8")] * X),
        resized(dup(subarray((X * Y, Z), (X * Y, 1), (0, 2), contiguous(2, "f4"))), -8, 3),
    ],
    "a contiguous run": [
        contiguous(12, "i4"),
        vector(3, 4, 4, "i4"),
        indexed([5, 0, 7], [0, 99, 5], "i4"),
        struct([1, 2], [0, 24], [contiguous(3, "f8"), contiguous(3, "f4")]),
        subarray((3, 4), (3, 4), (0, 0), "f4"),
        hvector(2, 24, 24, "i1"),
    ],
    "first and last column, which touch from row to row": [
        vector(3, 1, 1, resized(vector(2, 1, 3, "f8"), 0, 32)),
        indexed([1, 2, 2, 1], [0, 3, 7, 11], "f8"),
        hvector(3, 1, 32, hvector(2, 1, 24, "f8")),
    ],
    "backwards": [
        vector(4, 1, -2, "f4"),
        hvector(2, 1, -16, vector(2, 1, -2, "f4")),
        indexed([1, 1, 1, 1], [0, -2, -4, -6], "f4"),
    ],
    "nothing": [
        contiguous(0, "f8"),
        vector(3, 0, 2, "f8"),
        indexed([0, 0], [3, 4], "f8"),
        struct([], [], []),
        contiguous(3, indexed([], [], "f4")),
        slab((3, 3), (24, 8), (0, 0), (3, 0), "f8"),
    ],
    "irregular": [
        indexed([1, 2, 1], [0, 2, 9], "f8"),
        hindexed([2, 4, 2], [0, 16, 72], "f4"),
        struct([1, 1, 1], [0, 16, 72], ["f8", contiguous(2, "i8"), "c8"]),
    ],
}


@pytest.mark.parametrize("name", SAME_LAYOUTS)
def test_equal_layouts_have_one_form(name: str) -> None:
    first, *others = SAME_LAYOUTS[name]
    for other in others:
        assert first.same_layout(other)
        assert first.strided == other.strided
    for strange in (t for other, types in SAME_LAYOUTS.items() if other != name for t in types):
        assert not first.same_layout(strange)


def test_forms_that_are_expected() -> None:
    forms = {name: types[0].strided for name, types in SAME_LAYOUTS.items()}
    assert forms == {
        "a face of a 3-d array": StridedBlocks(16, (20,), (48,), 8),
        "a contiguous run": StridedBlocks(0, (), (), 48),
        "first and last column, which touch from row to row": StridedBlocks(0, (3, 2), (32, 24), 8),
        "backwards": StridedBlocks(0, (4,), (-8,), 4),
        "nothing": StridedBlocks(0, (), (), 0),
        "irregular": None,
    }
    corner = subarray((8, 9, 10), (2, 3, 4), (1, 2, 3), "c16")
    assert corner.strided == StridedBlocks((90 + 20 + 3) * 16, (2, 3), (1440, 160), 64)


def test_equality_takes_bounds_and_signature_into_account() -> None:
    line = contiguous(4, "f8")
    assert line == vector(2, 2, 2, "f8") == dup(line)
    assert hash(line) == hash(vector(2, 2, 2, "f8"))
    assert line != resized(line, 0, 40)
    assert line != resized(line, 8, 32)
    assert line != contiguous(4, "i8")
    assert line != "f8"
    assert len({line, dup(line), contiguous(5, "f8")}) == 2


@pytest.mark.parametrize(
    ("made", "lb", "extent"),
    [
        # padding to the alignment of the primitives
        (struct([1, 1], [0, 8], ["f8", "i1"]), 0, 16),
        (struct([1, 1], [0, 8], ["c8", "i1"]), 0, 12),
        (struct([1, 1], [3, 11], ["f8", "i1"]), 3, 16),
        (struct([0, 1], [0, 16], ["f8", "i1"]), 16, 1),
        (contiguous(2, struct([1, 1], [0, 8], ["f8", "i1"])), 0, 32),
        # explicit bounds: no padding, and precedence over the bounds of other parts
        (resized(struct([1, 1], [0, 8], ["f8", "i1"]), 0, 9), 0, 9),
        (struct([1, 1], [0, 100], [resized("f8", 0, 3), "i1"]), 0, 3),
        (struct([1, 1], [0, 200], [subarray((4, 5), (2, 3), (1, 1), "f8"), "i1"]), 0, 160),
        (contiguous(3, resized("f8", 4, 16)), 4, 48),
        # negative strides and extents
        (vector(3, 2, -4, "f8"), -64, 80),
        (contiguous(3, resized("f8", 0, -8)), -16, 8),
        # empty blocks, no block
        (indexed([0, 1], [-100, 20], "f8"), 160, 8),
        (struct([], [], []), 0, 0),
    ],
)
def test_bounds(made: Datatype, lb: int, extent: int) -> None:
    assert (made.lb, made.extent, made.ub) == (lb, extent, lb + extent)


PRIMITIVES = ["?", "i1", "u2", "i4", "f2", "f8", "g", "c16", "M8[ns]", "S5", "U3", "V16", ">f8"]


@pytest.mark.parametrize("dtype", PRIMITIVES)
def test_primitives(dtype: str) -> None:
    made = primitive(dtype)
    expected = np.dtype(dtype)
    assert (made.size, made.extent, made.lb) == (expected.itemsize, expected.itemsize, 0)
    assert made.elements == 1
    assert made.uniform == expected
    assert contiguous(7, made).uniform == expected
    assert struct([1, 1], [0, 64], [made, "u1"]).uniform is None


def test_structured_dtypes_are_structs_without_their_padding() -> None:
    dtype = np.dtype(
        [("a", "i1"), ("b", "f8", (2, 3)), ("c", [("d", "i2"), ("e", "f4")])], align=True
    )
    made = as_datatype(dtype)
    assert (made.lb, made.extent) == (0, dtype.itemsize)
    assert made.size == 1 + 48 + 2 + 4 < dtype.itemsize
    assert pairs(made.blocks()) == [(0, 1), (8, 50), (60, 4)]
    assert str(made.signature) == "i1 x 1, f8 x 6, i2 x 1, ... (3 of 4 runs)"
    assert as_datatype(np.dtype(("f8", (2, 3)))) == contiguous(6, "f8")
    packed = np.dtype([("a", "i1"), ("b", "f8")])
    assert as_datatype(packed).strided == StridedBlocks(0, (), (), 9)
    assert made is as_datatype(dtype)


@pytest.mark.parametrize("order", "CFK")
def test_slab_addresses_the_elements_numpy_addresses(order: Any) -> None:
    array = np.zeros((7, 8, 9), "i2").copy(order=order)
    views = (array, array[::-1, 1:, ::2], array.transpose(2, 0, 1)[:, ::3], array[1:2, :, ::-1])
    for view in views:
        starts = [n // 3 for n in view.shape]
        subsizes = [n - n // 3 for n in view.shape]
        made = slab(view.shape, view.strides, starts, subsizes, view.dtype)
        box = np.ix_(*(range(a, a + n) for a, n in zip(starts, subsizes, strict=True)))
        places = sum(at * step for at, step in zip(box, view.strides, strict=True))
        assert pairs(made.blocks()) == joined([(int(place), 2) for place in places.ravel()])


def test_slab_of_a_zero_dimensional_array() -> None:
    assert slab((), (), (), (), "f8") == primitive("f8")


FAILURES: list[tuple[Callable[[], Any], str]] = [
    (lambda: contiguous(-1, "f8"), "count"),
    (lambda: contiguous(2.0, "f8"), "count"),  # type: ignore[arg-type]
    (lambda: vector(2, -3, 1, "f8"), "blocklength"),
    (lambda: hvector(2, 3, None, "f8"), "stride_bytes"),  # type: ignore[arg-type]
    (lambda: indexed([1, 2], [0], "f8"), "blocklengths has 2, displacements has 1"),
    (lambda: indexed([1, -2], [0, 3], "f8"), r"blocklengths\[1\]"),
    (lambda: hindexed([1.5], [0], "f8"), "blocklengths"),  # type: ignore[list-item]
    (lambda: hindexed_block(1, [[0, 8]], "f8"), "one dimension"),  # type: ignore[list-item]
    (lambda: indexed_block(1, np.array([2**63], "u8"), "f8"), "64-bit"),
    (lambda: struct([1], [0], ["f8", "f4"]), "types"),
    (lambda: subarray((4, 4), (2, 3), (1, 2), "f8"), "axis 1: the box from 2 of 3 elements .* 4"),
    (lambda: subarray((4,), (0,), (1,), "f8"), "axis 0"),
    (lambda: subarray((), (), (), "f8"), "sizes"),
    (lambda: subarray((4,), (1, 1), (0,), "f8"), "subsizes"),
    (lambda: subarray((4,), (1,), (0,), "f8", order="A"), "order"),  # type: ignore[arg-type]
    (lambda: slab((4,), (8,), (2,), (3,), "f8"), "axis 0"),
    (lambda: resized("f8", 0, "8"), "extent"),  # type: ignore[arg-type]
    (lambda: primitive([("a", "f8")]), "primitive"),
    (lambda: as_datatype([("a", object)]), "outside the array"),
    (lambda: as_datatype("S"), "0 bytes"),
    (lambda: as_datatype(None), "None"),
    (lambda: contiguous(2, "f8").blocks(-1), "count"),
]


@pytest.mark.parametrize(("call", "named"), FAILURES)
def test_errors_name_the_argument(call: Callable[[], Any], named: str) -> None:
    with pytest.raises(DatatypeError, match=named):
        call()


def test_arguments_are_copied_and_results_read_only() -> None:
    displacements = np.array([0, 5, 6])
    made = indexed_block(1, displacements, "f8")
    displacements[:] = 0
    blocks = made.blocks()
    assert blocks.offsets.tolist() == [0, 40]
    for values in (blocks.offsets, blocks.lengths, made.arguments[1]):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1


def test_text() -> None:
    assert repr(vector(2, 3, 4, "f8")) == "<Datatype vector(2, 3, 4, f8): 48 bytes, extent 56>"
    long = indexed(range(9), range(9), resized("i4", 0, 8))
    assert "[0, 1, 2, ... 9 in all]" in long.describe()


def test_building_a_large_subarray_expands_nothing() -> None:
    made = subarray((2**20, 2**20, 64), (2**20, 2**20, 1), (0, 0, 1), "f8")
    assert made.strided == StridedBlocks(8, (2**40,), (512,), 8)
