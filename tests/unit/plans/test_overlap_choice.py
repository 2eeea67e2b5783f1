"""Choice between loops with and without overlap on a GPU, by events that the GPU reaches late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from halox.decomposition import FieldLayout, FieldSpec, decompose
from halox.plans import loops
from halox.plans.loops import Overlap


class Gpu:
    """Events at times in milliseconds; ``is_reached`` says whether the GPU has reached them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.is_reached = True
        self.is_captured = False
        cuda = SimpleNamespace(Event=lambda: Event(self), get_elapsed_time=self.elapsed)
        monkeypatch.setattr(loops, "cupy", lambda: SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(loops, "_is_captured", lambda device: self.is_captured)

    def elapsed(self, begin: Event, end: Event) -> float:
        assert self.is_reached
        return end.time - begin.time


class Event:
    """Takes the place of cupy.cuda.Event."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.time = -1.0

    def record(self) -> None:
        assert not self._gpu.is_captured
        self.time = self._gpu.now

    @property
    def done(self) -> bool:
        return self._gpu.is_reached


class Recorder:
    """Takes the place of a plan, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def run(self, bound: Any) -> None:
        self.calls.append("run")

    def start(self, bound: Any, arrays: Any) -> None:
        self.calls.append("start")

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.fixture
def overlap() -> Overlap:
    layout = FieldLayout(decompose((8, 8), 1, periodic=True), 0, FieldSpec(((1, 1), (1, 1))))
    return Overlap(layout, 1, "auto", 0)


def regions(overlap: Overlap, gpu: Gpu, ms: float = 1.0, whole_ms: float = 1.0) -> int:
    """Run a loop whose body takes some time in each region, or in a region that is the whole block."""
    plan: Any = Recorder()
    number = 0
    for cells in overlap.loop(plan, None, ()):
        gpu.now += whole_ms if cells.shape == (8, 8) else ms
        number += 1
    assert plan.calls == (["run"] if number == 1 else ["start", "finish"])
    return number


@pytest.mark.parametrize("whole_ms", [1.0, 100.0])
def test_the_faster_way_is_kept(overlap: Overlap, gpu: Gpu, whole_ms: float) -> None:
    assert [regions(overlap, gpu, 1.0, whole_ms) for _ in range(10)] == [5, 1] * 5
    assert {regions(overlap, gpu, 1.0, whole_ms) for _ in range(5)} == {1 if whole_ms < 5 else 5}
    assert f"5,000.0 us with and {1e3 * whole_ms:,.1f} us without" in str(overlap)


def test_nothing_is_decided_until_the_gpu_has_reached_all_events(
    overlap: Overlap, gpu: Gpu
) -> None:
    gpu.is_reached = False
    assert [regions(overlap, gpu) for _ in range(14)] == [5, 1] * 5 + [5] * 4
    assert "on until both ways are timed" in str(overlap)
    gpu.is_reached = True
    assert regions(overlap, gpu) == 1


def test_loops_in_a_capture_are_not_timed(overlap: Overlap, gpu: Gpu) -> None:
    gpu.is_captured = True
    assert [regions(overlap, gpu) for _ in range(12)] == [5] * 12
    gpu.is_captured = False
    assert [regions(overlap, gpu) for _ in range(11)] == [*[5, 1] * 5, 1]
    gpu.is_captured = True
    assert regions(overlap, gpu) == 1


def test_one_slow_loop_does_not_decide(overlap: Overlap, gpu: Gpu) -> None:
    """The first loops compile kernels, and a later loop may be interrupted."""
    slow = {0: 1e3, 4: 1e3}
    for number in range(10):
        regions(overlap, gpu, slow.get(number, 1.0), 7.0)
    assert regions(overlap, gpu) == 5
