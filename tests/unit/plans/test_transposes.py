"""Boxes between two decompositions of a grid: every cell is sent once, from its old to its new owner."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.datatypes import slab
from halox.decomposition import FieldLayout, FieldSpec, decompose
from halox.errors import DecompositionError, FieldError
from halox.plans.transpose import (
    TransposeEnd,
    check_same_field,
    check_same_grid,
    common_axes,
    inverse_axes,
    memory_order,
    normalise_axes,
    overlaps,
    transpose_draft,
)
from halox.runtime.arrays import describe, share_memory
from tests.oracle import Case, Field, factorisations
from tests.support import trials
from tests.unit.plans.by_regions import layouts

POISON = -1


def cut(draw: st.DrawFn, cells: int, parts: int) -> tuple[int, ...]:
    bounds = sorted(draw(st.permutations(range(1, cells)))[: parts - 1])
    return tuple(b - a for a, b in pairwise([0, *bounds, cells]))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Case, Case, tuple[int, ...]]:
    """Two divisions of a grid among the same ranks, each with the layout of a field; and an order of axes.

    Axis k of the second is axis axes[k] of the first.
    """
    ndim = draw(st.integers(1, 4))
    ranks = draw(st.sampled_from((1, 2, 3, 4, 6, 8, 12)))
    axes = tuple(draw(st.permutations(range(ndim))))
    first, second = (draw(st.sampled_from(factorisations(ranks, ndim))) for _ in "ab")
    of_second = inverse_axes(axes)
    shape = [
        draw(st.integers(max(first[i], second[of_second[i]]), max(ranks, (20, 9, 5, 4)[ndim - 1])))
        for i in range(ndim)
    ]
    components = draw(st.lists(st.integers(1, 3), max_size=3))
    flags = st.tuples(*[st.booleans()] * ndim)
    periodic, staggered = draw(flags), draw(flags)

    def divided(procs: tuple[int, ...], order: tuple[int, ...]) -> Case:
        before = draw(st.integers(0, len(components)))
        widths = tuple(draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in order)
        parts = tuple(components[:before]), tuple(components[before:])
        f = Field(np.dtype("i8"), widths, *parts, tuple(staggered[axis] for axis in order))
        blocks = tuple(cut(draw, shape[axis], p) for axis, p in zip(order, procs, strict=True))
        case = Case(blocks, tuple(periodic[axis] for axis in order), [f])
        case.order = tuple(draw(st.permutations(range(ranks))))
        return case

    return divided(first, tuple(range(ndim))), divided(second, axes), axes


def laid_out(
    shape: tuple[int, ...], order: tuple[int, ...], flipped: tuple[bool, ...]
) -> np.ndarray:
    """Return an array filled with POISON, with a given order and direction of its axes in memory."""
    memory = np.full([shape[axis] for axis in order], POISON)
    array = memory.transpose(np.argsort(order))
    return array[tuple(slice(None, None, -1 if flip else 1) for flip in flipped)]


@settings(max_examples=trials(150), print_blob=True)
@given(pairs(), st.data())
def test_messages_carry_the_field_whatever_the_strides(
    pair: tuple[Case, Case, tuple[int, ...]], data: st.DataObject
) -> None:
    """NumPy packs with the sender's datatype and unpacks with the receiver's, for all ranks in one process."""
    *cases, axes = pair
    ours, theirs = (layouts(case, case.fields[0]) for case in cases)
    back = inverse_axes(axes)
    natural = tuple(range(len(axes)))
    components = cases[0].fields[0].before + cases[0].fields[0].after
    ids = np.arange(int(np.prod(ours[0].global_shape))).reshape(
        components + tuple(n for n in plain_shape(ours[0]))
    )

    def array_of(layout: FieldLayout) -> np.ndarray:
        ndim = len(layout.padded_shape)
        order = tuple(data.draw(st.permutations(range(ndim))))
        flipped = data.draw(st.tuples(*[st.booleans()] * ndim))
        return laid_out(layout.padded_shape, order, flipped)

    def cells(layout: FieldLayout, axes: tuple[int, ...]) -> np.ndarray:
        """Return a rank's interior: leading components, the axes of this grid, trailing components."""
        whole = ids.transpose(*range(len(components)), *(len(components) + axis for axis in axes))
        piece = whole[(slice(None),) * len(components) + layout.owned]
        behind = len(layout.spec.components_after)
        ahead = len(components) - behind
        places = (*range(ahead), *range(ahead + behind, piece.ndim), *range(ahead, ahead + behind))
        return piece.transpose(places)

    sources, targets = (
        [array_of(layout) for layout in ours],
        [array_of(layout) for layout in theirs],
    )
    for layout, array in zip(ours, sources, strict=True):
        array[layout.interior] = cells(layout, natural)
    walk = memory_order(describe(sources[0]), common_axes(ours[0].spec, natural))
    mail, drafts = {}, []
    for rank, (u, v) in enumerate(zip(sources, targets, strict=True)):
        draft = transpose_draft(
            TransposeEnd(
                u,
                overlaps(ours[rank], theirs[0].decomposition, back),
                common_axes(ours[rank].spec, natural),
            ),
            TransposeEnd(
                v,
                overlaps(theirs[rank], ours[0].decomposition, axes),
                common_axes(theirs[rank].spec, back),
            ),
            walk,
        )
        drafts.append(draft)
        for message in draft.sends:
            (part,) = message.parts
            mail[rank, message.peer] = (
                flat(u)[element_index(part.datatype, u)],
                part.datatype.signature,
            )
    for rank, draft in enumerate(drafts):
        for message in draft.receives:
            (part,) = message.parts
            values, signature = mail.pop((message.peer, rank))
            assert signature == part.datatype.signature
            flat(targets[rank])[element_index(part.datatype, targets[rank])] = values
    assert not mail
    for layout, array in zip(theirs, targets, strict=True):
        wanted = np.full(layout.padded_shape, POISON)
        wanted[layout.interior] = cells(layout, axes)
        assert np.array_equal(array, wanted)


