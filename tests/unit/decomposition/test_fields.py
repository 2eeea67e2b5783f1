"""Layouts of fields; halo regions exchanged box by box in plain NumPy."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from halox.decomposition import (
    AxisPartition,
    Box,
    Decomposition,
    FieldLayout,
    FieldSpec,
    Placement,
    decompose,
    place,
)
from halox.decomposition.field_regions import Region, check_widths, exchange_regions, exchange_slabs
from halox.errors import DecompositionError
from tests.oracle import Case, Field
from tests.strategies import cells
from tests.support import trials
from tests.unit.plans.by_regions import check, layouts

Regions = tuple[Region, ...]


def one_field(
    blocks: tuple[tuple[int, ...], ...],
    periodic: tuple[bool, ...],
    halo: Any,
    staggered: tuple[bool, ...],
    before: tuple[int, ...] = (),
    after: tuple[int, ...] = (),
) -> Case:
    return Case(blocks, periodic, [Field(np.dtype("i8"), halo, before, after, staggered)])


def in_stages(ranks: list[FieldLayout]) -> list[list[Regions]]:
    """Split each rank's slabs into stages: copies within the rank, axis by axis, then messages between ranks."""
    stages: list[list[Regions]] = [[] for _ in range(ranks[0].decomposition.ndim + 1)]
    for layout in ranks:
        slabs, order = exchange_slabs(layout), []
        for region in slabs:
            across = [axis for axis, side in enumerate(region.direction) if side]
            order.append(across[0] if region.peer == layout.rank else len(stages) - 1)
            assert region.peer != layout.rank or len(across) == 1
        assert order == sorted(order)
        for number, stage in enumerate(stages):
            stage.append(tuple(s for s, at in zip(slabs, order, strict=True) if at == number))
    return stages


def check_all(case: Case) -> None:
    """Check regions with corners and without, and slabs in stages; each point of the grid has one owner."""
    ranks = layouts(case, case.fields[0])
    times_owned = np.zeros(ranks[0].global_shape, int)
    for layout in ranks:
        check_widths(layout)
        times_owned[(slice(None),) * len(case.fields[0].before) + layout.owned] += 1
    assert (times_owned == 1).all()
    whole = replace(case, corners=True)
    check(replace(case, corners=False))
    check(whole)
    if not case.fields[0].offsets:
        check(whole, in_stages)


@pytest.mark.parametrize(
    ("procs", "periodic", "pieces"),
    [
        ((1, 1, 1), True, 6),
        ((1, 1, 2), True, 6),
        ((1, 2, 2), True, 10),
        ((2, 2, 2), True, 26),
        ((1, 1, 1), (True, False, True), 4),
        ((2, 1, 1), (False, True, False), 3),
        ((1, 1), True, 4),
        ((2, 1), True, 4),
    ],
)
def test_slabs_are_few(
    procs: tuple[int, ...], periodic: bool | tuple[bool, ...], pieces: int
) -> None:
    ndim = len(procs)
    domain = decompose((8,) * ndim, int(np.prod(procs)), periodic=periodic, proc_shape=procs)
    layout = FieldLayout(domain, 0, FieldSpec(((1, 1),) * ndim))
    assert len(exchange_slabs(layout)) == pieces


def widest(sizes: tuple[int, ...], periodic: bool, staggered: bool) -> tuple[int, int]:
    """Return the widest low and high halo, from the neighbours of every part."""
    parts = len(sizes)
    low, high = 3, 3  # a side without neighbours has no limit
    for part in range(parts):
        if part > 0 or periodic:
            low = min(low, sizes[part - 1])
        if part < parts - 1 or periodic:
            above = (part + 1) % parts
            extra_point = staggered and above == parts - 1 and not periodic
            high = min(high, sizes[above] + extra_point - staggered)
    return low, high


@settings(max_examples=trials(200), print_blob=True)
@given(st.integers(1, 8).flatmap(partial(cells, dtypes=["i8"])), st.randoms(use_true_random=False))
def test_random_exchanges_fill_every_halo_point(case: Case, random: Random) -> None:
    ranks = math.prod(case.procs)
    event(f"{len(case.blocks)} axes, {ranks} ranks")
    case.order = tuple(random.sample(range(ranks), ranks))
    del case.fields[1:]
    check_all(case)


NAMED_CASES = {
    "one rank, open: nothing moves": one_field(((5,),), (False,), ((2, 9),), (False,)),
    "two ranks, periodic, staggered": one_field(((3, 4),), (True,), ((3, 2),), (True,)),
    "axes of one cell": one_field(((1,), (1, 1), (1,)), (True,) * 3, ((1, 1),) * 3, (False,) * 3),
    "no halo, staggered": one_field(
        ((2, 2), (2, 2)), (True, False), ((0, 0), (0, 0)), (True, True)
    ),
    "whole blocks": one_field(((2, 2, 2),), (True,), ((2, 2),), (False,)),
    "eight ranks, four axes": one_field(
        ((2, 1), (1, 2), (2, 2), (3,)), (True, False, True, True), ((1, 1),) * 4, (False,) * 4
    ),
}


