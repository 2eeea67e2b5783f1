"""Transfers of reductions between nodes, executed by NumPy for all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from halox.reductions.device.nccl_reduction import NodeSchedule, Transfer, schedule

NODES = {
    "a node each": (0, 1, 2),
    "pairs": (0, 0, 1, 1),
    "taken in turns": (0, 1, 0, 1, 0, 1),
    "uneven": (0, 1, 1, 2, 2, 2, 0),
    "many": tuple(np.repeat(range(5), 3)),
}


def swap(
    steps: list[tuple[Transfer, ...]], sources: list[np.ndarray], targets: list[np.ndarray]
) -> None:
    """Execute one step of all ranks: messages between two ranks are ordered, and their lengths must agree."""
    sent: dict[tuple[int, int], list[np.ndarray]] = {}
    for rank, step in enumerate(steps):
        for one in step:
            if one.is_send:
                sent.setdefault((rank, one.peer), []).append(
                    sources[rank][one.start : one.stop].copy()
                )
    for rank, step in enumerate(steps):
        for one in step:
            if not one.is_send:
                values = sent[one.peer, rank].pop(0)
                assert len(values) == one.stop - one.start
                row = targets[rank] if one.slot < 0 else targets[rank][one.slot]
                row[one.start : one.stop] = values
    assert not any(sent.values()), "something was sent that nobody takes"


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("elements", [1, 7, 64, 1000])
@pytest.mark.parametrize("name", NODES)
def test_all_ranks_get_everything(name: str, elements: int, is_cut: bool) -> None:
    nodes = NODES[name]
    ranks, count = len(nodes), len(set(nodes))
    of_node = np.random.default_rng(elements).integers(1, 1000, (count, elements))
    plans: list[NodeSchedule] = [
        schedule(nodes, rank, elements, is_cut=is_cut) for rank in range(ranks)
    ]
    values = [of_node[nodes[rank]].copy() for rank in range(ranks)]
    slots = [np.zeros((count, elements), int) for _ in range(ranks)]
    swap([plan.before for plan in plans], values, slots)
    results = [np.full(elements, -1) for _ in range(ranks)]
    for rank, plan in enumerate(plans):
        start, stop = plan.piece
        slots[rank][nodes[rank], start:stop] = values[rank][start:stop]
        results[rank][start:stop] = slots[rank][:, start:stop].sum(axis=0)
    for number in range(max(len(plan.after) for plan in plans)):
        # A rank without a slice takes part in the last step only.
        steps = [
            plan.after[number - 2 + len(plan.after)] if number - 2 + len(plan.after) >= 0 else ()
            for plan in plans
        ]
        if max(len(plan.after) for plan in plans) == 1:
            steps = [plan.after[0] if plan.after else () for plan in plans]
        swap(steps, results, results)
    for result in results:
        assert np.array_equal(result, of_node.sum(axis=0))


def test_large_arrays_cross_the_network_about_once() -> None:
    """The ranks of a node divide the node's traffic equally, for any number of ranks."""
    nodes, elements = tuple(np.repeat(range(4), 4)), 1 << 12
    for rank in range(len(nodes)):
        plan = schedule(nodes, rank, elements, is_cut=True)
        steps = (plan.before, plan.after[0])
        far = sum(t.stop - t.start for step in steps for t in step if t.is_send)
        assert far == 2 * 3 / 4 * elements / 4