def plain_shape(layout: FieldLayout) -> tuple[int, ...]:
    first = len(layout.spec.components_before)
    return layout.global_shape[first : first + layout.spec.ndim]


def flat(array: np.ndarray) -> np.ndarray:
    memory = array
    while memory.base is not None:
        memory = memory.base
    return memory.reshape(-1)


def element_index(datatype: object, array: np.ndarray) -> np.ndarray:
    """Return the indices in memory of the elements that a datatype touches, in its order."""
    blocks = datatype.blocks()  # type: ignore[attr-defined]
    start = array.__array_interface__["data"][0] - flat(array).__array_interface__["data"][0]
    size = array.itemsize
    pieces = [
        np.arange(offset, offset + length, size)
        for offset, length in zip(blocks.offsets, blocks.lengths, strict=True)
    ]
    places, rest = np.divmod(np.concatenate(pieces) + start, size)
    assert not rest.any()
    return places


def test_pencils_that_keep_a_cut_talk_within_a_row_of_ranks() -> None:
    x = decompose((8, 8, 8), 8, proc_shape=(1, 2, 4))
    y = decompose((8, 8, 8), 8, proc_shape=(2, 1, 4))
    none = FieldSpec(((0, 0),) * 3)
    for rank in range(8):
        peers = [o.peer for o in overlaps(FieldLayout(x, rank, none), y, (0, 1, 2))]
        assert peers == [rank % 4, rank % 4 + 4]


def test_many_ranks_cost_no_more_than_the_peers() -> None:
    """A rank exchanges with 128 of 16,384 ranks; the search visits parts of axes, never all ranks."""
    a, b = (decompose((1024,) * 3, 128 * 128, proc_shape=p) for p in ((1, 128, 128), (128, 1, 128)))
    found = overlaps(FieldLayout(a, 4711, FieldSpec(((0, 0),) * 3)), b, (0, 1, 2))
    assert len(found) == 128


