"""Halos wider than blocks, exchanged box by box in plain NumPy, against the whole array padded by `numpy.pad`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from halox.decomposition import (
    PARITIES,
    AxisPartition,
    Decomposition,
    FieldLayout,
    FieldSpec,
    Placement,
    decompose,
)
from halox.decomposition.fields import Region
from halox.errors import DecompositionError
from tests.support import trials

POISON = -1


@dataclass(frozen=True)
class Case:
    """A grid as a list of block sizes per axis, and a field on it."""

    blocks: tuple[tuple[int, ...], ...]
    periodic: tuple[bool, ...]
    spec: FieldSpec

    def layouts(self) -> list[FieldLayout]:
        axes = tuple(map(AxisPartition.from_blocks, self.blocks, self.periodic))
        domain = Decomposition(axes, Placement.by_rank(tuple(map(len, self.blocks))))
        return [FieldLayout(domain, rank, self.spec) for rank in range(domain.ranks)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ndim = draw(st.integers(1, 3))
    largest, budget = (5, 3, 2)[ndim - 1], 8
    blocks, periodic, halo, staggered = [], [], [], []
    for _ in range(ndim):
        parts = draw(st.integers(1, budget))
        budget //= parts
        sizes = tuple(draw(st.lists(st.integers(1, largest), min_size=parts, max_size=parts)))
        wraps = draw(st.booleans())
        width = st.integers(0, sum(sizes) if wraps else sum(sizes) + 2)
        blocks.append(sizes)
        periodic.append(wraps)
        halo.append((draw(width), draw(width)))
        staggered.append(draw(st.booleans()))
    widths = [width for sides in halo for width in sides if width]
    offsets = ()
    if widths and draw(st.integers(0, 3)) == 0:
        offsets = (draw(st.integers(1, min(widths))),)
    components = tuple(draw(st.lists(st.integers(1, 2), max_size=1)))
    spec = FieldSpec(tuple(halo), components, (), tuple(staggered), None, offsets)
    return Case(tuple(blocks), tuple(periodic), spec)


def expected(case: Case, layout: FieldLayout, *, corners: bool) -> np.ndarray:
    """Return a rank's array after an exchange, cut from the whole field padded by NumPy."""
    spec, decomposition = case.spec, layout.decomposition
    before = len(spec.components_before)
    shape = layout.global_shape
    values = np.arange(np.prod(shape)).reshape(shape)
    outside = np.zeros(layout.padded_shape, int)
    for axis, (low, high) in enumerate(spec.halo):
        at, staggered = before + axis, spec.staggered[axis]
        pad = [(0, 0)] * values.ndim
        pad[at] = (low, high + (staggered and case.periodic[axis]))
        if case.periodic[axis]:
            values = np.pad(values, pad, mode="wrap")
        else:
            values = np.pad(values, pad, constant_values=POISON)
        start, stop = decomposition.owned(layout.rank)[axis]
        cut = slice(start, low + stop + staggered + high)
        values = values[(slice(None),) * at + (cut,)]
        # Points outside the block along this axis: 1 in the exchanged halo, 9 in the rest of the halo.
        reach = max(spec.offsets, default=low + high)
        owned = layout.owned[axis]
        points = np.arange(start - low, stop + staggered + high)
        above = owned.stop - 1 + (owned.stop == stop and staggered)
        far = (points < owned.start - reach) | (points > above + reach)
        one = np.where((points < owned.start) | (points >= owned.stop), 1, 0) + 8 * far
        outside += one.reshape([-1 if n == at else 1 for n in range(values.ndim)])
    most = len(spec.halo) if corners and not spec.offsets else 1
    return np.where(outside <= most, values, POISON)


def move(layouts: list[FieldLayout], arrays: list[np.ndarray], regions: list[list[Region]]) -> None:
    """Copy box by box; a box sent in direction d is received from direction -d, in the same order."""
    mail: dict[object, list[np.ndarray]] = {}
    for layout, array, some in zip(layouts, arrays, regions, strict=True):
        for region in some:
            if region.send is not None:
                key = layout.rank, region.peer, region.direction
                mail.setdefault(key, []).append(array[region.send.slices].copy())
    for layout, array, some in zip(layouts, arrays, regions, strict=True):
        for region in some:
            if region.recv is not None:
                key = region.peer, layout.rank, tuple(-d for d in region.direction)
                target, message = array[region.recv.slices], mail[key].pop(0)
                assert message.shape == target.shape == region.recv.subsizes
                assert (target == POISON).all()  # received once at most, and never if owned
                target[...] = message
    assert not any(mail.values())  # everything sent was received


ONE_CELL_BLOCKS = Case(((1,) * 8,), (True,), FieldSpec(((8, 8),)))
STAGGERED = Case(((1, 2, 1),), (True,), FieldSpec(((4, 4),), staggered=(True,)))
OPEN = Case(((1, 2, 1), (2,)), (False, False), FieldSpec(((9, 3), (2, 3))))


@settings(max_examples=trials(400), print_blob=True)
@example(ONE_CELL_BLOCKS)
@example(STAGGERED)
@example(OPEN)
@given(cases())
def test_random_exchanges_fill_every_halo_point_that_the_grid_has(case: Case) -> None:
    layouts = case.layouts()
    wide = {layout.is_wide for layout in layouts}
    assert len(wide) == 1  # equal on all ranks
    event("wide" if wide == {True} else "ordinary")
    for corners in (True, False):
        arrays = []
        for layout in layouts:
            layout.check_widths()
            array = np.full(layout.padded_shape, POISON)
            ids = np.arange(np.prod(layout.global_shape)).reshape(layout.global_shape)
            skipped = (slice(None),) * len(case.spec.components_before)
            array[layout.interior] = ids[skipped + layout.owned]
            arrays.append(array)
        move(layouts, arrays, [layout.regions(corners) for layout in layouts])
        for layout, array in zip(layouts, arrays, strict=True):
            assert np.array_equal(array, expected(case, layout, corners=corners))


