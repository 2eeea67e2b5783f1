"""Placement of blocks on nodes, against all assignments of few ranks, with a cost in plain Python."""

from __future__ import annotations

import math
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.decomposition import Placement, place
from tests.support import trials


def cost(shape, periodic, axis_bytes, node_at) -> int:
    """Sum the bytes between nodes, face by face; ``node_at`` maps coordinates to nodes."""
    total = 0
    for coords in product(*map(range, shape)):
        for axis, face in enumerate(axis_bytes):
            above = list(coords)
            above[axis] += 1
            if above[axis] == shape[axis]:
                if not periodic[axis]:
                    continue
                above[axis] = 0
            total += face * (node_at[coords] != node_at[tuple(above)])
    return total


def family(shape, nodes):
    """Yield the node of each block, for every placement that the module promises to try."""
    ndim, ranks = len(shape), len(nodes)
    by_node = sorted(range(ranks), key=lambda rank: (nodes[rank], rank))
    sizes = {list(nodes).count(node) for node in nodes}
    tiles = {shape} | {
        tile
        for tile in product(*(range(1, cells + 1) for cells in shape))
        if all(cells % extent == 0 for cells, extent in zip(shape, tile, strict=True))
        and math.prod(tile) in sizes
    }
    for tile, axes in product(tiles, permutations(range(ndim))):

        def position(coords, tile=tile, axes=axes):
            return (
                [coords[axis] // tile[axis] for axis in axes],
                [coords[axis] % tile[axis] for axis in axes],
            )

        blocks = sorted(product(*map(range, shape)), key=position)
        yield {block: nodes[rank] for block, rank in zip(blocks, by_node, strict=True)}
        if tile == shape:
            yield {block: nodes[rank] for rank, block in enumerate(blocks)}


def node_at(placement: Placement, nodes) -> dict:
    return {coords: nodes[rank] for rank, coords in enumerate(placement.coords)}


@st.composite
def nodes_of_ranks(draw, filled_nodes: bool):
    larger = [] if filled_nodes else [(2, 4), (3, 4), (2, 3, 2), (4, 4), (2, 2, 2, 2)]
    shape = draw(
        st.sampled_from(
            [*larger, (1,), (4,), (6,), (2, 2), (2, 3), (3, 2), (1, 5), (2, 1, 3), (1, 2, 1, 2)]
        )
    )
    ranks = math.prod(shape)
    if filled_nodes:
        size = draw(st.integers(1, ranks))  # all nodes except the last have equally many ranks
        nodes = draw(st.permutations([rank // size for rank in range(ranks)]))
    else:
        nodes = draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
    periodic = tuple(draw(st.booleans()) for _ in shape)
    return shape, periodic, tuple(draw(st.integers(0, 9)) for _ in shape), nodes


def assert_consistent(placement: Placement, shape, periodic, axis_bytes, nodes) -> None:
    blocks = list(product(*map(range, shape)))
    assert sorted(placement.coords) == blocks
    assert [placement.coords[rank] for rank in placement.rank_of] == blocks
    in_order = {block: nodes[rank] for rank, block in enumerate(blocks)}
    by_rank = cost(shape, periodic, axis_bytes, in_order)
    assert placement.bytes_between_nodes_by_rank_order == by_rank
    assert placement.bytes_between_nodes == cost(
        shape, periodic, axis_bytes, node_at(placement, nodes)
    )


@settings(max_examples=trials(150), print_blob=True)
@given(nodes_of_ranks(filled_nodes=False))
def test_uneven_nodes_get_the_best_of_the_family(case) -> None:
    shape, periodic, axis_bytes, nodes = case
    placement = place(*case)
    assert_consistent(placement, *case)
    best = min(cost(shape, periodic, axis_bytes, where) for where in family(shape, nodes))
    assert placement.bytes_between_nodes <= best <= placement.bytes_between_nodes_by_rank_order
    assert place(*case) == placement


@settings(max_examples=trials(100), print_blob=True)
@given(nodes_of_ranks(filled_nodes=True))
def test_filled_nodes_get_the_best_of_all_assignments(case) -> None:
    shape, periodic, axis_bytes, nodes = case
    placement = place(*case)
    assert_consistent(placement, *case)
    blocks = list(product(*map(range, shape)))
    best = min(
        cost(shape, periodic, axis_bytes, dict(zip(blocks, assigned, strict=True)))
        for assigned in set(permutations(nodes))
    )
    assert placement.bytes_between_nodes == best


@pytest.mark.parametrize(
    ("shape", "axis_bytes", "nodes", "nbytes", "in_rank_order", "words"),
    [
        ((4, 4), (100, 100), [rank // 4 for rank in range(16)], 800, 1200, "in tiles of 2x2"),
        ((2, 3), (1, 2), [0, 0, 1, 1, 2, 2], 6, 7, "node by node along a snake"),
        ((2, 3), (1, 1), [7] * 6, 0, 0, "in rank order"),
        ((2, 3), (1, 1), [0, 0, 0, 1, 1, 1], 3, 3, "in rank order"),
        ((1, 1), (5, 5), [3], 0, 0, "in rank order"),
    ],
    ids=["tiles", "a snake", "one node", "whole rows", "one rank"],
)
def test_placements_by_hand(shape, axis_bytes, nodes, nbytes, in_rank_order, words) -> None:
    case = shape, (False, False), axis_bytes, nodes
    placement = place(*case)
    assert_consistent(placement, *case)
    assert placement.bytes_between_nodes == nbytes
    assert placement.bytes_between_nodes_by_rank_order == in_rank_order
    assert words in placement.summary()
    assert nbytes < in_rank_order or placement.coords == Placement.by_rank(shape).coords
