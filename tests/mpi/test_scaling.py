"""Costs of making grids, plans and reductions among 64 to 100,000 simulated ranks; ``tools.scaling`` prints them."""

from __future__ import annotations

import pytest

from tests.fakes.simulated import torus_of
from tests.support import full
from tools import scaling

GROWTH = 1.2


@pytest.mark.ranks(1)
@pytest.mark.parametrize("many", [10_000, *full(100_000)])
def test_calls_do_not_grow_with_the_ranks(many: int) -> None:
    """A rank of a plan has 26 neighbours on any number of ranks; of a transpose, the ranks of its row as peers.

    Reductions take a step for each doubling of the ranks.
    """
    calls: dict[str, list[float]] = {}
    for ranks in 64, many:
        for division in scaling.blocks, scaling.pencils:
            with division(ranks) as (_, makes):
                for name in makes:
                    makes[name]()  # caches
                    peers = torus_of(ranks, 2)[1] if name.startswith("transpose") else 1
                    steps = (ranks - 1).bit_length() if name in scaling.REDUCTIONS else 1
                    number = scaling.count_calls(makes[name]) / peers / steps
                    calls.setdefault(name, []).append(number)
    assert len(calls) == 9
    assert all(few > 10 and now <= GROWTH * few for few, now in calls.values()), calls


@pytest.mark.ranks(1)
def test_reductions_receive_little() -> None:
    """Per rank of 4,096: numbers of a few ranks, not of all ranks."""
    with scaling.blocks(4096) as (comm, makes):
        costs = {name: scaling.cost_of(comm, makes[name], 1) for name in scaling.REDUCTIONS}
        made = scaling.cost_of(comm, makes["allreduce, made and closed"], 1)
    assert all(0 < cost.bytes_received < 4096 for cost in costs.values()), costs
    assert all(0 < cost.memory_bytes < 1 << 15 for cost in (*costs.values(), made)), costs


@pytest.mark.ranks(1)
def test_a_plan_needs_little_memory() -> None:
    """A plan among 4,096 ranks, and the bytes that its rank sends and receives."""
    with scaling.blocks(4096) as (comm, makes):
        cost = scaling.cost_of(comm, makes["plan"], repeats=1)
        grid = scaling.cost_of(comm, makes["grid, made and closed"], repeats=1)
    assert 0 < cost.memory_bytes < 1 << 20
    assert 0 < cost.bytes_received < 1 << 15
    assert 0 < grid.memory_bytes < 1 << 20
    assert 0 < grid.bytes_received < 1 << 15
