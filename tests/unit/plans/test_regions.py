"""Regions of overlapped exchanges and deep halos, against counts of cells and distances on whole grids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from halox.decomposition import FieldLayout, FieldSpec, decompose, normalise_halo
from halox.decomposition.field_regions import exchange_regions
from halox.errors import FieldError
from halox.plans.regions import (
    Cells,
    overlap_regions,
    owned_cells,
)
from tests.oracle import Case
from tests.strategies import cells, checkerboards, folds
from tests.support import trials
from tests.unit.plans.by_regions import layouts


def laid_out(
    shape: tuple[int, ...], procs: tuple[int, ...], periodic: bool | list[bool], **options: Any
) -> list[FieldLayout]:
    """Return the layout of a field on each rank."""
    size = int(np.prod(procs))
    halo = normalise_halo(options.pop("halo", 1), len(shape))
    domain = decompose(shape, size, periodic=periodic, proc_shape=procs)
    return [FieldLayout(domain, rank, FieldSpec(halo, **options)) for rank in range(size)]


def counts(layout: FieldLayout, regions: tuple[Cells, ...]) -> np.ndarray:
    """Count how often each element of a rank's array is in a region."""
    found = np.zeros(layout.padded_shape, int)
    for region in regions:
        found[region] += 1
    return found


def near_filled(layout: FieldLayout, width: int, without: int = -1) -> np.ndarray:
    """Mark the elements whose stencil reads halo that ranks other than ``without`` fill, cell by cell."""
    marked = np.zeros(layout.padded_shape, bool)
    for region in exchange_regions(layout):
        if region.recv is not None and region.peer != without:
            marked[region.recv.slices] = True
    before, ndim = len(layout.spec.components_before), layout.spec.ndim
    for axis in range(ndim):
        is_pair = layout.spec.parity is not None and axis == ndim - 1
        along = marked.swapaxes(0, before + axis)
        reached = along.copy()
        for by in range(1, (width + 1) // 2 + 1 if is_pair else width + 1):
            reached[:-by] |= along[by:]
            reached[by:] |= along[:-by]
        marked = reached.swapaxes(0, before + axis)
    return marked


def any_field(ranks: int) -> st.SearchStrategy[Case]:
    return st.one_of(cells(ranks, ["f8"]), checkerboards(ranks, ["f8"]), folds(ranks, ["f8"]))


@settings(max_examples=trials(400), print_blob=True)
@given(st.integers(1, 6).flatmap(any_field), st.sampled_from([None, 0, 1, 2, 3]))
def test_random_fields(case: Case, width: int | None) -> None:
    """Each owned cell is in one region; all cells that read no halo of the exchange are computed during it."""
    f = case.fields[0]
    for layout in layouts(case, f):
        early, late = overlap_regions(layout, width)
        inside = np.zeros(layout.padded_shape, bool)
        inside[layout.interior] = True
        assert (counts(layout, early + late) == inside).all()
        assert all(min(region.shape) > 0 for region in early + late)
        assert len(early + late) <= 1 + 2 * len(case.shape)  # the interior, and a rim of each side
        if width is None:
            continue
        free = inside & ~near_filled(layout, width)
        event("with an interior" if early else "without")
        assert (counts(layout, early) <= free).all()
        if not case.connect and f.parity is None:  # lines of folds and pairs of cells are whole
            assert (counts(layout, early) == free).all() or not early
            assert early or not free.any()


@settings(max_examples=trials(200), print_blob=True)
@given(
    st.integers(1, 6).flatmap(any_field),
    st.sampled_from([0, 1, 2]),
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
)
def test_regions_on_a_gpu(case: Case, width: int, multiples: list[int]) -> None:
    """Each owned cell is in one region. The interior reads no halo of other ranks; rims are multiples thick."""
    multiples = multiples[: len(case.shape)]
    for layout, *others in zip(*(layouts(case, f) for f in case.fields), strict=True):
        early, late = overlap_regions(layout, width, others, multiples=multiples)
        inside = np.zeros(layout.padded_shape, bool)
        inside[layout.interior] = True
        assert (counts(layout, early + late) == inside).all()
        near = near_filled(layout, width, without=layout.rank)
        assert not (counts(layout, early) & near).any()
        event("with an interior" if early else "without")
        if early:
            whole, (inner,) = owned_cells(layout), early
            sides = zip(whole.start, whole.shape, inner.start, inner.shape, multiples, strict=True)
            for begin, extent, first, inside_extent, multiple in sides:
                high = begin + extent - first - inside_extent
                assert (first - begin) % multiple == high % multiple == 0


def test_shifts_out_of_the_array_are_refused() -> None:
    (layout,) = laid_out((6, 8), (1, 1), True)
    rim = overlap_regions(layout, 1)[1][0]
    rim.shifted(-1, 0)
    high = overlap_regions(layout, 1)[1][1]
    high.shifted(1, 0).shifted(-1, 0)
    for region, by in ((rim, -2), (high, 2), (high.shifted(1, 0), 1)):
        with pytest.raises(FieldError):
            region.shifted(by, 0)
    for wrong in ((1,), (1, 0, 0), (0.5, 0), ("a", 1)):
        with pytest.raises(FieldError):
            rim.shifted(*wrong)  # type: ignore[arg-type]
