"""Memory is released: after fields that outlive their grid, and after hundreds of grids and other objects."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.leaks import STORIES, repeats_of
from tests.faults.programs import number, result

REPEATS = number("HALOX_LEAKS", 40)
MIB = 1 << 20


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("leaks") / "found"
    return result(["tests.faults.leaks", str(REPEATS)], place, limit_s=550 + REPEATS / 10)


def test_a_field_that_outlives_its_grid(found: dict[str, Any]) -> None:
    """Eight fields of 3 MiB per rank, each dropped after its grid was closed, leave less than half a field."""
    for rank in found["a field that outlives its grid"]:
        assert rank["shared"] < 1.5 * MIB, rank


@pytest.mark.parametrize("story", STORIES)
def test_by_the_hundreds(story: str, found: dict[str, Any]) -> None:
    """Memory does not grow with the number of objects made and released.

    40 grids, and 20 objects of each other kind. For 10,000, in some minutes: ``HALOX_LEAKS=10000 pytest
    tests/faults/test_leaks.py -o faulthandler_timeout=0``.
    """
    for rank in found[story]:
        assert rank["maps"] < 20, rank
        assert rank["resident"] < 2 * MIB + 200 * repeats_of(story, REPEATS), rank
        assert rank["shared"] < MIB, rank
