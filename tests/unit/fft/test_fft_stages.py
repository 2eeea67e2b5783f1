"""Stages of random transforms: each axis is whole in its stage, every rank has cells, rows stay together."""

from __future__ import annotations

import math

import numpy as np
import pytest

from halox.decomposition import Placement
from halox.errors import DecompositionError
from halox.fft.stages import find_stages, moved_placement, turned_placement
from tests.support import trials


@pytest.mark.parametrize("number", range(trials(480)))
def test_random_transforms(number: int) -> None:
    rng = np.random.default_rng([3, number])
    ndim = int(rng.integers(2, 5))
    parts = tuple(int(n) for n in rng.integers(1, 4, size=ndim))
    cells = tuple(int(n) for n in rng.integers(1, 40, size=ndim) + np.array(parts))
    axes = tuple(int(a) for a in rng.permutation(ndim)[: rng.integers(1, ndim + 1)])
    first = axes[-1] if rng.integers(2) else None
    modes = tuple(n // 2 + 1 if axis == first else n for axis, n in enumerate(cells))
    try:
        stages = find_stages(cells, modes, parts, axes, first)
    except DecompositionError as error:
        assert "some ranks have no" in str(error)
        assert min(modes) < math.prod(parts), "there is a division with enough lines"
        return
    done: list[int] = []
    placement = Placement.by_rank(parts)
    for number, stage in enumerate(stages):
        if number:
            before = placement
            placement = moved_placement(placement, stage.moves)
            moved = [source for source, _ in stage.moves]
            kept = [
                a for a in range(ndim) if a not in moved and before.proc_shape[a] == stage.parts[a]
            ]
            for old, new in zip(before.coords, placement.coords, strict=True):
                assert [old[a] for a in kept] == [new[a] for a in kept], "a rank has left its row"
                onto = [target for _, target in stage.moves]
                for source, target in stage.moves:
                    if onto.count(target) == 1:
                        inside = new[target] // before.proc_shape[source]
                        assert inside == old[target], "a part was not cut in place"
        else:
            assert stage.parts == parts
        assert placement.proc_shape == stage.parts and math.prod(stage.parts) == math.prod(parts)
        extents = [modes[a] if a in done else cells[a] for a in range(ndim)]
        assert all(p <= n for p, n in zip(stage.parts, extents, strict=True))
        assert all(stage.parts[axis] == 1 for axis in stage.axes)
        if first is not None and first not in done and stage.axes:
            assert first in stage.axes, "another axis was transformed before the halved one"
        done += stage.axes
        assert len(set(placement.coords)) == len(placement.coords)
        for rank, block in enumerate(placement.coords):
            assert placement.rank_of[np.ravel_multi_index(block, stage.parts)] == rank
        order = [int(a) for a in rng.permutation(ndim)]
        turned = turned_placement(placement, order)
        assert turned.coords == tuple(tuple(c[a] for a in order) for c in placement.coords)
        assert turned.rank_of[0] == placement.rank_of[0]
    assert sorted(done) == sorted(axes)


@pytest.mark.parametrize(
    ("parts", "first", "wanted"),
    [
        ((1, 1, 1), None, [(1, 1, 1)]),
        ((4, 1, 1), None, [(4, 1, 1), (1, 4, 1)]),
        ((1, 1, 4), None, [(1, 1, 4), (4, 1, 1)]),
        ((1, 1, 4), 2, [(1, 1, 4), (4, 1, 1), (1, 4, 1)]),
        ((2, 3, 1), 2, [(2, 3, 1), (2, 1, 3), (1, 2, 3)]),
        ((2, 3, 1, 1), None, [(2, 3, 1, 1), (1, 1, 2, 3)]),
    ],
)
def test_usual_divisions(
    parts: tuple[int, ...], first: int | None, wanted: list[tuple[int, ...]]
) -> None:
    cells = (24,) * len(parts)
    modes = tuple(13 if axis == first else 24 for axis in range(len(parts)))
    stages = find_stages(cells, modes, parts, range(len(parts)), first)
    assert [stage.parts for stage in stages] == wanted
