"""Boxes between two decompositions of a grid: every cell is sent once, from its old to its new owner."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.datatypes import slab
from halox.decomposition import (
    AxisPartition,
    Decomposition,
    FieldLayout,
    FieldSpec,
    Placement,
    check_same_field,
    check_same_grid,
    common_axes,
    decompose,
    inverse_axes,
    normalise_axes,
    overlaps,
)
from halox.errors import DecompositionError, FieldError
from halox.exchange.transpose import TransposeEnd, memory_order, transpose_draft
from halox.runtime.arrays import describe, share_memory
from tests.support import trials

POISON = -1


@dataclass(frozen=True)
class Half:
    """One decomposition, as lists of block sizes per axis, and the layout of a field on it."""

    blocks: tuple[tuple[int, ...], ...]
    halo: tuple[tuple[int, int], ...]
    order: tuple[int, ...]  # rank of each block in C order
    before: tuple[int, ...]
    after: tuple[int, ...]

    def layouts(self, periodic: tuple[bool, ...], staggered: tuple[bool, ...]) -> list[FieldLayout]:
        axes = tuple(map(AxisPartition.from_blocks, self.blocks, periodic))
        shape = tuple(map(len, self.blocks))
        placement = Placement(shape, self.order, "shuffled", 1, 0, 0)
        spec = FieldSpec(self.halo, self.before, self.after, staggered)
        domain = Decomposition(axes, placement)
        return [FieldLayout(domain, rank, spec) for rank in range(domain.ranks)]


@dataclass(frozen=True)
class Case:
    """Two decompositions of one grid; axis k of the second is axis axes[k] of the first."""

    a: Half
    b: Half
    axes: tuple[int, ...]
    periodic: tuple[bool, ...]
    staggered: tuple[bool, ...]

    def layouts(self) -> tuple[list[FieldLayout], list[FieldLayout]]:
        turned = [
            tuple(flags[axis] for axis in self.axes) for flags in (self.periodic, self.staggered)
        ]
        return self.a.layouts(self.periodic, self.staggered), self.b.layouts(*turned)


def factors(draw: st.DrawFn, ranks: int, ndim: int) -> list[int]:
    found = []
    for _ in range(ndim - 1):
        n = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
        found.append(n)
        ranks //= n
    return draw(st.permutations([*found, ranks]))


def cut(draw: st.DrawFn, cells: int, parts: int) -> tuple[int, ...]:
    inner = range(1, cells)
    bounds = sorted(draw(st.permutations(inner))[: parts - 1])
    edges = [0, *bounds, cells]
    return tuple(b - a for a, b in pairwise(edges))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ndim = draw(st.integers(1, 4))
    ranks = draw(st.sampled_from((1, 2, 3, 4, 6, 8, 12)))
    axes = tuple(draw(st.permutations(range(ndim))))
    procs_a, procs_b = factors(draw, ranks, ndim), factors(draw, ranks, ndim)
    of_b = inverse_axes(axes)
    shape = [
        draw(st.integers(max(procs_a[i], procs_b[of_b[i]]), max(ranks, (20, 9, 5, 4)[ndim - 1])))
        for i in range(ndim)
    ]
    components = draw(st.lists(st.integers(1, 3), max_size=3))

    def half(procs: list[int], cells: list[int]) -> Half:
        first = draw(st.integers(0, len(components)))
        widths = st.tuples(st.integers(0, 2), st.integers(0, 2))
        return Half(
            tuple(cut(draw, n, p) for n, p in zip(cells, procs, strict=True)),
            tuple(draw(widths) for _ in cells),
            tuple(draw(st.permutations(range(ranks)))),
            tuple(components[:first]),
            tuple(components[first:]),
        )

    flags = st.tuples(*[st.booleans()] * ndim)
    return Case(
        half(procs_a, shape),
        half(procs_b, [shape[axis] for axis in axes]),
        axes,
        draw(flags),
        draw(flags),
    )


def laid_out(
    shape: tuple[int, ...], order: tuple[int, ...], flipped: tuple[bool, ...]
) -> np.ndarray:
    """Return an array filled with POISON, with a given order and direction of its axes in memory."""
    memory = np.full([shape[axis] for axis in order], POISON)
    array = memory.transpose(np.argsort(order))
    return array[tuple(slice(None, None, -1 if flip else 1) for flip in flipped)]


@settings(max_examples=trials(150), print_blob=True)
@given(cases(), st.data())
def test_messages_carry_the_field_whatever_the_strides(case: Case, data: st.DataObject) -> None:
    """NumPy packs with the sender's datatype and unpacks with the receiver's, for all ranks in one process."""
    ours, theirs = case.layouts()
    back = inverse_axes(case.axes)
    natural = tuple(range(len(case.axes)))
    components = case.a.before + case.a.after
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
                overlaps(theirs[rank], ours[0].decomposition, case.axes),
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
        wanted[layout.interior] = cells(layout, case.axes)
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


@pytest.mark.parametrize("axes", [(0,), (0, 0), (1, 2), (0, 1, 2), "xy", (0.0, 1.0), 1])
def test_axes_that_are_no_order(axes: object) -> None:
    with pytest.raises(DecompositionError):
        normalise_axes(axes, 2)


def test_grids_of_other_cells() -> None:
    a = decompose((4, 6), 1)
    check_same_grid(a, decompose((6, 4), 1), (1, 0))
    with pytest.raises(DecompositionError):
        check_same_grid(a, decompose((6, 4), 1), (0, 1))
    with pytest.raises(DecompositionError):
        check_same_grid(a, decompose((4, 6), 1), (1, 0))


def layout(periodic: tuple[bool, bool] = (False, False), **spec: tuple) -> FieldLayout:
    return FieldLayout(decompose((4, 6), 1, periodic=periodic), 0, FieldSpec(((0, 0),) * 2, **spec))


def test_arrays_that_are_not_the_same_field() -> None:
    split = {"components_before": (2,), "components_after": (3,)}
    check_same_field(layout(components_after=(2, 3)), layout(**split), (0, 1))
    with pytest.raises(FieldError):
        check_same_field(layout(components_after=(3, 2)), layout(**split), (0, 1))
    u = layout(staggered=(True, False))
    check_same_field(u, u, (0, 1))
    with pytest.raises(FieldError):
        check_same_field(u, u, (1, 0))
    wraps = layout((True, False), staggered=(True, False))
    with pytest.raises(FieldError):
        check_same_field(u, wraps, (0, 1))


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
