"""Costs of making grids, plans and reductions among 64 to 100,000 simulated ranks; ``tools.scaling`` prints them."""

from __future__ import annotations

import pytest

from tests.support import full
from tools import scaling

GROWTH = 1.2


@pytest.mark.ranks(1)
@pytest.mark.parametrize("many", [10_000, *full(100_000)])
def test_calls_do_not_grow_with_the_ranks(many: int) -> None:
    """A rank has 26 neighbours on any number of ranks."""
    calls: dict[str, list[int]] = {}
    for ranks in 64, many:
        with scaling.blocks(ranks) as (_, makes):
            for name in ("grid, made and closed", "plan", "allreduce, made and closed"):
                makes[name]()  # caches
                calls.setdefault(name, []).append(scaling.count_calls(makes[name]))
    assert all(a > 0 and b <= GROWTH * a for a, b in calls.values()), calls


@pytest.mark.ranks(1)
def test_a_plan_needs_little_memory() -> None:
    """A plan among 4,096 ranks, and the bytes that its rank sends and receives."""
    with scaling.blocks(4096) as (comm, makes):
        cost = scaling.cost_of(comm, makes["plan"], repeats=1)
    assert 0 < cost.memory_bytes < 1 << 20
    assert 0 < cost.bytes_received < 1 << 15
