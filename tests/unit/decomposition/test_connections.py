"""Connections: regions of all process grids up to 8 ranks, and NEMO's formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.decomposition.connections import Connection
from halox.decomposition.field_regions import exchange_regions, walls_of
from halox.errors import DecompositionError
from tests.oracle import Case, Field, divide
from tests.strategies import folds, some_axes
from tests.support import trials
from tests.unit.plans.by_regions import check, layouts, move


def fold(
    shape: tuple[int, ...],
    halo: Any,
    periodic: tuple[bool, ...],
    connect: dict[Any, Connection],
    **options: Any,
) -> Case:
    """Return a case with one field of double precision, on one block."""
    blocks = tuple((n,) for n in shape)
    return Case(blocks, periodic, [Field(np.dtype("f8"), halo, **options)], connect=connect)


@settings(max_examples=trials(160), print_blob=True)
@given(st.integers(1, 8).flatmap(lambda ranks: folds(ranks) | some_axes(folds(ranks))))
def test_random_grids(case: Case) -> None:
    check(case)


def test_two_periodic_cells() -> None:
    """Each is the next one of the other in both directions; no owned cell is sent to itself."""
    connect: Any = {(0, "low"): Connection(flip=1, pivot="V")}
    for staggered, halo in ((True, 2), (False, 1)):
        options = {"staggered": (False, staggered), "sign": -1}
        case = fold((5, 2), ((1, 0), (1, halo)), (False, True), connect, **options)
        for procs in [(1, 1), (3, 1), (1, 2)]:
            case.blocks = divide(case.shape, procs)
            for layout in layouts(case, case.fields[0]):
                field = np.zeros(layout.padded_shape)
                field[layout.interior] = np.nan
                for region in exchange_regions(layout):
                    if region.recv is not None and region.turn is None:
                        field[region.recv.slices] = 0
                assert np.isnan(field[layout.interior]).all()
            check(case)


@pytest.mark.parametrize(("side", "place"), [("high", "high"), ("low", "low")])
@pytest.mark.parametrize("pivot", ["T", "F"])
def test_the_widest_halo_has_images(side: str, place: str, pivot: Any) -> None:
    """With the pivot T, the outermost row at the outer faces is an image, and one row less is left for the halo."""
    connect: Any = {(0, side): Connection(flip=1, pivot=pivot)}
    widest = 2 if pivot == "T" else 3
    for halo in (widest, widest + 1):
        case = fold(
            (4, 6),
            ((halo, halo), (1, 1)),
            (False, True),
            connect,
            position=(place, "center"),
        )
        if halo > widest:
            with pytest.raises(DecompositionError):
                check(case)
        else:
            (layout,) = layouts(case, case.fields[0])
            field = np.full(layout.padded_shape, np.nan)
            field[layout.interior] = 1
            move([layout], [field], [exchange_regions(layout)])
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
def test_folds_of_nemo(pivot: Any, point: str) -> None:
    """Points of NEMO are on the centers or the high faces of the cells."""
    places = {"T": ("center", "center"), "U": ("high", "center"), "V": ("center", "high")}
    connect = {(1, "high"): Connection(flip=0, pivot=pivot)}
    position = places.get(point, ("high", "high"))
    case = fold((8, 6), ((1, 1), (1, 1)), (True, False), connect, position=position, sign=-1)
    for procs in [(1, 1), (2, 1), (4, 3)]:
        case.blocks = divide(case.shape, procs)
        ranks = layouts(case, case.fields[0])
        whole = np.random.default_rng(1).random((8, 6))
        fields = [np.zeros(layout.padded_shape) for layout in ranks]
        for layout, field in zip(ranks, fields, strict=True):
            field[layout.interior] = whole[layout.owned]
        move(ranks, fields, [exchange_regions(layout) for layout in ranks])
        for layout, field in zip(ranks, fields, strict=True):
            for box in walls_of(layout).negated:
                field[box] *= -1
        expected = nemo_fold(np.pad(whole, 1), point, pivot, -1)
        for layout, field in zip(ranks, fields, strict=True):
            cut = tuple(slice(at.start + 1, at.stop + 1) for at in layout.stored)
            # NEMO leaves the columns of the cyclic halo in the row of the fold to the next exchange.
            inside = tuple(
                slice(max(1 - at.start, 0), len(range(at.start, min(at.stop, 9)))) for at in cut[:1]
            )
            assert np.array_equal(field[inside], expected[cut][inside])