@pytest.mark.parametrize("case", NAMED_CASES.values(), ids=NAMED_CASES)
def test_exchange_fills_every_halo_point(case: Case) -> None:
    check_all(case)


def test_layout_of_a_field_worked_by_hand() -> None:
    domain = decompose((10, 8), 4, periodic=(True, False), proc_shape=(2, 2))
    spec = FieldSpec(((1, 2), (2, 1)), (4,), (3,), (False, True))
    layout = FieldLayout(domain, 2, spec)  # coords (1, 0)
    assert layout.padded_shape == (4, 1 + 5 + 2, 2 + 4 + 1 + 1, 3)
    assert layout.origin == (4, -2)
    assert layout.interior == (slice(None), slice(1, 6), slice(2, 6), slice(None))
    assert layout.owned == (slice(5, 10), slice(0, 4))
    assert layout.global_shape == (4, 10, 9, 3)
    regions = {region.direction: region for region in exchange_regions(layout)}
    # Axis 1 is not periodic, so that no neighbour is below.
    assert list(regions) == [(-1, 0), (-1, 1), (0, 1), (1, 0), (1, 1)]
    assert regions[0, 1].peer == 3
    assert regions[0, 1].send == Box((0, 1, 4, 0), (4, 5, 2, 3))  # its low halo: 2 wide
    assert regions[0, 1].recv == Box((0, 1, 6, 0), (4, 5, 2, 3))  # 1 wide, and the shared point
    assert regions[1, 1].recv == Box((0, 6, 6, 0), (4, 2, 2, 3))
    upper = FieldLayout(domain, 3, spec)
    assert upper.padded_shape == layout.padded_shape
    assert upper.owned == (slice(5, 10), slice(4, 9))  # it owns the last point


def test_regions_follow_the_neighbours_even_where_nothing_moves() -> None:
    domain = decompose((6, 6), 4, periodic=True)
    layout = FieldLayout(domain, 0, FieldSpec(((0, 0), (1, 0))))
    for corners in (True, False):
        regions = exchange_regions(layout, corners)
        assert [(r.direction, r.peer) for r in regions] == [
            (n.direction, n.rank) for n in domain.neighbours(0, corners)
        ]
    moved = {
        r.direction: (r.send is not None, r.recv is not None) for r in exchange_regions(layout)
    }
    assert moved[(0, -1)] == (False, True) and moved[(0, 1)] == (True, False)
    assert moved[(1, 0)] == moved[(1, 1)] == (False, False)


@settings(max_examples=trials(200), print_blob=True)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple), st.booleans(), st.booleans())
def test_a_layout_is_wide_unless_every_neighbour_can_fill_its_side(
    sizes: tuple[int, ...], periodic: bool, staggered: bool
) -> None:
    allowed = widest(sizes, periodic, staggered)
    exchanges = periodic or len(sizes) > 1
    for low, high in product(range(4), repeat=2):
        case = one_field((sizes,), (periodic,), ((low, high),), (staggered,))
        fits = not exchanges or (low <= allowed[0] and high <= allowed[1])
        assert {layout.is_wide for layout in layouts(case, case.fields[0])} == {
            not fits
        }  # equal on all ranks


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"parity": "odd", "staggered": (True,)}, "checkerboard"),
        ({"offsets": (1, 3)}, "reaches 3 cells"),
    ],
)
def test_a_spec_that_no_field_can_have_is_refused(arguments: dict, text: str) -> None:
    with pytest.raises(DecompositionError, match=text):
        FieldSpec(**{"halo": ((1, 1),), **arguments})


def test_equal_specs_have_one_digest_and_unlike_ones_others() -> None:
    ones = ((1, 1), (1, 1))
    specs = [
        FieldSpec(ones),
        FieldSpec(((1, 1), (2, 0))),
        FieldSpec(ones, (3,)),
        FieldSpec(ones, (), (3,)),
        FieldSpec(ones, staggered=(True, False)),
        FieldSpec(ones, staggered=(False, True)),
        FieldSpec(ones, parity="even"),
        FieldSpec(ones, parity="odd"),
        FieldSpec(ones, parity="odd", offsets=(1,)),
    ]
    digests = [spec.digest for spec in specs]
    assert len(set(digests)) == len(specs)
    assert FieldSpec(ones, (), (), (False, False)).digest == digests[0]


def test_decomposition_refuses_what_does_not_fit() -> None:
    axes = (AxisPartition.even(6, 2, True), AxisPartition.even(6, 3, True))
    with pytest.raises(DecompositionError):
        Decomposition(axes, Placement.by_rank((3, 2)))
    domain = Decomposition(axes, place((2, 3), (True, True), (1, 1), [0, 1] * 3))
    for rank in range(6):
        assert domain.rank_at(domain.coords_of(rank)) == rank
        assert domain.rank_at([c - 6 for c in domain.coords_of(rank)]) == rank
