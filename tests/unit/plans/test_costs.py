"""The cost model: monotonic, identical at sender and receiver, and close to measured times."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halox.errors import HaloxError
from halox.paths.base import Candidate
from halox.paths.costs import RUN_BYTES, ProtocolCost, run_weights
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


def test_equal_times_are_decided_by_name() -> None:
    same = ProtocolCost(1.0, 0.0, (1.0, 1.0, 1.0, 1.0))
    costs = Costs({"peer/ll": same, "peer/direct": same, "ipc/staging": same}, "test")
    options = [candidate("peer", "ll"), candidate("peer", "direct"), candidate("ipc", "staging")]
    for order in itertools.permutations(options):
        assert costs.best(order, 100, 8) == candidate("ipc", "staging")


@given(runs)
def test_weights_between_lengths(run: int) -> None:
    weights = run_weights(run)
    assert sum(w > 0 for w in weights) <= 2
    assert sum(weights) == pytest.approx(max(1.0, RUN_BYTES[0] / run))


def test_weights_at_the_lengths_themselves() -> None:
    for number, run in enumerate(RUN_BYTES):
        assert run_weights(run) == tuple(float(i == number) for i in range(len(RUN_BYTES)))
    assert run_weights(1 << 30) == run_weights(RUN_BYTES[-1])


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


def test_each_way_of_the_peer_path_has_its_place() -> None:
    peer = [option for option in CANDIDATES if option.path == "peer"]
    assert COSTS.best(peer, 1 << 12, 8).protocol == "ll", "small"
    assert COSTS.best(peer, 4 << 20, 8).protocol == "ll", "large, short runs"
    assert COSTS.best(peer, 16 << 20, 4096).protocol == "direct", "large, long runs"


def test_on_a_shared_gpu_its_own_constants_count() -> None:
    alone, shared = (COSTS.predict("ipc", "staging", 1024, 8, shared_gpu=s) for s in (False, True))
    assert shared > 5 * alone
    only = Costs({"peer/ll": SHIPPED["peer/ll"]}, "test")
    assert only.predict("peer", "ll", 8, 8, shared_gpu=True) == only.predict("peer", "ll", 8, 8)


def test_ways_without_a_model() -> None:
    host = [candidate("host", "direct"), candidate("host", "shared")]
    assert not COSTS.knows("host", "direct") and COSTS.knows("peer", "ll")
    assert COSTS.best(host, 100, 8) is host[0]
    assert COSTS.best([*host, candidate("staged", "mpi")], 100, 8) == candidate("staged", "mpi")
    with pytest.raises(HaloxError, match="host/direct"):
        COSTS.predict("host", "direct", 1, 1)


def test_updated_tables() -> None:
    changed = COSTS.updated({"peer/ll": ProtocolCost(1.0, 0.0, (1.0, 2.0, 3.0, 4.0))}, "elsewhere")
    assert changed.predict("peer", "ll", 0, 8) == 1.0 and changed.origin == "elsewhere"
    assert changed.protocols["ipc/staging"] == COSTS.protocols["ipc/staging"]


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
