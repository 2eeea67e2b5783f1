"""Balanced blocks against all cuts along axes, on grids that are small enough to try them."""

from __future__ import annotations

import math
from functools import reduce
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.decomposition import decompose
from halox.decomposition.balance import Balance, balanced
from halox.decomposition.procgrid import proc_shapes
from tests.support import trials


def balance(weights: Any, ranks: int, procs: Any = None, halo: int = 0, unit: int = 1) -> Balance:
    """Return balanced blocks of a grid without periodic axes; ``unit`` is of the last axis."""
    weights, ndim = np.asarray(weights), np.ndim(weights)
    of_all_axes = ((halo, halo),) * ndim, (False,) * ndim, procs or (0,) * ndim, (None,) * ndim
    units = (*(1,) * (ndim - 1), unit)
    return balanced(weights, *proc_shapes(ranks, weights.shape, *of_all_axes, units, 0))


def largest(weights: Any, firsts: Any) -> Any:
    """Return the largest sum over a block, from the first cells of all blocks."""
    return reduce(
        lambda sums, at: np.add.reduceat(sums, *at[::-1]), enumerate(firsts), weights
    ).max()


def firsts_of(blocks: Any) -> list[list[int]]:
    return [[0, *np.cumsum(sizes)[:-1]] for sizes in blocks]


def best(weights: Any, procs: Any) -> Any:
    """Return the smallest largest sum that cuts along the axes allow, by trying all of them."""
    cuts = [
        [(0, *inner) for inner in combinations(range(1, n), parts - 1)]
        for n, parts in zip(weights.shape, procs, strict=True)
    ]
    return min(largest(weights, firsts) for firsts in product(*cuts))


@pytest.mark.parametrize("procs", [(2, 2), (2, 4), (3, 3), (4, 4)])
@pytest.mark.parametrize("sea", ["rectangle", "triangle", "cost"])
def test_sea_in_a_corner(sea: str, procs: tuple[int, int]) -> None:
    """With 30 % of sea in one corner, the largest block has at most 1.05 of the least work that cuts allow."""
    i, j = np.ogrid[:12, :11]
    weights = np.array({"triangle": i / 12 + j / 11 < 0.7}.get(sea, (i < 7) & (j < 6)), float)
    assert 0.27 < weights.mean() < 0.33
    if sea == "cost":
        weights *= np.random.default_rng(2).random(weights.shape)
    found = balance(weights, math.prod(procs), procs)
    work = largest(weights, firsts_of(found.blocks))
    assert work <= 1.05 * best(weights, procs)
    mean = weights.sum() / math.prod(procs)
    assert math.isclose(found.imbalance, work / mean)
    even = [np.linspace(0, n, p, endpoint=False) for n, p in zip(weights.shape, procs, strict=True)]
    assert math.isclose(found.even, largest(weights, [np.ceil(c).astype(int) for c in even]) / mean)


@settings(max_examples=trials(200))
@given(st.data())
def test_never_worse_than_even_blocks(data: st.DataObject) -> None:
    """Blocks have whole units and the width of the halo where the axis has the cells."""
    ndim = data.draw(st.integers(1, 4))
    procs = tuple(data.draw(st.integers(1, 3)) for _ in range(ndim))
    halo, unit = data.draw(st.integers(0, 3)), data.draw(st.sampled_from([1, 2]))
    shape = [data.draw(st.integers(2 * p, 3 * p + 2)) for p in procs]
    shape[-1] = 2 * (shape[-1] // 2) if unit == 2 else shape[-1]
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    weights = random.random(shape) ** 8 * 10.0 ** data.draw(st.sampled_from([-320, 0, 300]))
    weights.flat[0] = weights.max() or 5e-324
    found = balance(weights, math.prod(procs), procs, halo, unit)
    assert tuple(map(sum, found.blocks)) == weights.shape
    assert tuple(map(len, found.blocks)) == procs
    assert not any(size % unit for size in found.blocks[-1])
    for sizes, n in zip(found.blocks, shape, strict=True):
        assert min(sizes) >= (halo if n >= len(sizes) * (halo + halo % unit) else 1)
    assert found.imbalance * (1 + 1e-9) >= 1 and found.imbalance <= found.even * (1 + 1e-9)


def test_the_process_grid() -> None:
    """Equal weights are divided as without weights; sea along one axis is cut across this axis only."""
    found = balance(np.full((48, 48), 0.1), 8, halo=1)
    assert tuple(map(len, found.blocks)) == decompose((48, 48), 8, halo=1).proc_shape
    assert found[1:] == pytest.approx((1, 1))
    sea = np.zeros((40, 400))
    sea[3] = 1
    assert balance(sea, 4).blocks == ((40,), (100,) * 4)
    assert balance(sea, 4).imbalance == 1
