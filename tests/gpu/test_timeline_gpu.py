"""``HALOX_TRACE`` on a GPU: work of a stream lies between readings of the host's clock around it."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support import on_ranks, require

require("gpu")

pytestmark = pytest.mark.gpu

PROGRAM = """
    import json, sys, time
    import cupy
    import halox

    grid = halox.Grid((64, 64), halo=1, periodic=True, device="gpu")
    u, bounds = grid.zeros(), []
    plan = grid.plan(u)
    plan()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(100):
            stream.synchronize()
            before = time.monotonic_ns()
            plan()
            stream.synchronize()
            bounds.append((before, time.monotonic_ns()))
        stream.begin_capture()
        plan()
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    json.dump([stream.ptr, bounds], open(sys.argv[1], "w"))
"""


def test_work_of_a_stream_on_the_clock_of_the_host(tmp_path: Path) -> None:
    script, told = tmp_path / "program.py", tmp_path / "told"
    script.write_text(dedent(PROGRAM))
    ended = on_ranks(1, str(script), str(told), HALOX_TRACE=str(tmp_path))
    assert ended.returncode == 0 and "trace" not in ended.stderr, ended.stderr
    stream, bounds = json.loads(told.read_text())
    events = json.loads((tmp_path / "rank-00000.json").read_text())
    exchanges = [event for event in events if event["name"] == "exchange"]
    on_stream = [event for event in exchanges if event["tid"] == stream % 2**31]
    calls = [event for event in exchanges if event not in on_stream and event["tid"]][-101:-1]
    assert len(on_stream) == len(calls) == 100
    # A call begins after the first reading, so that this difference bounds the distance of the two clocks.
    shift = min(call["ts"] - first / 1000 for call, (first, _) in zip(calls, bounds, strict=True))
    for event, (first, last) in zip(on_stream, bounds, strict=True):
        assert event["ts"] - first / 1000 > shift - 50
        assert event["ts"] + event["dur"] - last / 1000 < shift + 50
