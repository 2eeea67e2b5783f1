"""``halox bench exchange``: cases, and the check of results."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest

from halox_bench.exchange.cases import FACES, MILC, ExchangeCase, Neighbourhood, cases, milc
from halox_bench.exchange.oracle import Oracle

CASES = [
    ExchangeCase((5,), "x", 2),
    ExchangeCase((4, 5), "y"),
    ExchangeCase((4, 5), "all", 2, "c8"),
    ExchangeCase((3, 4, 5), "x", 1, "f4", 2),
    ExchangeCase((3, 4, 5), "faces", 2, "i2"),
    ExchangeCase((3, 4, 5), "all", 1, "u1", 3),
    ExchangeCase((3, 2, 3, 4), "t"),
    ExchangeCase((2, 2, 3, 2), "all", 1, "c8", 1, (3,)),
]


def places(case: ExchangeCase, ranks: int) -> dict[int, tuple[int, ...]]:
    """Coordinates of the ranks, in an order that is not the natural one."""
    found = list(np.ndindex(*case.proc_shape(ranks)))
    return dict(enumerate(found[::-1]))


def exchanged(
    case: ExchangeCase, arrays: dict[int, list[np.ndarray]], ranks: int
) -> dict[int, list[np.ndarray]]:
    """Return every rank's arrays after the exchange, worked out on the whole grid by NumPy's padding."""
    coords = places(case, ranks)
    h, axes = case.halo, range(case.ndim)
    pads = [(h, h) if a in case.along else (0, 0) for a in axes]
    pads += [(0, 0)] * len(case.components)
    inside = tuple(slice(h, h + n) for n in case.shape)
    after: dict[int, list[np.ndarray]] = {rank: [] for rank in range(ranks)}
    for field in range(case.fields):
        shape = tuple(n * p for n, p in zip(case.shape, case.proc_shape(ranks), strict=True))
        whole = np.empty((*shape, *case.components), case.dtype)
        for rank in range(ranks):
            owned = tuple(
                slice(c * n, c * n + n) for c, n in zip(coords[rank], case.shape, strict=True)
            )
            whole[owned] = arrays[rank][field][inside]
        wrapped = np.pad(whole, pads, mode="wrap")
        for rank in range(ranks):
            result = arrays[rank][field].copy()
            for d in [(0,) * case.ndim, *case.directions]:
                mine, theirs = [], []
                for a, c, n in zip(axes, coords[rank], case.shape, strict=True):
                    first, width = {-1: (0, h), 0: (h, n), 1: (h + n, h)}[d[a]]
                    mine.append(slice(first, first + width))
                    start = c * n + first - (0 if a in case.along else h)
                    theirs.append(slice(start, start + width))
                result[tuple(mine)] = wrapped[tuple(theirs)]
            after[rank].append(result)
    return after


def filled(case: ExchangeCase, ranks: int, step: int = 1) -> tuple[dict[int, Any], dict[int, Any]]:
    """Oracles and arrays of all ranks, before an exchange."""
    coords = places(case, ranks)
    oracles = {r: Oracle(Neighbourhood(case, coords, r)) for r in range(ranks)}
    arrays = {
        r: [np.zeros(case.padded_shape, case.dtype) for _ in range(case.fields)]
        for r in range(ranks)
    }
    for rank, oracle in oracles.items():
        oracle.fill(arrays[rank], step)
    return oracles, arrays


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestOracle:
    def test_knows_what_padding_gives(self, case: ExchangeCase, ranks: int) -> None:
        oracles, before = filled(case, ranks)
        after = exchanged(case, before, ranks)
        for rank, oracle in oracles.items():
            assert oracle.wrong(before[rank], 1) > 0, "halos are empty before"
            assert oracle.wrong(after[rank], 1) == 0
            assert oracle.wrong(after[rank], 2) > 0, "the last exchange's values are wrong"
            flat = after[rank][-1].reshape(-1)
            for at in range(0, flat.size, max(1, flat.size // 10)):
                flat[at] += 1
                assert oracle.wrong(after[rank], 1) == 1
                flat[at] -= 1


class TestCases:
    def cases(self, **given: Any) -> list[ExchangeCase]:
        empty = dict.fromkeys(("sizes", "faces", "halo", "dtype", "fields"), ())
        return cases(argparse.Namespace(**{**empty, "outer": False, "quick": False, **given}))

    def test_ranks_are_spread_innermost_first(self) -> None:
        cube = ExchangeCase((8, 8, 8), "faces")
        found = [cube.proc_shape(n) for n in (1, 2, 4, 6, 8)]
        assert found == [(1, 1, 1), (1, 1, 2), (1, 2, 2), (1, 2, 3), (2, 2, 2)]
        assert ExchangeCase((8, 8, 8), "y").proc_shape(4) == (1, 4, 1)
        outer = ExchangeCase((8, 8, 8), "all", outer=True)
        assert [outer.proc_shape(n) for n in (1, 2, 4)] == [(1, 1, 1), (2, 1, 1), (2, 2, 1)]
        assert outer.name == "8^3 f8 all outer"

    def test_the_whole_grid_of_cases(self) -> None:
        found = self.cases()
        assert len({case.name for case in found}) == len(found) > 50
        assert {case.ndim for case in found} == {1, 2, 3, 4}
        assert {case.faces for case in found} == set(FACES) - {"t"}
        assert {(n,) * 3 for n in (16, 768)} | set(MILC) <= {case.shape for case in found}
        assert 5 < len(self.cases(quick=True)) < 20

    def test_bytes(self) -> None:
        case = milc((4, 6, 8, 10))
        near = Neighbourhood(case, places(case, 2), 0)
        # Two x-faces of su3 vectors go to the other rank, the rest stay here.
        assert near.bytes_sent == 2 * 4 * 6 * 8 * 24
