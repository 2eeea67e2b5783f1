"""Layouts of fields; halo regions exchanged box by box in plain NumPy."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from halox.decomposition import (
    FieldLayout,
    FieldSpec,
    decompose,
)
from halox.decomposition.field_regions import Region, check_widths, exchange_slabs
from tests.oracle import Case, Field
from tests.strategies import cells, checkerboards, some_axes
from tests.support import trials
from tests.unit.plans.by_regions import check, layouts

Regions = tuple[Region, ...]


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


@settings(max_examples=trials(200), print_blob=True)
@given(st.integers(1, 8).flatmap(partial(cells, dtypes=["i8"])), st.randoms(use_true_random=False))
def test_random_exchanges_fill_every_halo_point(case: Case, random: Random) -> None:
    ranks = math.prod(case.procs)
    event(f"{len(case.blocks)} axes, {ranks} ranks")
    case.order = tuple(random.sample(range(ranks), ranks))
    del case.fields[1:]
    check_all(case)


# Halos wider than blocks


def wide(
    blocks: tuple[tuple[int, ...], ...], periodic: tuple[bool, ...], halo: Any, **options: Any
) -> Case:
    return Case(blocks, periodic, [Field(np.dtype("i8"), halo, **options)])


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
