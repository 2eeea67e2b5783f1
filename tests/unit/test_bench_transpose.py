"""``halox bench transpose``: cases, pieces, the check of results, the FFT."""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

import numpy as np
import pytest

import halox
from halox.decomposition import decompose
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import Timing
from halox_bench.ranks.methods import WrongResult
from halox_bench.transpose import fft
from halox_bench.transpose.cases import (
    DIRECTIONS,
    DIVISIONS,
    METHODS,
    TransposeCase,
    cases,
    orders,
)
from halox_bench.transpose.oracle import TransposeOracle
from halox_bench.transpose.run import TransposeBench, columns
from tests.support import require

CASES = [
    TransposeCase((5, 7), (1, 0), "u1", division="slabs"),
    TransposeCase((5, 7), (0, 1), "c16", (3,), "slabs", "backward"),
    TransposeCase((4, 5, 6), (1, 2, 0), "f4", division="slabs"),
    TransposeCase((4, 5, 6), (2, 1, 0), "u2", (2,), "pencils", "backward"),
    TransposeCase((4, 6, 5, 7), (2, 0, 3, 1), "f8", (), "pencils"),
]


def blocks_of(case: TransposeCase, ranks: int) -> tuple[list[Any], list[Any]]:
    """Blocks of all ranks on the source's side and on the target's."""
    sides = []
    shapes = case.shape, case.turned_shape
    for shape, parts in zip(shapes, case.proc_shapes(ranks), strict=True):
        domain = decompose(shape, ranks, halo=0, periodic=False, proc_shape=parts)
        bounds = [[axis.bounds for axis in domain.axes], domain]
        found = []
        for rank in range(ranks):
            coords = domain.coords_of(rank)
            cuts = zip(bounds[0], coords, strict=True)
            found.append(tuple(slice(int(cut[c]), int(cut[c + 1])) for cut, c in cuts))
        sides.append(found)
    first, second = sides
    return (second, first) if case.backward else (first, second)


def shape_of(block: Any, case: TransposeCase) -> tuple[int, ...]:
    return (*(part.stop - part.start for part in block), *case.components)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestDivided:
    def filled(self, case: TransposeCase, ranks: int) -> Any:
        """Oracles and arrays of all ranks, and what NumPy's transpose of the whole makes of them."""
        source, target = blocks_of(case, ranks)
        oracles = [TransposeOracle(case, *both) for both in zip(source, target, strict=True)]
        whole = np.zeros(
            (*(case.turned_shape if case.backward else case.shape), *case.components), case.dtype
        )
        befores, afters = [], []
        for block, other, oracle in zip(source, target, oracles, strict=True):
            before = np.zeros(shape_of(block, case), case.dtype)
            oracle.fill(before, np.zeros(shape_of(other, case), case.dtype), 1)
            whole[block] = before
            befores.append(before)
        axes = case.source_axes
        turned = np.transpose(whole, (*axes, *range(case.ndim, case.ndim + len(case.components))))
        afters = [turned[block].copy() for block in target]
        return oracles, befores, afters, source, target

    def test_oracle_is_numpy_s_transpose(self, case: TransposeCase, ranks: int) -> None:
        oracles, _, afters, *_ = self.filled(case, ranks)
        for oracle, after in zip(oracles, afters, strict=True):
            assert oracle.wrong(after, 1) == 0
            assert oracle.wrong(after, 2) == after.size, "values of the last transpose are wrong"
            flat = after.reshape(-1)
            for at in range(0, flat.size, max(1, flat.size // 20)):
                flat[at] += 1
                assert oracle.wrong(after, 1) == 1
                flat[at] -= 1
            oracle.fill(np.zeros(shape_of(oracle._source, case), case.dtype), after, 3)
            assert oracle.wrong(after, 3) == after.size, "nothing right is left in the target"


class TestCases:
    def cases(self, **given: Any) -> list[TransposeCase]:
        names = "sizes", "axes", "dtype", "components", "divisions", "directions", "methods"
        return cases(argparse.Namespace(**{**dict.fromkeys(names, ()), "quick": False, **given}))

    def test_the_whole_grid_of_cases(self) -> None:
        found = self.cases()
        assert len({case.name for case in found}) == len(found) > 200
        alone = [case for case in found if case.division == "whole" and case.method == "transpose"]
        for ndim in (2, 3, 4):
            natural = set(orders(ndim)) if ndim > 2 else {(1, 0)}
            assert {case.axes for case in alone if case.ndim == ndim} == natural
        assert {case.method for case in found} == set(METHODS)
        assert {case.division for case in found} == set(DIVISIONS)
        assert {case.direction for case in found} == set(DIRECTIONS)
        assert 5 < len(self.cases(quick=True)) < 60

    def test_divisions(self) -> None:
        for axes, ranks in product(orders(4), (1, 2, 3, 4, 6, 8)):
            for division in ("slabs", "pencils"):
                case = TransposeCase((8,) * 4, axes, division=division)
                first, second = case.proc_shapes(ranks)
                assert np.prod(first) == np.prod(second) == ranks
                cut = {axis for axis, n in enumerate(first) if n > 1}
                after = {axes[k] for k, n in enumerate(second) if n > 1}
                assert ranks == 1 or cut != after, "something moves"
                kept = {0} if division == "pencils" and ranks in (4, 6, 8) else set()
                assert cut & after == kept


@pytest.mark.parametrize(("dtype", "components"), [("u1", ()), ("f4", (3,)), ("c16", ())])
def test_datatypes_are_of_the_transposed_matrix(dtype: str, components: tuple[int, ...]) -> None:
    case = TransposeCase((5, 7), (1, 0), dtype, components, method="vector")
    matrix = np.arange(35 * int(np.prod(components))).reshape(5, 7, *components).astype(dtype)
    packed = halox.pack(matrix, *columns(case)).view(dtype).reshape(7, 5, *components)
    assert np.array_equal(packed, matrix.swapaxes(0, 1))


class OwnFFT:
    """In the place of halox.FFT, on one rank: NumPy's."""

    spoil = ""

    def __init__(self, grid: Any) -> None:
        self.grid = grid

    def __enter__(self) -> OwnFFT:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def forward(self, u: Any, out: Any) -> None:
        out[...] = np.fft.fftn(u)
        if self.spoil == "forward":
            out[0, 0, 1] += 1

    def backward(self, s: Any, out: Any) -> None:
        out[...] = np.fft.ifftn(s)
        if self.spoil == "backward":
            out[0, 0, 1] += 1


class TestFFT:
    @pytest.fixture
    def bench(self) -> TransposeBench:
        require("mpi")
        from mpi4py import MPI

        return TransposeBench(MPI.COMM_SELF, Options("cpu", timing=Timing(1, 1e-5)))

    def test_times(self, bench: TransposeBench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(halox, "FFT", OwnFFT, raising=False)
        times = fft.times_us(bench, 8)
        assert set(times) == {fft.HALOX, fft.BACK, fft.PLAN} and min(times.values()) > 0

    @pytest.mark.parametrize("direction", ["forward", "backward"])
    def test_wrong_values_are_not_timed(
        self, direction: str, bench: TransposeBench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(halox, "FFT", OwnFFT, raising=False)
        monkeypatch.setattr(OwnFFT, "spoil", direction)
        with pytest.raises(WrongResult, match="the FFT is wrong"):
            fft.times_us(bench, 8)
