"""``HALOX_TRACE``: files of trace events, against the rules of Chrome's trace event format and against `explain`."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.support import on_ranks

RANKS, STEPS = 4, 1000

PROGRAM = """
    import json, sys, time
    import numpy as np
    import halox

    folder, steps = sys.argv[1], int(sys.argv[2])
    grid = halox.Grid((16, 12), halo=1, periodic=True, device="cpu")
    u = grid.zeros()
    plan = grid.plan(u)
    bounds = []
    for _ in range(steps):
        before = time.monotonic_ns()
        plan()
        bounds.append((before, time.monotonic_ns()))
    plan.start()
    plan.finish()
    grid.sum(u)
    other = halox.Grid((16, 12), halo=0, proc_shape=(1, grid.size), device="cpu")
    with halox.Transpose(grid, other) as transpose:
        transpose.forward(u, other.zeros())
    grid.accumulate(u)
    grid.save(f"{folder}/u.npy", u=u)
    rows = [row for row in plan.explain().rows if row.direction == "send" and row.peer != grid.rank]
    paths = sorted({f"{row.path}/{row.protocol}" for row in rows})
    told = {"bounds": bounds, "bytes": sum(row.nbytes for row in rows), "paths": paths}
    with open(f"{folder}/told-{grid.rank}", "w") as file:
        json.dump(told, file)
"""

# Types of the members of an event by its phase: "Trace Event Format", sections "Complete Events" and "Metadata Events".
SCHEMA: dict[str, dict[str, Any]] = {
    "X": {
        **{"name": str, "cat": str, "ph": str, "args": dict},
        **{"ts": (int, float), "dur": (int, float), "pid": int, "tid": int},
    },
    "M": {"name": str, "ph": str, "pid": int, "tid": int, "args": dict},
}
METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}


def run(ranks: int, program: str, tmp_path: Path, *words: object, **environment: str) -> Any:
    script = tmp_path / "program.py"
    script.write_text(dedent(program))
    return on_ranks(ranks, str(script), *map(str, words), **environment)


def events_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the events of a rank's file; each has exactly the members of its phase."""
    events = json.loads((folder / f"rank-{rank:05}.json").read_text())
    for event in events:
        types = SCHEMA[event["ph"]]
        assert event.keys() == types.keys()
        assert all(isinstance(event[key], kind) for key, kind in types.items()), event
        assert event["pid"] == rank and 0 <= event["tid"] < 2**31
        if event["ph"] == "M":
            assert [*event["args"]] == [METADATA[event["name"]]]
        else:
            assert event["ts"] > 0 and event["dur"] >= 0
    assert f"rank {rank} on " in events[0]["args"]["name"]
    return [event for event in events if event["ph"] == "X"]


def parents_of(events: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return each event with the name of the one around it, "" without one; events of a thread must nest."""
    pairs = []
    for _, track in groupby(sorted(events, key=lambda e: e["tid"]), key=lambda e: e["tid"]):
        inside: list[dict[str, Any]] = []
        for event in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
            while inside and inside[-1]["ts"] + inside[-1]["dur"] <= event["ts"]:
                inside.pop()
            if inside:
                end = inside[-1]["ts"] + inside[-1]["dur"]
                assert (
                    event["ts"] + event["dur"] <= end + 0.02
                )  # us; the rounding of JSON's numbers
            pairs.append((inside[-1]["name"] if inside else "", event))
            inside.append(event)
    return pairs


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traced")
    ended = run(RANKS, PROGRAM, folder, folder, STEPS, HALOX_TRACE=str(folder / "trace"))
    assert ended.returncode == 0 and "trace" not in ended.stderr, ended.stderr
    return folder


def told(folder: Path, rank: int) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / f"told-{rank}").read_text())
    return values


def test_events_are_nested_calls_with_paths_and_bytes(traced: Path) -> None:
    for rank in range(RANKS):
        expected = told(traced, rank)
        pairs = parents_of(events_of(traced / "trace", rank))
        args = {"path": ", ".join(expected["paths"]), "bytes": expected["bytes"]}
        exchanges = [event for _, event in pairs if event["name"] == "exchange"]
        assert len(exchanges) == STEPS
        assert all(event["args"].items() >= args.items() for event in exchanges)
        names = {event["name"] for _, event in pairs}
        assert names >= {
            "exchange start",
            "exchange finish",
            "Grid",
            "sum",
            "transpose",
            "accumulation",
            "save",
        }
        steps = [
            event
            for parent, event in pairs
            if parent == "exchange" and "/" in event["args"]["path"]
        ]
        assert {event["name"] for event in steps} <= {"pack", "send", "wait", "unpack", "copy"}
        moved = [event["args"]["bytes"] for event in steps if event["name"] in ("unpack", "copy")]
        # Periodic: as many bytes are received as are sent.
        assert sum(moved) == STEPS * expected["bytes"]


def test_clocks_of_ranks_agree(traced: Path) -> None:
    """Each call lies between two readings of the ranks' common clock, which bounds the shift of the trace's clock."""
    lowest, highest = [], []
    for rank in range(RANKS):
        events = [e for e in events_of(traced / "trace", rank) if e["name"] == "exchange"]
        pairs = [*zip(events, told(traced, rank)["bounds"], strict=True)]
        highest.append(min(event["ts"] - before / 1000 for event, (before, _) in pairs))
        lowest.append(max(event["ts"] + event["dur"] - after / 1000 for event, (_, after) in pairs))
    assert max(lowest) - min(highest) < 5


def test_files_are_complete_after_errors(tmp_path: Path) -> None:
    program = """
        import halox

        grid = halox.Grid((8, 8), halo=1, device="cpu")
        u = grid.zeros()
        grid.exchange(u)
        if grid.rank == 1:
            raise ValueError("a mistake of one rank")
        grid.sum(u)
    """
    ended = run(2, program, tmp_path, HALOX_TRACE=str(tmp_path / "trace"))
    assert ended.returncode and "a mistake of one rank" in ended.stderr
    for rank in range(2):
        events = events_of(tmp_path / "trace", rank)
        assert rank == 0 or "exchange" in {event["name"] for event in events}


def test_a_killed_rank_leaves_a_complete_file(tmp_path: Path) -> None:
    program = """
        import os, signal
        import halox

        grid = halox.Grid((8, 8), halo=1, periodic=True, device="cpu")
        u = grid.zeros()
        for _ in range(3000):
            grid.exchange(u)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run(1, program, tmp_path, HALOX_TRACE=str(tmp_path / "trace"))
    # Events are written after 4096 of them at the latest; each exchange is two.
    assert len(events_of(tmp_path / "trace", 0)) > 1000


@pytest.mark.parametrize("folder", ["/proc/halox", "a_file"])
def test_a_folder_that_cannot_be_written(folder: str, tmp_path: Path) -> None:
    (tmp_path / "a_file").touch()
    program = """
        import halox

        with halox.Grid((8, 8), halo=1, device="cpu") as grid:
            for _ in range(5000):
                grid.sum(grid.ones())
    """
    ended = run(2, program.replace("5000", "50"), tmp_path, HALOX_TRACE=str(tmp_path / folder))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("writes no trace") == 1 and "HALOX_TRACE" in ended.stderr
