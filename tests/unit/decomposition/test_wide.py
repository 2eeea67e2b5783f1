"""Halos wider than blocks, exchanged box by box in plain NumPy, against an index map of the whole grid."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from halox.decomposition import FieldLayout
from halox.decomposition.field_regions import exchange_regions
from tests.oracle import Case, Field
from tests.strategies import cells, checkerboards, some_axes
from tests.support import trials
from tests.unit.plans.by_regions import check, layouts


def wide(
    blocks: tuple[tuple[int, ...], ...], periodic: tuple[bool, ...], halo: Any, **options: Any
) -> Case:
    return Case(blocks, periodic, [Field(np.dtype("i8"), halo, **options)])


def layouts_of(*args: Any, **options: Any) -> list[FieldLayout]:
    case = wide(*args, **options)
    return layouts(case, case.fields[0])


ONE_CELL_BLOCKS = wide(((1,) * 8,), (True,), ((8, 8),))
STAGGERED = wide(((1, 2, 1),), (True,), ((4, 4),), staggered=(True,))
OPEN = wide(((1, 2, 1), (2,)), (False, False), ((9, 3), (2, 3)))
RANDOM = st.integers(1, 8).flatmap(partial(cells, dtypes=["i8"], wide=True))


@settings(max_examples=trials(200), print_blob=True)
@example(ONE_CELL_BLOCKS)
@example(STAGGERED)
@example(OPEN)
@given(RANDOM | some_axes(RANDOM))
def test_random_exchanges_fill_every_halo_point_that_the_grid_has(case: Case) -> None:
    for f in case.fields:
        wide = {layout.is_wide for layout in layouts(case, f)}
        assert len(wide) == 1  # equal on all ranks
        event("wide" if wide == {True} else "ordinary")
    for corners in (True, False):
        check(replace(case, corners=corners))


@settings(max_examples=trials(100), print_blob=True)
@given(st.integers(1, 8).flatmap(partial(checkerboards, dtypes=["i8"], wide=True)))
def test_fields_of_one_parity_fill_wide_halos(case: Case) -> None:
    event("wide" if layouts(case, case.fields[0])[0].is_wide else "ordinary")
    check(case)


@settings(max_examples=trials(100), print_blob=True)
@given(RANDOM)
def test_the_wide_listing_of_ordinary_halos_has_the_ordinary_regions(case: Case) -> None:
    for layout, other in zip(*(layouts(case, case.fields[0]) for _ in "ab"), strict=True):
        if layout.is_wide:
            event("wide")
            return
        other.__dict__["is_wide"] = True
        for corners in (True, False):
            ordinary, listed = (
                [region for region in exchange_regions(one, corners) if region.send or region.recv]
                for one in (layout, other)
            )
            assert listed == ordinary


def test_regions_worked_by_hand() -> None:
    """Blocks of 2, 1 and 3 cells, with 4 halo cells on both sides, as drawn in `halox.decomposition.wide`."""
    middle = layouts_of(((2, 1, 3),), (True,), ((4, 4),))[1]
    received = {r.direction[0]: (r.peer, r.recv) for r in exchange_regions(middle) if r.recv}
    assert {d: (peer, box.starts[0], box.subsizes[0]) for d, (peer, box) in received.items()} == {
        -2: (2, 0, 2),
        -1: (0, 2, 2),
        1: (2, 5, 3),
        2: (0, 8, 1),
    }
    # Its single cell goes twice to each of the other ranks, once for each side of their halos.
    sent = [(r.peer, r.send) for r in exchange_regions(middle) if r.send]
    assert Counter(peer for peer, _ in sent) == {0: 2, 2: 2}
    assert {box.starts + box.subsizes for _, box in sent} == {(4, 1)}


def test_a_halo_of_one_period_has_a_message_to_each_rank_on_both_sides() -> None:
    for layout in layouts(ONE_CELL_BLOCKS, ONE_CELL_BLOCKS.fields[0]):
        regions = exchange_regions(layout)
        assert len(regions) == 16
        assert Counter(r.peer for r in regions) == dict.fromkeys(range(8), 2)


def test_only_the_halos_that_an_exchange_fills_make_a_layout_wide() -> None:
    assert layouts_of(((2, 2),), (True,), ((3, 3),))[0].is_wide
    assert not layouts_of(((2, 2),), (True,), ((3, 3),), offsets=(2,))[0].is_wide
    # No rank fills the low halo of the first block or the high halo of the last block.
    assert not layouts_of(((2, 3),), (False,), ((2, 3),))[0].is_wide


def test_a_cell_with_several_images_goes_once_to_each() -> None:
    """A periodic axis of one cell, and a halo of three periods."""
    (layout,) = layouts_of(((1,),), (True,), ((3, 2),))
    regions = exchange_regions(layout)
    assert [r.direction for r in regions if r.recv] == [(-3,), (-2,), (-1,), (1,), (2,)]
    assert {r.send.starts for r in regions if r.send} == {(3,)}
