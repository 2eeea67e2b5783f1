"""Figures with targets from given times, without ranks or a GPU; and captures of a stage."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from halox.errors import StateError
from halox.runtime.gpu import cuda
from halox_bench.allreduce import targets as allreduce
from halox_bench.allreduce.baselines import HOST_STAGED
from halox_bench.allreduce.baselines import NCCL as NCCL_ALLREDUCE
from halox_bench.common.options import MIB, size_label
from halox_bench.common.rows import BASELINE, GRAPH, PATH, SELECTED, STREAM, Row
from halox_bench.common.targets import figure, measured
from halox_bench.exchange import targets as exchange
from halox_bench.exchange.baselines_gpu import NCCL, ZERO_COPY
from halox_bench.ranks import busy
from halox_bench.ranks import clock as ranks_clock
from halox_bench.ranks.clock import Stage
from halox_bench.transpose import fft
from halox_bench.transpose import targets as transpose
from halox_bench.transpose.baselines import ALLTOALLW, ALLTOALLW_COPYTO, COPY, COPYTO
from halox_bench.transpose.baselines_gpu import CUPY
from tests.support import require
from tests.unit import bench_gpu
from tests.unit.lone_rank import alone

require("mpi")

Times = Callable[[Any, "FakeBench"], dict[tuple[str, str], float]]


class FakeBench:
    """Rows with given times."""

    def __init__(
        self,
        times: Times,
        shared: bool = False,
        size: int = 2,
        failed: str = "",
        graph: bool = True,
    ) -> None:
        self._times, self.shared_gpu, self.failed, self.graph = times, shared, failed, graph
        self.comm, self.stage = alone(size), SimpleNamespace(device=0)
        self.seen: list[str] = []

    def free(self) -> None:
        pass

    def peer_bytes_per_us(self) -> float:
        return 400e3

    def measure(self, case: Any) -> list[Row]:
        self.seen.append(case.name)
        found = []
        for (name, mode), us in self._times(case, self).items():
            if mode == GRAPH and not self.graph:
                continue
            by_hand = name in (NCCL, ZERO_COPY, NCCL_ALLREDUCE, HOST_STAGED, COPY)
            kind = SELECTED if name == SELECTED else BASELINE if by_hand else PATH
            row = Row(case.name, kind, name, "" if by_hand else "peer/x", mode, us, checked=True)
            row = row.with_(
                bytes_each_way=16 * getattr(case, "shape", (1,))[0] ** 2, bytes_sent=4e6
            )
            bad = name == self.failed
            found.append(row.with_(us=None, error="bad", failed=True) if bad else row)
        return found


Figures = Callable[..., dict[str, Any]]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Figures:
    """Measure all groups of a kind on a fake bench."""

    def none(self: Any) -> Iterator[Any]:
        return iter(())

    for kind, names in (
        (exchange, ("half_busy", "host_time", "weak_scaling")),
        (allreduce, ("over_persistent", "norm")),
    ):
        for name in names:
            monkeypatch.setattr(kind.Targets, name, none)
    monkeypatch.setattr(exchange, "why_not_gpu_aware", lambda comm, device: "not asked")
    monkeypatch.setattr(allreduce, "RanksClock", lambda *given: None)
    monkeypatch.setattr(transpose.fft, "times_us", lambda bench: dict.fromkeys(FFT_STEPS, 10.0))

    def run(
        kind: Any, times: Times, device: str = "gpu", budget_s: float = 60.0, **options: Any
    ) -> dict[str, Any]:
        bench = FakeBench(times, **options)
        name = next(name for name in vars(kind) if name.endswith("Bench"))
        monkeypatch.setattr(kind, name, lambda comm, options: bench)
        groups = kind.groups(None, bench.comm, device)
        found = measured(groups, budget_s, lambda *_: None, bench.comm)
        json.dumps(found, allow_nan=False)
        assert budget_s > 0 or not bench.seen
        assert len({one["name"] for one in found}) == len(found)
        return {one["name"]: one for one in found}

    return run


def of_exchange(case: Any, bench: FakeBench) -> dict[tuple[str, str], float]:
    streamed = {SELECTED: 10.0, "peer": 10.0, "nccl": 25.0, "ipc": 30.0, "staged": 40.0}
    streamed |= {NCCL: 25.0, ZERO_COPY: 60.0}
    captured = {SELECTED: 8.0, "peer": 8.0, "nccl": 21.0, NCCL: 20.0}
    found = {(name, STREAM): us for name, us in streamed.items()}
    found |= {(name, GRAPH): us for name, us in captured.items()}
    if bench.shared_gpu:
        within = (SELECTED, "ipc", "staged", ZERO_COPY)
        found = {key: us for key, us in found.items() if key[0] in within and key[1] == STREAM}
    return {key: us * case.fields**0.5 for key, us in found.items()}


class TestExchange:
    def test_a_gpu_each(self, figures: Figures) -> None:
        found = figures(exchange, of_exchange)
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
        wire = 1.5 + 16 * 512**2 / 400e3
        assert z["target"] == pytest.approx(1.25 * wire, abs=0.01)
        assert z["baseline"] == pytest.approx(wire, abs=0.001)
        four = found["all 26 neighbours of 128^3, 4 fields over 1, 2 ranks, in a stream"]
        assert four["value"] == 2.0 and four["met"]
        (choice,) = [one for name, one in found.items() if name.startswith("share of cases")]
        assert choice["value"] == 1.0 and choice["met"]

    def test_ranks_that_share_a_gpu(self, figures: Figures) -> None:
        found = figures(exchange, of_exchange, shared=True)
        assert len(found) == 8 and not any("graph" in name or NCCL in name for name in found)
        large = found[f"both x-faces of 512^3 float64, 2 ranks: ipc over {ZERO_COPY}"]
        assert large["value"] == 0.5 and large["target"] == 0.6 and large["met"]
        streamed = found["both x-faces of 64^3 float64, 2 ranks, in a stream"]
        assert streamed["target"] is None and streamed["baseline_name"] == f"us of {ZERO_COPY}"

    def test_eight_gpus(self, figures: Figures) -> None:
        found = figures(exchange, of_exchange, size=8)
        what = "six faces of {}^3 float64, 8 ranks, in a stream"
        assert [found[what.format(n)]["target"] for n in (64, 128, 256, 512)] == [12, None, 22, 55]
        over = found[f"{what.format(64)}: nccl over {NCCL}"]
        assert over["value"] == 1.0 and over["target"] == 1.02 and over["met"]

    @pytest.mark.parametrize("failed", [SELECTED, ZERO_COPY])
    def test_a_wrong_result_leaves_no_figures(self, failed: str, figures: Figures) -> None:
        found = figures(exchange, of_exchange, failed=failed)
        assert f"{failed}: bad" in found["x-faces of 64^3"]["failed"]
        assert not any(name.startswith("both") for name in found)

    def test_groups_after_the_time_say_so(self, figures: Figures) -> None:
        found = figures(exchange, of_exchange, budget_s=-1.0)
        assert all("left out" in one["failed"] for one in found.values())


def of_allreduce(case: Any, bench: FakeBench) -> dict[tuple[str, str], float]:
    """Times of a latency, and the bytes at a speed; NCCL only where the ranks have a GPU each."""
    streamed = {SELECTED: 4.0 + case.nbytes / 4e5, HOST_STAGED: 20.0 + case.nbytes / 1e4}
    streamed |= {} if bench.shared_gpu else {NCCL_ALLREDUCE: 8.0 + case.nbytes / 4e5}
    found = {(name, STREAM): us for name, us in streamed.items()}
    if not bench.shared_gpu:
        found |= {(name, GRAPH): us / 2 for name, us in streamed.items() if name != HOST_STAGED}
    if case.elements == 1:
        found |= {(name, "value"): us + 9 for name, us in streamed.items()}
    return found


class TestAllreduce:
    def test_a_gpu_each(self, figures: Figures) -> None:
        found = figures(allreduce, of_allreduce)
        modes = ("in a stream", "in a graph", "each read by the host")
        one = [found[f"allreduce of one float64, 2 ranks, {what}"] for what in modes]
        assert [(f["target"], f["met"]) for f in one] == [(5.0, True), (2.0, False), (None, None)]
        assert [f["baseline"] for f in one] == [8.0, 4.0, 17.0]
        for nbytes in allreduce.MEDIUM:
            what = f"allreduce of {size_label(nbytes)} float64, 2 ranks, in a stream"
            medium = found[f"{what}: over {NCCL_ALLREDUCE}"]
            wanted = (4 + nbytes / 4e5) / (8 + nbytes / 4e5)
            assert medium["value"] == pytest.approx(wanted, abs=1e-4)
            assert medium["target"] == 0.67 and medium["met"] is (wanted <= 0.67)
        what = "allreduce of 128MiB float64, 2 ranks, in a stream"
        assert found[f"{what}: over {NCCL_ALLREDUCE}"]["target"] == 1.1
        staged = [one for name, one in found.items() if name.endswith(f"over {HOST_STAGED}")]
        assert len(staged) == 11 and {one["target"] for one in staged} == {0.5}

    def test_ranks_that_share_a_gpu(self, figures: Figures) -> None:
        found = figures(allreduce, of_allreduce, shared=True)
        assert not any(NCCL_ALLREDUCE in name or "graph" in name for name in found)
        what = "allreduce of {} float64, 2 ranks, in a stream"
        limits = [
            found[f"{what.format(size_label(n))}: over {HOST_STAGED}"]["target"]
            for n in (8, 1024, allreduce.SHARED_BYTES, 128 * MIB)
        ]
        assert limits == [None, None, 1.0, 1.0]


FFT_STEPS = (fft.HALOX, fft.BACK, fft.PLAN)


def of_transpose(case: Any, bench: FakeBench) -> dict[tuple[str, str], float]:
    found = {(SELECTED, STREAM): 12.0, (SELECTED, GRAPH): 10.0, (COPY, STREAM): 9.6}
    found |= {(COPY, GRAPH): 9.0, (CUPY, GRAPH): 20.0, (ALLTOALLW, STREAM): 30.0}
    found |= {(ALLTOALLW_COPYTO, STREAM): 18.0, (COPYTO, STREAM): 24.0}
    return found if bench.comm.size == 1 or bench.shared_gpu else found | {(NCCL, GRAPH): 40.0}


class TestTranspose:
    def test_one_gpu(self, figures: Figures) -> None:
        found = figures(transpose, of_transpose, size=1)
        copies = {name: one for name, one in found.items() if "FFT" not in name}
        assert len(copies) == 2 * (3 + 5 + 2)
        assert all(one["value"] == 0.9 and one["baseline"] == 9.0 for one in copies.values())
        name = "matrix transposed by a datatype, 8192x8192 f8 vector unpack, in a graph"
        one = found[f"{name}: share of a device copy's speed"]
        assert one["target"] == 0.85 and one["met"] and one["others"][CUPY] == 20.0
        streamed = figures(transpose, of_transpose, size=1, graph=False)
        assert {one["value"] for name, one in streamed.items() if "FFT" not in name} == {0.8}

    def test_several_gpus(self, figures: Figures) -> None:
        found = figures(transpose, of_transpose)
        what = "Transpose of 256x256x512 c16 axes {} slabs forward, 2 ranks, in a graph"
        peer = what + ": share of the measured speed of a copy to the peer"
        one = found[peer.format("210")]
        assert one["value"] == 1.0 and one["target"] == 0.75 and one["met"]
        assert found[peer.format("012")]["target"] is None
        assert found[what.format("120") + f": over {NCCL}"]["value"] == 0.25
        assert any("pencils" in name for name in figures(transpose, of_transpose, size=4))
        shared = figures(transpose, of_transpose, shared=True, graph=False)
        assert shared and all(one["met"] is None for one in shared.values())

    def test_host(self, figures: Figures) -> None:
        found = figures(transpose, of_transpose, "cpu", size=4)
        what = "Transpose of 128x128x128 c16 axes 021 pencils backward, 4 ranks, NumPy"
        one = found[f"{what}: times as fast as {ALLTOALLW}"]
        assert one["value"] == 1.5 and one["target"] == 1.3 and one["met"]
        assert one["baseline_name"] == f"us of {ALLTOALLW_COPYTO}", "the better one counts"
        assert all(one["target"] is None for name, one in found.items() if "slabs" in name)
        one_rank = figures(transpose, of_transpose, "cpu", size=1)
        assert {one["value"] for one in one_rank.values()} == {2.0}

    def test_fft(self, figures: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
        times = {fft.HALOX: 11.0, fft.BACK: 12.0, fft.PLAN: 10.0}
        monkeypatch.setattr(fft, "times_us", lambda bench: times)
        found = figures(transpose, of_transpose, size=1)
        forward, backward = (one for name, one in found.items() if "FFT" in name)
        assert forward["value"] == 1.1 and forward["target"] == 1.15 and forward["met"]
        assert backward["value"] == 1.2 and backward["target"] is None


def test_figure() -> None:
    at_least = figure("n", 0.9, "share", 0.9, 1.0, "us")
    at_most = figure("n", 1.2, "x", 1.1, 1.0, "us", at_most=True)
    assert at_least["met"] and not at_most["met"]
    starved = figure("n", math.inf, "share", 0.05, 1.0, "us", at_most=True, us=math.inf)
    assert starved["value"] is None is starved["us"] and starved["met"] is False


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

    with pytest.raises(StateError):
        stage.captured(refuses, 5)
    assert len(ended) == 2 and ended[1] is not ended[0], "each in a stream of its own"


def test_busy_gpu(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    monkeypatch.setattr(busy, "_BRIEF", ranks_clock.Timing(1, 1e-5))
    calls: list[int] = []
    found = busy.times_us(MPI.COMM_SELF, stage, lambda: calls.append(1), (0.0, 0.5))
    assert set(found) == {0.0, 0.5} and all(us > 0 for us in found.values()) and calls
