"""A rank that stops, or is killed, in the middle of an exchange of NumPy arrays; tests/gpu has the paths of GPUs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.failing import LIMIT_S, SLACK_S, STORIES, Pair, run
from tests.support import require

PAIRS = [Pair("host", "cpu"), Pair("host", "cpu", "rank")]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[Pair, dict[str, Any]]:
    require("mpi")
    return run(PAIRS, tmp_path_factory.mktemp("failures"))


def check_error(found: dict[str, Any], story: str) -> None:
    """Rank 0 saw the error in time, it names the other rank, and the plan is of no use afterwards."""
    assert story in found, found
    saw = found[story]
    assert saw.get("error") == "ExchangeTimeoutError", found
    wanted = rf"rank 0 has waited .*rank( 1|s \[1\]) .*for {LIMIT_S:g} s \(HALOX_TIMEOUT\)"
    assert re.search(wanted, saw["text"]), saw
    assert LIMIT_S - 1 < saw["seconds"] < LIMIT_S + SLACK_S, saw
    assert saw.get("next") == "StateError", found


def check_end(found: dict[str, Any]) -> None:
    """Rank 0 came to its end by itself."""
    assert found.get("exit", {}).get("status") == 0, found
    assert found["exit"]["seconds"] < 60, found


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_rank_that(story: str, pair: Pair, seen: dict[Pair, dict[str, Any]]) -> None:
    check_error(seen[pair], story)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_other_one_ends(pair: Pair, seen: dict[Pair, dict[str, Any]]) -> None:
    check_end(seen[pair])
