"""Benchmarks between GPUs, without a GPU: their use of measurements, and their captures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from halox.errors import StateError
from halox.runtime.gpu import cuda
from halox_bench.exchange import targets
from halox_bench.exchange.baselines_gpu import NCCL, ZERO_COPY
from halox_bench.exchange.cases import ExchangeCase
from halox_bench.exchange.rows import ExchangeRow
from halox_bench.exchange.targets import Targets
from halox_bench.ranks import busy
from halox_bench.ranks import clock as ranks_clock
from halox_bench.ranks.clock import Stage
from tests.support import require
from tests.unit import bench_gpu
from tests.unit.lone_rank import alone

require("mpi")

TIMES = {
    ("selected", "stream"): 10.0,
    ("selected", "graph"): 8.0,
    ("peer", "stream"): 10.0,
    ("peer", "graph"): 8.0,
    ("nccl", "stream"): 25.0,
    ("nccl", "graph"): 21.0,
    ("ipc", "stream"): 30.0,
    ("staged", "stream"): 40.0,
    (NCCL, "stream"): 25.0,
    (NCCL, "graph"): 20.0,
    (ZERO_COPY, "stream"): 60.0,
}


class FakeBench:
    """Rows with the times above, longer with more fields."""

    def __init__(self, *, shared: bool = False, size: int = 2, failed: str = "") -> None:
        self.shared_gpu, self.failed = shared, failed
        self.comm = alone(size)
        self.stage = SimpleNamespace(device=0)
        self.seen: list[str] = []

    def free(self) -> None:
        pass

    def peer_bytes_per_us(self) -> float:
        return 400e3

    def measure(self, case: ExchangeCase) -> list[ExchangeRow]:
        self.seen.append(case.name)
        found = []
        for (name, mode), us in TIMES.items():
            if self.shared_gpu and (name in ("peer", "nccl", NCCL) or mode == "graph"):
                continue
            kind = {"selected": "selected", NCCL: "baseline", ZERO_COPY: "baseline"}.get(
                name, "path"
            )
            path = "" if kind == "baseline" else f"{'peer' if name == 'selected' else name}/x"
            row = ExchangeRow(
                *(case.shape, (), case.proc_shape(2), case.faces, 1, "f8", case.fields),
                16 * case.shape[0] ** 2,
                **{"case": case.name, "kind": kind, "name": name, "path": path, "mode": mode},
                us=us * case.fields**0.5,
                checked=True,
            )
            if name == self.failed:
                row = replace(row, us=None, error="bad", failed=True)
            found.append(row)
        return found


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def none(self: Any) -> Iterator[Any]:
        return iter(())

    for name in ("half_busy", "host_time"):
        monkeypatch.setattr(Targets, name, none)
    monkeypatch.setattr(targets, "why_not_gpu_aware", lambda comm, device: "not asked")

    def run(**options: Any) -> dict[str, Any]:
        bench = FakeBench(**options)
        monkeypatch.setattr(targets, "Bench", lambda comm, options: bench)
        found = targets.measure(bench.comm)
        json.dumps(found, allow_nan=False)
        return {one["name"]: one for one in found}

    return run


class TestTargets:
    def test_a_gpu_each(self, figures: Callable[..., dict[str, Any]]) -> None:
        found = figures()
        small = found["both x-faces of 64^3 float64, 2 ranks, in a stream"]
        assert (small["value"], small["target"], small["met"]) == (10.0, 7.0, False)
        assert small["baseline"] == 25.0 and small["others"]["staged"] == 40.0
        large = found["both x-faces of 512^3 float64, 2 ranks, in a graph"]
        assert (large["value"], large["target"], large["met"]) == (8.0, 28.0, True)
        for n in (16, 32, 64, 128, 256, 512):
            over = found[f"both x-faces of {n}^3 float64, 2 ranks: over {NCCL}"]
            assert over["value"] == 0.4 and over["target"] == 0.5 and over["met"]
            staged = found[f"both x-faces of {n}^3 float64, 2 ranks: staged over {ZERO_COPY}"]
            assert staged["target"] == (0.7 if n == 512 else 1.0) and staged["met"]
        z = found["both z-faces of 512^3 float64, 2 ranks, in a stream"]
        assert z["target"] == pytest.approx(1.25 * (1.5 + 16 * 512**2 / 400e3), abs=0.01)
        four = found["all 26 neighbours of 128^3, 4 fields over 1, 2 ranks, in a stream"]
        assert four["value"] == 2.0 and four["met"]
        (choice,) = [one for name, one in found.items() if name.startswith("share of cases")]
        assert choice["value"] == 1.0 and choice["met"]

    def test_ranks_that_share_a_gpu(self, figures: Callable[..., dict[str, Any]]) -> None:
        found = figures(shared=True)
        ratios = {
            n: found[f"both x-faces of {n}^3 float64, 2 ranks: ipc over {ZERO_COPY}"]
            for n in (64, 256)
        }
        assert {n: one["target"] for n, one in ratios.items()} == {64: 1.0, 256: 0.6}
        assert all(one["met"] and one["value"] == 0.5 for one in ratios.values())
        assert not any("in a graph" in name or NCCL in name for name in found)
        stream = found["both x-faces of 128^3 float64, 2 ranks, in a stream"]
        assert stream["target"] is None and stream["met"] is None and stream["baseline"] == 60.0

    def test_eight_gpus(self, figures: Callable[..., dict[str, Any]]) -> None:
        found = figures(size=8)
        six, graphs = (
            [
                found[f"six faces of {n}^3 float64, 8 ranks, in a {mode}"]
                for n in (64, 128, 256, 512)
            ]
            for mode in ("stream", "graph")
        )
        assert [one["target"] for one in six] == [12.0, None, 22.0, 55.0]
        assert [one["target"] for one in graphs] == [None] * 4
        assert found["both z-faces of 512^3 float64, 8 ranks, in a stream"]["target"] is not None
        assert not any("x-faces" in name for name in found)  # those are for two

    @pytest.mark.parametrize("size", [2, 4, 8])
    def test_beside_the_same_steps_by_hand(
        self, size: int, figures: Callable[..., dict[str, Any]]
    ) -> None:
        found = figures(size=size)
        for n in (64, 128, 256, 512):
            what = f"six faces of {n}^3 float64, {size} ranks, in a {{}}: nccl over {NCCL}"
            stream, graph = (found[what.format(mode)] for mode in ("stream", "graph"))
            assert (stream["value"], stream["target"], stream["met"]) == (1.0, 1.02, True)
            assert (graph["value"], graph["met"]) == (1.05, False)

    def test_a_wrong_result_leaves_no_figures(self, figures: Callable[..., dict[str, Any]]) -> None:
        found = figures(failed="peer")
        assert "bad" in found["x-faces of 64^3"]["failed"]
        assert not any(name.startswith("both") for name in found)

    def test_what_there_is_no_time_for_says_so(
        self, figures: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(targets, "BUDGET_S", -1.0)
        bench = FakeBench()
        monkeypatch.setattr(targets, "Bench", lambda comm, options: bench)
        found = targets.measure(bench.comm, budget_s=-1.0)
        assert all("left out" in one["failed"] for one in found) and not bench.seen


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    bench_gpu.install(monkeypatch)
    cp = bench_gpu.fake_cupy(1 << 18)
    monkeypatch.setattr(cuda, "cupy", lambda: cp)
    return Stage(0)


def test_capture(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, launched, calls = [], [], []
    graph = SimpleNamespace(launch=launched.append)

    def end(self: Any) -> Any:
        ended.append(self)
        return graph

    monkeypatch.setattr(bench_gpu.Stream, "end_capture", end)
    replay = stage.captured(lambda: calls.append(1), 5)
    assert len(calls) == 5 and len(ended) == 1 and not launched
    replay()
    assert launched == [stage.stream] and len(calls) == 5

    def refuses() -> None:
        raise StateError("not this path")

    with pytest.raises(StateError, match="not this path"):
        stage.captured(refuses, 5)
    assert len(ended) == 2 and ended[1] is not ended[0], "each in a stream of its own"


def test_busy_gpu(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    monkeypatch.setattr(busy, "_BRIEF", ranks_clock.Timing(1, 1e-5))
    calls: list[int] = []
    found = busy.times_us(MPI.COMM_SELF, stage, lambda: calls.append(1), (0.0, 0.5))
    assert set(found) == {0.0, 0.5} and all(us > 0 for us in found.values()) and calls