@pytest.mark.parametrize("axes", [(0,), (0, 0), (1, 2), "xy", (0.0, 1.0), 1])
def test_axes_that_are_no_order(axes: object) -> None:
    with pytest.raises(DecompositionError):
        normalise_axes(axes, 2)


def test_grids_of_other_cells() -> None:
    a, b = decompose((4, 6), 1), decompose((6, 4), 1)
    check_same_grid(a, b, (1, 0))
    for other, axes in ((b, (0, 1)), (a, (1, 0))):
        with pytest.raises(DecompositionError):
            check_same_grid(a, other, axes)


def layout(periodic: tuple[bool, bool] = (False, False), **spec: tuple) -> FieldLayout:
    return FieldLayout(decompose((4, 6), 1, periodic=periodic), 0, FieldSpec(((0, 0),) * 2, **spec))


def test_arrays_that_are_not_the_same_field() -> None:
    split = layout(components_before=(2,), components_after=(3,))
    check_same_field(layout(components_after=(2, 3)), split, (0, 1))
    u = layout(staggered=(True, False))
    check_same_field(u, u, (0, 1))
    wraps = layout((True, False), staggered=(True, False))
    for a, b, axes in (
        (layout(components_after=(3, 2)), split, (0, 1)),
        (u, u, (1, 0)),
        (u, wraps, (0, 1)),
    ):
        with pytest.raises(FieldError):
            check_same_field(a, b, axes)


def test_memory_order() -> None:
    array = np.zeros((3, 4, 5)).transpose(2, 0, 1)[:, ::-1]
    assert memory_order(describe(array), (0, 1, 2)) == (1, 2, 0)
    assert memory_order(describe(array), (2, 0, 1)) == (2, 0, 1)
    assert memory_order(describe(np.zeros((3, 4), order="F")), (0, 1)) == (1, 0)


def test_runs_are_long_where_both_arrays_lie_alike() -> None:
    """The packed order follows the order in memory, so that Fortran arrays are not packed element by element."""
    rows, columns = (decompose((16, 16), 4, proc_shape=p) for p in ((4, 1), (1, 4)))
    none = FieldSpec(((0, 0),) * 2)
    for order in "CF":
        u, v = np.zeros((4, 16), order=order), np.zeros((16, 4), order=order)
        walk = memory_order(describe(u), (0, 1))
        draft = transpose_draft(
            TransposeEnd(u, overlaps(FieldLayout(rows, 0, none), columns, (0, 1)), (0, 1)),
            TransposeEnd(v, overlaps(FieldLayout(columns, 0, none), rows, (0, 1)), (0, 1)),
            walk,
        )
        # A box has 4 x 4 cells. Its rows (or columns) are 32 bytes; contiguous ones merge to longer blocks.
        assert min(m.block_bytes for m in (*draft.sends, *draft.receives)) >= 32


def test_shared_memory_is_seen_exactly() -> None:
    memory = np.zeros((6, 8), "c16")
    pairs = [
        (memory, memory, True),
        (memory, memory.T, True),
        (memory[:3], memory[3:], False),
        (memory[:4], memory[3:], True),
        (memory[:, ::2], memory[:, 1::2], False),
        (memory[:, ::-2], memory[:, 1:2], True),
        (memory.real, memory.imag, False),
        (memory, np.zeros((6, 8), "c16"), False),
    ]
    for a, b, shared in pairs:
        assert share_memory(describe(a), describe(b)) == shared == np.shares_memory(a, b)


def test_the_slab_of_permuted_axes_is_packed_in_their_order() -> None:
    """A slab packs its elements in the order of its axes, so that senders can choose the packed order."""
    array = np.arange(24).reshape(2, 3, 4)
    strides = [array.strides[axis] for axis in (2, 0, 1)]
    found = slab((4, 2, 3), strides, (0, 0, 0), (4, 2, 3), array.dtype)
    packed = array.reshape(-1)[element_index(found, array)]
    assert np.array_equal(packed, array.transpose(2, 0, 1).reshape(-1))
