"""Connections: regions of all process grids up to 8 ranks, NEMO's formulas, and the check of arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from halox.decomposition import FieldLayout, decompose
from halox.decomposition.connections import Connection, normalise_connect
from halox.decomposition.fields import FieldSpec
from halox.domain.options import field_spec
from halox.errors import DecompositionError
from halox.exchange.regions import overlap_regions
from tests.folds import UNTOUCHED, Case, process_grids, random_case
from tests.support import trials


def layouts_of(case: Case, proc_shape: tuple[int, ...]) -> list[FieldLayout]:
    """Return the layout of a case's field on each rank."""
    ranks = int(np.prod(proc_shape))
    divided = decompose(case.shape, ranks, periodic=case.periodic, proc_shape=proc_shape)
    joined = normalise_connect(case.connect, case.shape, case.periodic)
    divided = replace(divided, joined=joined)
    spec = field_spec(case.options, FieldSpec(case.halo), divided)
    layouts = [FieldLayout(divided, rank, spec) for rank in range(ranks)]
    for layout in layouts:
        layout.check_widths()
    return layouts


def exchange(layouts: list[FieldLayout], fields: list[Any], corners: bool) -> None:
    """Move all regions, in the order in which messages hold them; then change the signs."""
    messages: dict[tuple[int, int], list[list[Any]]] = {}
    for layout, field in zip(layouts, fields, strict=True):
        for region in layout.regions(corners):
            if region.send is not None:
                messages.setdefault((layout.rank, region.peer), [[], []])[0].append(
                    (region.direction, field[region.send.slices].copy())
                )
            if region.recv is not None:
                key = tuple(-n for n in region.direction)
                messages.setdefault((region.peer, layout.rank), [[], []])[1].append(
                    (key, field[region.recv.slices])
                )
    for sent, received in messages.values():
        assert sorted(key for key, _ in sent) == sorted(key for key, _ in received)
        assert len({key for key, _ in sent}) == len(sent)
        for (_, values), (_, target) in zip(
            sorted(sent, key=lambda one: one[0]),
            sorted(received, key=lambda one: one[0]),
            strict=True,
        ):
            target[...] = values
    for layout, field in zip(layouts, fields, strict=True):
        for box in layout.walls(corners).negated:
            field[box] *= -1


@pytest.mark.parametrize("number", range(trials(60)))
def test_every_process_grid(number: int) -> None:
    rng = np.random.default_rng([20261126, number])
    case = random_case(rng, corners=number % 4 > 0)
    ranks = number % 8 + 1
    whole = None
    for proc_shape in process_grids(ranks, len(case.shape)):
        if any(p > n for p, n in zip(proc_shape, case.shape, strict=True)):
            continue
        layouts = layouts_of(case, proc_shape)
        if whole is None:
            whole = rng.integers(-9, 10, layouts[0].global_shape).astype(case.dtype)
        fields = [np.full(layout.padded_shape, UNTOUCHED, case.dtype) for layout in layouts]
        first = (slice(None),) * len(case.before)
        for layout, field in zip(layouts, fields, strict=True):
            field[layout.interior] = whole[first + layout.owned]
        exchange(layouts, fields, case.corners)
        for layout, field in zip(layouts, fields, strict=True):
            assert np.array_equal(field, case.expected(layout, whole)), (case, proc_shape)


def test_two_periodic_cells() -> None:
    """Each is the next one of the other in both directions; no owned cell is sent to itself."""
    connect: Any = {(0, "low"): Connection(flip=1, pivot="V")}
    for staggered, halo in ((True, 2), (False, 1)):
        case = Case(
            (5, 2),
            ((1, 0), (1, halo)),
            (False, True),
            connect,
            (False, staggered),
            None,
            -1,
            (),
            (),
            "f8",
        )
        whole = np.arange(1.0, 11).reshape(5, 2)
        for proc_shape in [(1, 1), (3, 1), (1, 2)]:
            layouts = layouts_of(case, proc_shape)
            fields = [np.full(layout.padded_shape, float(UNTOUCHED)) for layout in layouts]
            for layout, field in zip(layouts, fields, strict=True):
                field[layout.interior] = np.nan
                for region in layout.regions():
                    if region.recv is not None and region.turn is None:
                        field[region.recv.slices] = 0
                assert np.isnan(field[layout.interior]).all()
                field[...] = UNTOUCHED
                field[layout.interior] = whole[layout.owned]
            exchange(layouts, fields, True)
            for layout, field in zip(layouts, fields, strict=True):
                assert np.array_equal(field, case.expected(layout, whole))


@pytest.mark.parametrize(("side", "place"), [("high", "high"), ("low", "low")])
@pytest.mark.parametrize("pivot", ["T", "F"])
def test_the_widest_halo_has_images(side: str, place: str, pivot: Any) -> None:
    """With the pivot T, the outermost row at the outer faces is an image, and one row less is left for the halo."""
    connect: Any = {(0, side): Connection(flip=1, pivot=pivot)}
    widest = 2 if pivot == "T" else 3
    for halo in (widest, widest + 1):
        case = Case(
            (4, 6),
            ((halo, halo), (1, 1)),
            (False, True),
            connect,
            (False, False),
            (place, "center"),
            1,
            (),
            (),
            "f8",
        )
        if halo > widest:
            with pytest.raises(DecompositionError):
                layouts_of(case, (1, 1))
        else:
            (layout,) = layouts_of(case, (1, 1))
            field = np.full(layout.padded_shape, np.nan)
            field[layout.interior] = 1
            exchange([layout], [field], True)
            beyond = slice(halo, None) if side == "high" else slice(None, -halo)
            assert not np.isnan(field[beyond]).any()


