"""A rank that stops, or is killed, in the middle of an exchange on each path between GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.failing import SLACK_S, STORIES, Pair, run
from tests.support import require
from tests.test_failures import check_end, check_error

require("gpu")
require("mpi")

pytestmark = pytest.mark.gpu

PAIRS = [
    *(Pair(f"peer/{way}", "gpu") for way in ("ll", "staging", "direct")),
    Pair("ipc", "gpu"),
    Pair("staged/shared", "gpu"),
    Pair("staged/mpi", "gpu", "rank"),
    Pair("cuda_aware", "gpu"),
]
ALWAYS = [pair for pair in PAIRS if pair.path.startswith("staged")]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[Pair, dict[str, Any]]:
    return run(PAIRS, tmp_path_factory.mktemp("failures"))


def possible(pair: Pair, seen: dict[Pair, dict[str, Any]]) -> dict[str, Any]:
    """What a pair saw; skip where its path cannot be had here."""
    found = seen[pair]
    assert "path" in found, found
    if found["path"] is not None:
        assert pair not in ALWAYS, found
        pytest.skip(found["path"])
    return found


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_rank_that(story: str, pair: Pair, seen: dict[Pair, dict[str, Any]]) -> None:
    check_error(possible(pair, seen), story)


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_gpu_is_free_again(story: str, pair: Pair, seen: dict[Pair, dict[str, Any]]) -> None:
    found = possible(pair, seen)
    assert found[story].get("gpu_s", 1e9) < SLACK_S, found


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_other_one_ends(pair: Pair, seen: dict[Pair, dict[str, Any]]) -> None:
    check_end(possible(pair, seen))
