"""``halox bench allreduce``: cases, the check of results, set-up, the Jacobi kernel."""

from __future__ import annotations

import argparse
import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from halox_bench.allreduce.baselines import HOST_STAGED, NCCL
from halox_bench.allreduce.cases import AllreduceCase, AllreduceOracle, cases
from halox_bench.allreduce.kind import pays_after
from halox_bench.allreduce.run import calls_to_pay, paid
from halox_bench.common.options import MIB, nbytes_of, size_label
from halox_bench.common.rows import Row
from tools.gpu.apps import multigrid_figures

# Of Python's own numbers: the integers of a dtype wrap around afterwards.
BY_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "prod": operator.mul,
    "min": min,
    "max": max,
    "logical_and": lambda a, b: int(bool(a) and bool(b)),
    "logical_or": lambda a, b: int(bool(a) or bool(b)),
    "logical_xor": lambda a, b: int(bool(a) != bool(b)),
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
}
DTYPES = {"b1": "min", "i1": "sum", "u2": "prod", "i8": "max", "f4": "sum", "f8": "prod"}
CASES = [
    *(AllreduceCase(n, dtype, op) for dtype, op in DTYPES.items() for n in (1, 37)),
    *(AllreduceCase(29, "i4", op) for op in BY_PYTHON),
    *(AllreduceCase(29, "b1", op) for op in BY_PYTHON if op not in ("sum", "prod")),
    *(AllreduceCase(29, "c8", op) for op in ("sum", "prod")),
]


def combined(case: AllreduceCase, sources: list[np.ndarray]) -> np.ndarray:
    found = [
        functools.reduce(BY_PYTHON[case.op], numbers)
        for numbers in zip(*(source.tolist() for source in sources), strict=True)
    ]
    if case.op.startswith("logical") and len(sources) == 1:
        found = [int(bool(number)) for number in found]
    wrapped = np.array(found, object)
    kind, bits = np.dtype(case.dtype).kind, 8 * np.dtype(case.dtype).itemsize
    if kind in "iu":
        wrapped %= 1 << bits
        return wrapped.astype(f"u{bits // 8}").view(case.dtype)
    return wrapped.astype(case.dtype)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestOracle:
    def filled(self, case: AllreduceCase, ranks: int, step: int) -> tuple[Any, Any]:
        sources, targets = (
            [np.zeros(case.elements, case.dtype) for _ in range(ranks)] for _ in range(2)
        )
        for rank in range(ranks):
            AllreduceOracle(case, rank, ranks).fill(sources[rank], targets[rank], step)
        return sources, targets

    def test_knows_what_python_gives(self, case: AllreduceCase, ranks: int) -> None:
        oracle = AllreduceOracle(case, 0, ranks)
        for step in (1, 2, 3):
            sources, targets = self.filled(case, ranks, step)
            result = combined(case, sources)
            assert oracle.wrong(targets[0], step) == case.elements, "nothing is right before"
            assert oracle.wrong(result, step) == 0
            # Any order gives the same.
            assert oracle.wrong(combined(case, sources[::-1]), step) == 0
            if case.elements > 1 and ranks > 1:
                assert oracle.wrong(result, step + 1) > 0, "the last call's values are wrong"

    def test_one_wrong_value_anywhere_is_seen(self, case: AllreduceCase, ranks: int) -> None:
        sources, _ = self.filled(case, ranks, 1)
        result = combined(case, sources)
        for at in range(case.elements):
            spoilt = result.copy()
            spoilt[at] = not spoilt[at] if case.dtype == "b1" else spoilt[at] + 1
            assert AllreduceOracle(case, 0, ranks).wrong(spoilt, 1) == 1


def test_parts_of_a_large_array_cannot_be_mixed_up() -> None:
    case = AllreduceCase(3 * AllreduceOracle.PERIOD + 100, "u1", "sum")
    source, target = np.zeros(case.elements, "u1"), np.zeros(case.elements, "u1")
    oracle = AllreduceOracle(case, 0, 1)
    oracle.fill(source, target, 1)
    assert oracle.wrong(target, 1) == case.elements and oracle.wrong(source, 1) == 0
    for power in range(17):
        assert oracle.wrong(np.roll(source, 1 << power), 1) > case.elements // 2
    source[-1] += 1
    assert oracle.wrong(source, 1) == 1


class TestCases:
    def cases(self, *words: tuple[str, ...], quick: bool = False) -> list[AllreduceCase]:
        sizes, dtypes, ops = (*words, (), (), ())[:3]
        return cases(argparse.Namespace(sizes=sizes, dtype=dtypes, op=ops, quick=quick))

    def test_without_options(self) -> None:
        found = self.cases()
        floats = [case for case in found if case.dtype == "f4"]
        assert [floats[0].nbytes, floats[-1].nbytes] == [4, 128 * MIB] and len(floats) > 10
        assert {case.dtype for case in found if case.elements == 1} == {"f4", "f8", "c16", "i8"}
        assert 3 < len(self.cases(quick=True)) < 7

    @pytest.mark.parametrize("nbytes", [1, 8, 1000, 1 << 13, 3 << 19, 128 << 20])
    def test_sizes_are_read_as_they_are_written(self, nbytes: int) -> None:
        assert nbytes_of(size_label(nbytes)) == nbytes


@pytest.mark.parametrize("setup", [0.5, 3.0, 1000.0])
@pytest.mark.parametrize(("us", "theirs"), [(1.0, 1.5), (4.0, 400.0), (7.0, 7.001)])
def test_calls_that_amortise_a_set_up(setup: float, us: float, theirs: float) -> None:
    calls = calls_to_pay(setup, us, theirs)
    assert calls is not None and setup + calls * us <= calls * theirs * (1 + 1e-12)
    assert calls == 1 or setup + (calls - 1) * us > (calls - 1) * theirs


def test_paid() -> None:
    near = {NCCL: 5.0, HOST_STAGED: 60.0}
    rows = paid(
        [
            Row("", "selected", "selected", us=10.0, beside=near, details={"setup_us": 1000.0}),
            Row("", "baseline", NCCL, us=5.0, beside=near),
            Row("", "algorithm", "binomial", error="no"),
        ]
    )
    assert [one.pays_after for one in rows] == [{NCCL: None, HOST_STAGED: 20}, {}, {}]
    assert [*map(pays_after, rows)] == ["20 calls", None, None]


def test_multigrid_figures() -> None:
    common = {"class": "C", "device": "gpu", "verified": True, "relative_error": 1e-13}
    common |= {"time_s": 1.0, "graph": True}
    figures = {
        1: {**common, "mops": 100.0, "exchange_share": 0.0},
        2: {**common, "mops": 180.0, "exchange_share": 0.1},
        8: {**common, "class": "D", "mops": 900.0, "exchange_share": 0.2},
    }
    runs = [
        {"app": "nas_mg", "ranks": n, "exit_status": 0, "figures": one}
        for n, one in figures.items()
    ]
    bad = {"app": "nas_mg", "ranks": 4, "exit_status": 1, "figures": {"output": "no"}}
    found = multigrid_figures([*runs, bad, {"app": "stencil2d", "exit_status": 0}])
    assert [one["value"] for one in found] == [100.0, 180.0, 900.0]
    # The rate of another class is not a baseline.
    assert [one["speed_up"] for one in found] == [1.0, 1.8, None]
    assert found[1]["exchange_share"] == 0.1 and found[1]["baseline"] == 100.0
    assert multigrid_figures([bad]) == []
