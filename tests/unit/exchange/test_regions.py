"""Regions of overlapped exchanges and deep halos, against counts of cells and distances on whole grids."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

from halox.decomposition import FieldLayout, FieldSpec, decompose, normalise_halo
from halox.errors import FieldError
from halox.exchange.loops import Loops
from halox.exchange.regions import (
    Cells,
    check_every,
    deep_regions,
    extra_work,
    overlap_regions,
    owned_cells,
)
from halox.runtime.arrays import describe

GRIDS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((7,), (1,)),
    ((9,), (3,)),
    ((8, 6), (2, 1)),
    ((7, 9), (2, 2)),
    ((5, 4), (5, 1)),
    ((6, 5, 4), (1, 2, 2)),
    ((4, 5, 6, 4), (2, 1, 2, 1)),
]
WIDTHS = [0, 1, 2, 3, None]


def layouts(
    cells: tuple[int, ...], procs: tuple[int, ...], periodic: bool | list[bool], **options: Any
) -> list[FieldLayout]:
    """Return the layout of a field on each rank."""
    size = int(np.prod(procs))
    halo = normalise_halo(options.pop("halo", 1), len(cells))
    domain = decompose(cells, size, periodic=periodic, proc_shape=procs)
    return [FieldLayout(domain, rank, FieldSpec(halo, **options)) for rank in range(size)]


def counts(layout: FieldLayout, regions: tuple[Cells, ...]) -> np.ndarray:
    """Count how often each element of a rank's array is in a region."""
    found = np.zeros(layout.padded_shape, int)
    for cells in regions:
        found[cells] += 1
    return found


def near_open_sides(layout: FieldLayout, width: int) -> np.ndarray:
    """Mark the elements whose stencil of a width reads halo that the exchange fills, cell by cell."""
    filled = np.zeros(layout.padded_shape, bool)
    for region in layout.regions():
        if region.recv is not None:
            filled[region.recv.slices] = True
    before = len(layout.spec.components_before)
    marked = filled.copy()
    for axis in range(before, before + layout.spec.ndim):
        reached = marked.copy()
        for by in range(1, width + 1):
            low, high = [slice(None)] * filled.ndim, [slice(None)] * filled.ndim
            low[axis], high[axis] = slice(None, -by), slice(by, None)
            reached[tuple(low)] |= marked[tuple(high)]
            reached[tuple(high)] |= marked[tuple(low)]
        marked = reached
    return marked


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize(("cells", "procs"), GRIDS)
def test_regions_cover_each_owned_cell_once(
    cells: tuple[int, ...], procs: tuple[int, ...], periodic: bool, width: int | None
) -> None:
    for staggered in ((), (True,) + (False,) * (len(cells) - 1)):
        for layout in layouts(cells, procs, periodic, staggered=staggered):
            early, late = overlap_regions(layout, width)
            expected = np.zeros(layout.padded_shape, int)
            expected[layout.interior] = 1
            assert (counts(layout, early + late) == expected).all()
            assert all(min(region.shape) > 0 for region in early + late)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("halo", [1, 2, ((1, 0), (0, 2))])
def test_the_interior_reads_no_halo_and_is_as_large_as_possible(
    halo: Any, width: int | None
) -> None:
    interiors = 0
    for procs, periodic in product([(1, 1), (2, 2), (3, 1)], [[False, False], [True, False]]):
        for layout in layouts((14, 15), procs, periodic, halo=halo):
            early, late = overlap_regions(layout, width)
            inside = np.zeros(layout.padded_shape, bool)
            inside[layout.interior] = True
            if width is not None:
                free = inside & ~near_open_sides(layout, width)
                if early:
                    assert (counts(layout, early) == free).all()
                else:
                    assert not free.any()
            interiors += bool(early and late)
            # Rims of each side at most, and the interior.
            assert len(early + late) <= 5
    assert interiors or width == 0


def test_widths_count_from_sides_that_receive() -> None:
    (alone,) = layouts((6, 6), (1, 1), False)
    assert len(overlap_regions(alone, 1)[0]) == 1
    assert not overlap_regions(alone, 1)[1]
    first, middle, _ = layouts((9, 6), (3, 1), False)
    assert [len(part) for part in overlap_regions(first, 1)] == [1, 1]
    assert [len(part) for part in overlap_regions(middle, 1)] == [1, 2]


def test_a_block_without_an_interior_has_one_region_after_the_exchange() -> None:
    for layout in layouts((9, 6), (3, 1), True):
        assert overlap_regions(layout, 2) == ((), (layout.interior,))
    for layout in layouts((9, 6), (3, 1), False, components_after=(2,)):
        early, late = overlap_regions(layout, 5)
        assert not early and late == (layout.interior,)


def test_the_width_of_a_stencil_with_offsets() -> None:
    (layout,) = layouts((12, 12), (1, 1), True, halo=3, offsets=(1,))
    interior = overlap_regions(layout, None)[0][0]
    assert interior == (slice(4, 14), slice(4, 14))


def test_fields_of_one_parity_count_pairs_along_the_last_axis() -> None:
    (layout,) = layouts((8, 16), (1, 1), True, halo=3, parity="even")
    assert overlap_regions(layout, 3)[0][0] == (slice(6, 8), slice(4, 8))
    assert overlap_regions(layout, 2)[0][0] == (slice(5, 9), slice(3, 9))
    early, late = overlap_regions(layout, 3)
    assert counts(layout, early + late)[layout.interior].all()