def nemo_fold(u: Any, point: str, pivot: str, sign: int) -> Any:
    """Return a copy of u after the north fold of NEMO's lbc_nfd, for one halo cell; indices as there, from 1."""
    jpi, jpj = u.shape
    t = np.zeros((jpi + 1, jpj + 1))
    t[1:, 1:] = u
    t[1], t[jpi] = t[jpi - 1].copy(), t[2].copy()  # cyclic
    f = t.copy()
    half = jpi // 2
    if pivot == "T":
        if point in "TV":
            back, line = (jpj - 2, jpj - 1) if point == "T" else (jpj - 3, jpj - 2)
            for ji in range(2, jpi + 1):
                f[ji, jpj] = sign * t[jpi - ji + 2, back]
                if point == "V":
                    f[ji, jpj - 1] = sign * t[jpi - ji + 2, line]
            if point == "T":
                for ji in range(
                    half + 2, jpi + 1
                ):  # NEMO also has half + 1, the pivot, its own image
                    f[ji, jpj - 1] = sign * t[jpi - ji + 2, jpj - 1]
        else:
            back = jpj - 2 if point == "U" else jpj - 3
            for ji in range(1, jpi):
                f[ji, jpj] = sign * t[jpi - ji + 1, back]
                if point == "F":
                    f[ji, jpj - 1] = sign * t[jpi - ji + 1, jpj - 2]
            if point == "U":
                for ji in range(half + 1, jpi):
                    f[ji, jpj - 1] = sign * t[jpi - ji + 1, jpj - 1]
    else:
        shift = 1 if point in "TV" else 0
        back = jpj - 1 if point in "TU" else jpj - 2
        for ji in range(1, jpi + shift):
            f[ji, jpj] = sign * t[jpi - ji + shift, back]
        if point in "VF":
            for ji in range(half + 1, jpi + shift - (point == "F")):  # without the pivot, as above
                f[ji, jpj - 1] = sign * t[jpi - ji + shift, jpj - 1]
    return f[1:, 1:]


@pytest.mark.parametrize("pivot", ["T", "F"])
@pytest.mark.parametrize("point", list("TUVF"))
@pytest.mark.parametrize("sign", [1, -1])
def test_folds_of_nemo(pivot: Any, point: str, sign: int) -> None:
    """Points of NEMO are on the centers or the high faces of the cells."""
    places = {"T": ("center", "center"), "U": ("high", "center"), "V": ("center", "high")}
    case = Case(
        (8, 6),
        ((1, 1), (1, 1)),
        (True, False),
        {(1, "high"): Connection(flip=0, pivot=pivot)},
        (False, False),
        places.get(point, ("high", "high")),
        sign,
        (),
        (),
        "f8",
    )
    for proc_shape in [(1, 1), (2, 1), (4, 3)]:
        layouts = layouts_of(case, proc_shape)
        whole = np.random.default_rng(1).random((8, 6))
        fields = [np.zeros(layout.padded_shape) for layout in layouts]
        for layout, field in zip(layouts, fields, strict=True):
            field[layout.interior] = whole[layout.owned]
        exchange(layouts, fields, True)
        expected = nemo_fold(np.pad(whole, 1), point, pivot, sign)
        for layout, field in zip(layouts, fields, strict=True):
            cut = tuple(slice(at.start + 1, at.stop + 1) for at in layout.stored)
            # NEMO leaves the columns of the cyclic halo in the row of the fold to the next exchange.
            inside = tuple(
                slice(max(1 - at.start, 0), len(range(at.start, min(at.stop, 9)))) for at in cut[:1]
            )
            assert np.array_equal(field[inside], expected[cut][inside])


@pytest.mark.parametrize("number", range(trials(40)))
@pytest.mark.parametrize("width", [1, 2])
def test_no_cell_computed_during_an_exchange_reads_what_it_fills(number: int, width: int) -> None:
    case = random_case(np.random.default_rng([20261127, number]))
    case.before = case.after = ()
    case.halo = tuple(
        (max(low, 1), max(high, 0 if is_so and width == 1 else 1))
        for (low, high), is_so in zip(case.halo, case.staggered, strict=True)
    )
    case.sign = 1
    insides = 0
    for proc_shape in [(1,) * len(case.shape), (2, 1, 1)[: len(case.shape)]]:
        for layout in layouts_of(case, proc_shape):
            filled = np.zeros(layout.padded_shape, bool)
            for region in layout.regions():
                if region.recv is not None:
                    filled[region.recv.slices] = True
            during, after = overlap_regions(layout, width)
            count = np.zeros(layout.padded_shape, int)
            for cells in during:
                for axis, cut in enumerate(cells):
                    near = list(cells)
                    near[axis] = slice(max(cut.start - width, 0), cut.stop + width)
                    assert not filled[tuple(near)].any(), (case, layout.rank)
            for cells in (*during, *after):
                count[cells] += 1
            insides += len(during)
            assert (count[layout.interior] == 1).all() and count.sum() == count[
                layout.interior
            ].sum()
    assert insides
