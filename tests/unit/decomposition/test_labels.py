"""Coordinates along the axes of a grid: cells from faces, and faces from cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from halox.decomposition import FieldSpec, decompose
from halox.domain.dimension_names import Labels

N = 5
EDGES = np.array([0.0, 1.0, 3.0, 4.0, 8.0, 9.0])  # a stretched grid


def labels(periodic: bool = False, n: int = N, **coords: Any) -> Labels:
    grid = decompose((n,), 1, halo=0, periodic=periodic)
    return Labels(grid, ("x",)).updated(None, coords)


def along(found: Labels, is_staggered: bool) -> np.ndarray:
    coordinates = found.along(0, is_staggered)
    assert coordinates is not None
    return coordinates.values


def test_cells_lie_in_the_middle_of_their_faces() -> None:
    assert np.array_equal(along(labels(x_face=EDGES), False), (EDGES[:-1] + EDGES[1:]) / 2)
    periodic = labels(periodic=True, x_face=3.0 * np.arange(N))
    assert np.array_equal(along(periodic, False), 3 * np.arange(N) + 1.5)


@pytest.mark.parametrize("dtype", ["f8", "f4", "i8", "u1"])
@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("periodic", [False, True])
def test_faces_lie_halfway_between_cells(periodic: bool, step: int, dtype: str) -> None:
    cells = np.arange(2, 2 * N + 2, 2)[::step].astype(dtype)
    faces = along(labels(periodic, x=cells), True)
    first = 1 if step == 1 else 2 * N + 1
    assert np.array_equal(faces, first + 2 * step * np.arange(N + (not periodic)))


def test_given_coordinates_are_kept() -> None:
    cells = np.array([0.1, 2.0, 3.5, 6.0, 8.9])
    both = labels(x=cells, x_face=EDGES)
    assert np.array_equal(along(both, False), cells) and np.array_equal(along(both, True), EDGES)
    again = both.updated(["z"], {"z": EDGES[:-1]})
    assert again.dims == ("z",) and np.array_equal(along(again, False), EDGES[:-1])
    assert np.array_equal(along(again, True), EDGES) and np.array_equal(along(both, False), cells)


def test_nothing_is_made_up() -> None:
    """Neither without coordinates, nor from one cell, whose width is unknown, nor from dates."""
    days = np.arange("2026-01-01", "2026-01-06", dtype="M8[D]")
    dated = labels().updated(None, {"x": days}, numbers=False)
    for found in (labels(), labels(n=1, x=[3.0]), dated):
        assert found.along(0, True) is None
    assert labels().along(0, False) is None
    assert np.array_equal(along(dated, False), days)


def test_a_checkpoint_stores_what_its_fields_need() -> None:
    cells, halo = np.arange(N), ((0, 0),)
    found = labels(x=cells)
    assert set(found.of_fields([FieldSpec(halo)])) == {"x"}
    assert set(found.of_fields([FieldSpec(halo, staggered=(True,))])) == {"x", "x_face"}
    assert labels().of_fields([FieldSpec(halo)]) == {}


def test_texts_differ_with_the_coordinates() -> None:
    all_labels = [labels(), labels(x=np.arange(N)), labels(x=np.arange(N, dtype="f4"))]
    all_labels += [labels(x=np.arange(N) / 2), labels(x_face=EDGES)]
    texts = {found.text() for found in all_labels}
    assert len(texts) == 5 and labels(x=EDGES[1:]).text() == labels(x=EDGES[1:].tolist()).text()