@pytest.mark.parametrize(
    "components", [{}, {"components_before": (3,)}, {"components_after": (2, 2)}]
)
def test_start_and_shape_are_of_the_grid_axes(components: dict[str, tuple[int, ...]]) -> None:
    (layout,) = layouts((6, 8), (1, 1), True, **components)
    interior = overlap_regions(layout, 1)[0][0]
    assert interior.start == (2, 2)
    assert interior.shape == (4, 6)
    assert all(type(n) is np.int32 for n in interior.start + interior.shape)
    array = np.zeros(layout.padded_shape)
    grid_axes = slice(len(layout.spec.components_before), len(layout.spec.components_before) + 2)
    assert array[interior].shape[grid_axes] == interior.shape
    assert array[interior].size == 24 * (array.size // (8 * 10))
    moved = interior.shifted(-1, 2)
    assert moved.start == (1, 4)
    assert moved.shape == interior.shape
    assert array[moved].shape == array[interior].shape


def test_shifts_out_of_the_array_are_refused() -> None:
    (layout,) = layouts((6, 8), (1, 1), True)
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


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("width", [0, 1, 2])
@pytest.mark.parametrize(
    ("cells", "procs"), [((12,), (2,)), ((13, 12), (2, 1)), ((18, 19), (3, 1))]
)
def test_deep_regions_read_only_valid_cells(
    cells: tuple[int, ...], procs: tuple[int, ...], width: int, every: int
) -> None:
    """Each step reads cells that the exchange has filled or the last step has computed, or that lie beyond walls."""
    for periodic, staggered in product([False, True], [(), (True,) * len(cells)]):
        for layout in layouts(cells, procs, periodic, halo=every * width, staggered=staggered):
            valid = near_open_sides(layout, 0)
            stored = np.zeros(layout.padded_shape, bool)
            stored[layout.interior] = True
            valid |= stored
            # No step may read the halo beyond a wall for a cell of the halo: only its corners are undefined.
            regions = deep_regions(layout, every)
            assert len(regions) == every
            for cells_ in regions:
                computed = np.zeros(layout.padded_shape, bool)
                computed[cells_] = True
                assert not (computed & ~valid).any()
                assert (computed | ~stored).all()
                reach = tuple(slice(max(cut.start - width, 0), cut.stop + width) for cut in cells_)
                read = np.zeros(layout.padded_shape, bool)
                read[reach] = True
                beyond = ~near_open_sides(layout, 0) & ~stored
                assert not (read & ~valid & ~beyond).any()
                valid = computed
            assert regions[-1].shifted(*[0] * len(cells)) == regions[-1]
            if not any(layout.spec.staggered):
                assert regions[-1] == layout.interior


def test_steps_that_halos_allow() -> None:
    plain = layouts((12, 12), (1, 1), True, halo=4)
    assert check_every(np.int64(2), plain, True) == 2
    assert check_every(1, layouts((8, 8), (1, 1), True, halo=3, offsets=(1,)), False) == 1
    for wrong in (0, -1, 1.5, True, None, "2"):
        with pytest.raises(FieldError):
            check_every(wrong, plain, True)
    with pytest.raises(FieldError):
        check_every(3, plain, True)
    with pytest.raises(FieldError, match="corners=False"):
        check_every(2, plain, False)
    assert check_every(2, layouts((12,), (1,), True, halo=4), False) == 2
    with pytest.raises(FieldError, match=r"offsets=\(1,\)"):
        check_every(2, layouts((8, 8), (1, 1), True, halo=2, offsets=(1,)), True)
    with pytest.raises(FieldError, match="parity='odd'"):
        check_every(2, layouts((8, 8), (1, 1), True, halo=2, parity="odd"), True)


def test_steps_for_which_deep_halos_pay() -> None:
    """An exchange of 100 us; blocks of 6 x 8 cells with neighbours along both axes, and with walls on one side."""
    domain = decompose((12, 8), 2, halo=1, periodic=(False, True), proc_shape=(2, 1))
    layout = FieldLayout(domain, 0, FieldSpec(((1, 1),) * 2))
    limits = []
    for every in (2, 3, 4):
        computed = sum((6 + step) * (8 + 2 * step) for step in range(every))
        saved, more = 100 * (every - 1), Fraction(computed, 6 * 8) - every
        limits.append(f"{float(saved / more):,.1f} us (every={every})")
        assert extra_work(layout, every) == pytest.approx(float(more))
    read = [(describe(np.zeros(layout.padded_shape)), layout)]

    def find(_: tuple[object, ...]) -> Any:
        raise AssertionError

    loops = Loops(read, 1, "auto", None, find)
    (note,) = loops.notes(100.0)
    assert note.endswith("they pay for steps of less than " + ", ".join(limits))
    assert loops.notes(0.0) == ()


def test_work_in_deep_halos() -> None:
    """The regions of steps on halos twice and three times as wide have the cells of this formula."""
    for every in (2, 3):
        for layout in layouts((18, 19), (3, 1), True, halo=every * 2):
            cells = sum(
                np.prod(list(map(int, region.shape))) for region in deep_regions(layout, every)
            )
            owned = np.prod(list(map(int, owned_cells(layout).shape)))
            assert extra_work(layout, every, every) == pytest.approx(cells / owned - every)
