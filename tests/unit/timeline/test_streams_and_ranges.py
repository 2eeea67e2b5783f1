"""Work on GPU streams, and ranges of NVTX, in a timeline: with a clock and a package that take their places."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halox import timeline

WORLD: Any = SimpleNamespace(mpi=SimpleNamespace(COMM_WORLD=SimpleNamespace(rank=0)), node_rank=0)


class Gpu:
    """The part of `cupy.cuda` that times work: a clock in ms, of which work on a stream takes a part."""

    def __init__(self) -> None:
        self.now_ms, self.has_ended, self.made = 0.0, True, 0
        self.stream: Any = SimpleNamespace(ptr=0x7F0012345678, record=self.event)

    def get_current_stream(self) -> Any:
        return self.stream

    def Stream(self, non_blocking: bool) -> Any:
        return SimpleNamespace(record=self.event)

    def event(self) -> Any:
        gpu = self
        gpu.made += 1

        class Event:
            ms = gpu.now_ms
            done = property(lambda self: gpu.has_ended)

            def synchronize(self) -> None:
                """The stream is idle."""

        return Event()

    def get_elapsed_time(self, one: Any, other: Any) -> float:
        return float(other.ms - one.ms)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(timeline, "cupy", lambda: SimpleNamespace(cuda=gpu))
    monkeypatch.setattr(timeline, "is_capturing", lambda *_: gpu.stream is None)
    return gpu


def events_in(folder: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads((folder / "rank-00000.json").read_text())
    return events


def test_work_on_a_stream_is_an_event_of_the_stream(gpu: Gpu, tmp_path: Path) -> None:
    trace = timeline._Trace(str(tmp_path))
    trace.open(WORLD)

    def work() -> None:
        gpu.now_ms += 0.25

    call = trace.timed(trace.label("exchange", "exchange", True, bytes=8), work)
    call()
    gpu.has_ended = False
    gpu.now_ms += 1.5
    call()
    call()
    trace.write()
    (host, *_), on_stream = (
        [e for e in events_in(tmp_path) if e["ph"] == "X" and (e["tid"] == 0x12345678) == there]
        for there in (False, True)
    )
    assert len(on_stream) == 1  # the others have not ended
    gpu.has_ended = True
    call()
    trace.write()
    events = events_in(tmp_path)
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["calls", "GPU stream 0x7f0012345678"]
    times = [(e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == 0x12345678]
    assert [dur for _, dur in times] == [250] * 4
    # The first call is written at once, and the others are timed from one anchor, at the begin of the second call.
    assert 0 <= times[1][0] - host["ts"] < 60e6
    assert times[2][0] - times[1][0] == pytest.approx(250, abs=0.02)


def test_events_within_a_call_may_be_written_before_it_ends(gpu: Gpu, tmp_path: Path) -> None:
    trace = timeline._Trace(str(tmp_path))
    trace.open(WORLD)
    trace.timed(trace.label("exchange", "exchange", True), trace.write)()
    trace.write()
    assert [e["dur"] for e in events_in(tmp_path) if e["tid"] == 0x12345678 and e["ph"] == "X"] == [
        0
    ]


def test_no_events_of_a_stream_in_a_capture(gpu: Gpu, tmp_path: Path) -> None:
    trace = timeline._Trace(str(tmp_path))
    trace.open(WORLD)
    gpu.stream = None
    trace.timed(trace.label("exchange", "exchange", True), lambda: None)()
    trace.write()
    assert gpu.made == 0
    assert [e["name"] for e in events_in(tmp_path) if e["ph"] == "X"] == ["exchange"]


def test_an_error_of_the_gpu_ends_the_trace_alone(
    gpu: Gpu, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = timeline._Trace(str(tmp_path))
    trace.open(WORLD)
    monkeypatch.setattr(gpu, "get_elapsed_time", lambda *_: 1 / 0)
    call = trace.timed(trace.label("exchange", "exchange", True), lambda: 7)
    assert call() == 7
    trace.write()
    assert "writes no trace" in capsys.readouterr().err
    events_in(tmp_path)


def test_ranges_of_nvtx_have_the_same_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[str] = []
    domain = SimpleNamespace(
        get_event_attributes=lambda message: message,
        push_range=ranges.append,
        pop_range=lambda: ranges.append("pop"),
    )
    monkeypatch.setitem(
        sys.modules,
        "nvtx",
        SimpleNamespace(get_domain=lambda name: domain),
    )
    trace = timeline._Trace(str(tmp_path))
    trace.open(WORLD)
    inner = trace.timed(trace.label("pack", "step"), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trace.timed(trace.label("exchange", "exchange"), inner)()
    assert ranges == ["exchange", "pack", "pop", "pop"]
    trace.write()
    assert [e["name"] for e in events_in(tmp_path) if e["ph"] == "X"] == ["pack", "exchange"]
