"""The cost model: monotonic, identical at sender and receiver, and close to measured times."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halox.errors import HaloxError
from halox.paths.base import Candidate
from halox.plans.costs import Costs


def candidate(path: str, protocol: str) -> Candidate:
    return Candidate(path, protocol, "why")


COSTS = Costs.default()
SHIPPED = COSTS.protocols
NAMES = sorted({name.split(",")[0] for name in SHIPPED})
CANDIDATES = [candidate(*name.split("/")) for name in NAMES]

sizes = st.integers(0, 1 << 32)
runs = st.integers(1, 1 << 20)
counts = st.integers(1, 64)


@given(
    st.sampled_from(CANDIDATES), sizes, sizes, runs, runs, counts, counts, st.booleans(), st.data()
)
def test_more_bytes_shorter_runs_or_more_messages_never_cost_less(
    option: Candidate, n: int, m: int, a: int, b: int, k: int, j: int, shared: bool, data: Any
) -> None:
    def us(nbytes: int, run: int, messages: int) -> float:
        return COSTS.predict(option.path, option.protocol, nbytes, run, messages, shared)

    small, large, short, long, few, many = *sorted((n, m)), *sorted((a, b)), *sorted((k, j))
    close = 1 + 1e-12
    assert us(small, long, few) <= us(large, long, few) * close
    assert us(small, long, few) <= us(small, short, few) * close
    assert us(small, long, few) <= us(small, long, many) * close
    assert us(0, long, 1) > 0


@given(
    sizes, runs, counts, st.booleans(), st.permutations(CANDIDATES), st.integers(1, len(CANDIDATES))
)
def test_the_choice_does_not_depend_on_the_order_of_options(
    nbytes: int, run: int, messages: int, shared: bool, options: list[Candidate], kept: int
) -> None:
    one = COSTS.best(options[:kept], nbytes, run, messages, shared)
    other = COSTS.best(options[:kept][::-1], nbytes, run, messages, shared)
    assert one == other
    least = min(
        COSTS.predict(o.path, o.protocol, nbytes, run, messages, shared) for o in options[:kept]
    )
    assert COSTS.predict(one.path, one.protocol, nbytes, run, messages, shared) == least


@pytest.mark.parametrize(
    ("way", "shared", "measured"),
    [
        # docs/performance/gpu.md: both x-faces of N^3, N = 64, 128, 256, 512.
        ("staged/shared", False, {64 << 10: 35.1, 256 << 10: 43.6, 1 << 20: 78.2, 4 << 20: 223}),
        ("staged/shared", True, {64 << 10: 451, 256 << 10: 466, 1 << 20: 659, 4 << 20: 823}),
    ],
)
def test_shipped_constants_are_near_measurements(
    way: str, shared: bool, measured: dict[int, float]
) -> None:
    path, _, how = way.partition("/")
    for nbytes, us in measured.items():
        assert COSTS.predict(path, how, nbytes, 8, shared_gpu=shared) == pytest.approx(us, rel=0.2)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("protocols"),
        lambda d: d.update(protocols=[1, 2]),
        lambda d: d["protocols"].update({"peer/ll": 3}),
        lambda d: d["protocols"]["peer/ll"].pop("latency_us"),
        lambda d: d["protocols"]["peer/ll"].update(latency_us="4"),
        lambda d: d["protocols"]["peer/ll"].update(latency_us=-1.0),
        lambda d: d["protocols"]["peer/ll"].update(message_us=math.nan),
        lambda d: d["protocols"]["peer/ll"].update(gb_per_s=[1.0, 2.0]),
        lambda d: d["protocols"]["peer/ll"].update(gb_per_s=[4.0, 3.0, 2.0, 1.0]),
        lambda d: d["protocols"]["peer/ll"].update(gb_per_s=[0.0, 1.0, 2.0, 3.0]),
        lambda d: d.update(run_bytes=[8, 64]),
    ],
)
def test_a_broken_table_is_refused(change: Any) -> None:
    values = json.loads(json.dumps(COSTS.to_dict()))
    assert Costs.from_dict(values) == COSTS
    change(values)
    with pytest.raises(HaloxError):
        Costs.from_dict(values)
