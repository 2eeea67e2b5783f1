"""Exchanges by the regions of layouts, in plain NumPy, for all ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from halox.decomposition import AxisPartition, Decomposition, FieldLayout, FieldSpec, Placement
from halox.decomposition.connections import normalise_connect
from halox.decomposition.field_regions import Region, check_widths, exchange_regions, walls_of
from halox.domain.options import field_spec
from tests.oracle import Case, Field, expected, same_values, whole_values

Moves = Callable[[list[FieldLayout]], list[list[Sequence[Region]]]]


def layouts(case: Case, f: Field) -> list[FieldLayout]:
    """Return the layouts of a field on all ranks."""
    axes = tuple(map(AxisPartition.from_blocks, case.blocks, case.periodic))
    placement = Placement.by_rank(case.procs)
    if case.order is not None:
        placement = Placement(case.procs, case.order, "shuffled", 1, 0, 0)
    domain = Decomposition(axes, placement)
    if case.connect:
        joined = normalise_connect(case.connect, case.shape, case.periodic)
        domain = replace(domain, joined=joined)
    spec = field_spec(f.options(), FieldSpec(f.halo), domain)
    return [FieldLayout(domain, rank, spec) for rank in range(domain.ranks)]


def move(
    ranks: list[FieldLayout], arrays: list[np.ndarray], regions: Sequence[Sequence[Region]]
) -> None:
    """Copy box by box; a box sent in direction d is received from direction -d, in the same order."""
    mail: dict[Any, list[np.ndarray]] = {}
    for layout, array, some in zip(ranks, arrays, regions, strict=True):
        for region in some:
            if region.send is not None:
                message = array[region.send.slices].copy()
                assert message.shape == region.send.subsizes  # no slice was truncated
                mail.setdefault((layout.rank, region.peer, region.direction), []).append(message)
    for layout, array, some in zip(ranks, arrays, regions, strict=True):
        times = np.zeros(array.shape, int)
        for region in some:
            if region.recv is not None:
                key = region.peer, layout.rank, tuple(-d for d in region.direction)
                target, message = array[region.recv.slices], mail[key].pop(0)
                assert message.shape == target.shape == region.recv.subsizes
                target[...] = message
                times[region.recv.slices] += 1
        assert times.max(initial=0) <= 1
        # Owned points are received on the line of a fold only.
        assert layout.decomposition.joined or not times[layout.interior].any()
    assert not any(mail.values())  # everything sent was received


def check(case: Case, moves: Moves | None = None) -> None:
    """Assert that the regions of each field fill every halo point that the grid has, and no others."""
    for number, f in enumerate(case.fields):
        ranks = layouts(case, f)
        whole = whole_values(case, f, number)
        wanted = [
            expected(case, f, layout.decomposition.coords_of(layout.rank), whole)
            for layout in ranks
        ]
        arrays = [one.before.copy() for one in wanted]
        first = (slice(None),) * len(f.before)
        for layout, array, one in zip(ranks, arrays, wanted, strict=True):
            check_widths(layout)
            assert layout.padded_shape == array.shape
            assert f.parity or layout.global_shape == whole.shape
            owned = np.zeros(array.shape, bool)
            owned[layout.interior] = True
            assert np.array_equal(owned, one.owned)
            assert f.parity or np.array_equal(array[layout.interior], whole[first + layout.owned])
        for stage in (
            moves(ranks)
            if moves
            else [[exchange_regions(one, case.corners, case.fixed) for one in ranks]]
        ):
            move(ranks, arrays, stage)
        for layout, array, one in zip(ranks, arrays, wanted, strict=True):
            if case.connect:
                for box in walls_of(layout, case.corners, case.fixed).negated:
                    array[box] *= -1
            assert same_values(array, one.after), (case, layout.rank)