@settings(max_examples=trials(100), print_blob=True)
@given(cases())
def test_the_wide_listing_of_ordinary_halos_has_the_ordinary_regions(case: Case) -> None:
    for layout, other in zip(case.layouts(), case.layouts(), strict=True):
        if layout.is_wide:
            event("wide")
            return
        other.__dict__["is_wide"] = True
        for corners in (True, False):
            ordinary, listed = (
                [region for region in one.regions(corners) if region.send or region.recv]
                for one in (layout, other)
            )
            assert listed == ordinary


@settings(max_examples=trials(100), print_blob=True)
@given(st.data())
def test_fields_of_one_parity_fill_wide_halos(data: st.DataObject) -> None:
    rows = tuple(data.draw(st.lists(st.integers(1, 2), min_size=2, max_size=4)))
    if sum(rows) % 2:
        rows = (*rows, 1)
    columns = data.draw(st.sampled_from([(2, 2), (2, 4, 2), (6,)]))
    periodic = data.draw(st.booleans()), data.draw(st.booleans())
    halo = tuple(
        (data.draw(st.integers(0, sum(sizes))), data.draw(st.integers(0, sum(sizes))))
        for sizes in (rows, columns)
    )
    wanted = data.draw(st.sampled_from(PARITIES))
    case = Case((rows, columns), periodic, FieldSpec(halo, parity=wanted))
    layouts = case.layouts()
    event("wide" if layouts[0].is_wide else "ordinary")
    ids = np.arange(sum(rows) * sum(columns)).reshape(sum(rows), sum(columns))
    padded = ids
    for axis, wraps in enumerate(periodic):
        pad = [(0, 0), (0, 0)]
        pad[axis] = halo[axis]
        options = {"mode": "wrap"} if wraps else {"constant_values": POISON}
        padded = np.pad(padded, pad, **options)
    arrays, results = [], []
    for layout in layouts:
        array = np.full(layout.padded_shape, POISON)
        result = array.copy()
        (top, bottom), (left, right) = layout.decomposition.owned(layout.rank)
        for i, k in np.ndindex(*array.shape):
            x, pair = layout.origin[0] + i, layout.origin[1] + k
            y = 2 * pair + (x + PARITIES.index(wanted)) % 2
            if top <= x < bottom and left <= y < right:
                array[i, k] = ids[x, y]
            if left - halo[1][0] <= y < right + halo[1][1]:
                result[i, k] = padded[x + halo[0][0], y + halo[1][0]]
        arrays.append(array)
        results.append(result)
    move(layouts, arrays, [layout.regions() for layout in layouts])
    for array, result in zip(arrays, results, strict=True):
        assert np.array_equal(array, result)


def test_regions_worked_by_hand() -> None:
    """Blocks of 2, 1 and 3 cells, with 4 halo cells on both sides, as drawn in `halox.decomposition.wide`."""
    case = Case(((2, 1, 3),), (True,), FieldSpec(((4, 4),)))
    middle = case.layouts()[1]
    received = {r.direction[0]: (r.peer, r.recv) for r in middle.regions() if r.recv}
    assert {d: (peer, box.starts[0], box.subsizes[0]) for d, (peer, box) in received.items()} == {
        -2: (2, 0, 2),
        -1: (0, 2, 2),
        1: (2, 5, 3),
        2: (0, 8, 1),
    }
    # Its single cell goes twice to each of the other ranks, once for each side of their halos.
    sent = [(r.peer, r.send) for r in middle.regions() if r.send]
    assert Counter(peer for peer, _ in sent) == {0: 2, 2: 2}
    assert {box.starts + box.subsizes for _, box in sent} == {(4, 1)}


def test_a_halo_of_one_period_has_a_message_to_each_rank_on_both_sides() -> None:
    for layout in ONE_CELL_BLOCKS.layouts():
        regions = layout.regions()
        assert len(regions) == 16
        assert Counter(r.peer for r in regions) == dict.fromkeys(range(8), 2)


def test_only_the_halos_that_an_exchange_fills_make_a_layout_wide() -> None:
    assert Case(((2, 2),), (True,), FieldSpec(((3, 3),))).layouts()[0].is_wide
    assert not Case(((2, 2),), (True,), FieldSpec(((3, 3),), offsets=(2,))).layouts()[0].is_wide
    # No rank fills the low halo of the first block or the high halo of the last block.
    assert not Case(((2, 3),), (False,), FieldSpec(((2, 3),))).layouts()[0].is_wide


def test_a_halo_wider_than_a_periodic_axis_is_an_error() -> None:
    case = Case(((2, 2), (5, 1)), (False, True), FieldSpec(((5, 5), (1, 7))))
    text = (
        "halo: expected widths of 6 or less along axis 1, the extent of this periodic axis, got "
        "(1, 7) (low, high); use a narrower halo"
    )
    for layout in case.layouts():
        with pytest.raises(DecompositionError) as error:
            layout.check_widths()
        assert str(error.value) == text
    with pytest.raises(DecompositionError) as error:
        decompose((4, 6), 2, halo=(5, (1, 7)), periodic=(False, True))
    assert str(error.value) == text
    assert decompose((4, 6), 2, halo=(5, (1, 6)), periodic=(False, True)).ranks == 2
