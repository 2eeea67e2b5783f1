"""``halox bench``: commands, checks that find wrong values, layouts by hand, and the table of targets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.cli import main
from halox_bench import allreduce, command, exchange, messages, transpose
from halox_bench.bench import Bench, Method, Plan, timed
from halox_bench.checks import filled
from halox_bench.clock import Timing
from halox_bench.figures import measured, of_rows
from halox_bench.pack import packed_bytes
from halox_bench.patterns import PATTERNS, Case, select
from halox_bench.rows import BASELINE, GRAPH, SELECTED, STREAM, Row
from halox_bench.targets import APART, Target
from tests.support import require

require("mpi")

ROOT = Path(__file__).resolve().parents[3]
BRIEF = Timing(1, 1e-5)


def alone() -> Bench:
    from mpi4py import MPI

    return Bench(MPI.COMM_SELF, "cpu", BRIEF)


# The command.


def test_rows_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    words = "exchange --device cpu --sizes 8 --faces x,all --dtype f4,c8 --repeats 1 --json"
    assert main(["bench", *words.split(), str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["machine"]["device"] == "cpu" and found["machine"]["ranks"] == 1
    assert {row["case"] for row in found["rows"]} == {
        f"8^3 {dtype} {faces}" for dtype in ("f4", "c8") for faces in ("x", "all")
    }
    assert all(row["us"] > 0 and not row["error"] for row in found["rows"])
    said = capsys.readouterr().out
    assert said.count("mpi4py types") == 4 and " x\n" in said


@pytest.mark.parametrize(
    "words",
    [
        "exchange --device cpu --sizes 8 --faces t",
        "exchange --device cpu --sizes 2 --halo 3",
        "pack --device cpu --patterns no_such",
        "exchange --device cpu --json /no/such/folder/x.json",
        "checkpoint --device cpu --folder /no/such/folder",
    ],
)
def test_wrong_commands(words: str) -> None:
    assert main(["bench", *words.split()]) == 2


def test_mpi_is_not_loaded_before_the_ranks_are_started() -> None:
    code = "import halox_bench.command, sys; assert 'mpi4py.MPI' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'asv_bench'}"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=500)


# Checks.


def test_a_wrong_result_has_no_time() -> None:
    bench, case = alone(), SimpleNamespace(name="c", details={})
    results = {"right": 1, "wrong": 2}

    def make(name: str) -> Method:
        return Method(lambda: None, found={"path": name})

    def check(method: Method, call: Any) -> int:
        return int(results[method.found["path"]] != 1)

    plans = [Plan(BASELINE, name, partial(make, name)) for name in results]
    right, wrong = timed(bench, case, plans, check)
    assert right.us and not right.failed
    assert wrong.us is None and wrong.failed and "wrong" in wrong.error


def test_a_wrong_result_is_a_failed_figure() -> None:
    bad = Row("c", SELECTED, SELECTED, error="WrongResult", failed=True)
    kind = command.KINDS["pack"]
    broken = type(kind)("pack", "", kind.cases, lambda *_: [bad], kind.options)
    found = measured(broken, alone(), kind.parsed(""), lambda *_: None)
    assert found and all("WrongResult" in one["failed"] for one in found)


def spoilt(array: np.ndarray, place: int) -> np.ndarray:
    array.reshape(-1)[place] += 1
    return array


@pytest.mark.parametrize(
    ("faces", "dtype"), [("x", "f8"), ("faces", "c8"), ("all", "i1"), ("all", "f8")]
)
def test_an_exchange_is_compared_cell_by_cell(faces: str, dtype: str) -> None:
    """One rank: NumPy's own wrap-around padding is right; without corners they stay poisoned."""
    case = exchange.ExchangeCase((5, 4, 6), faces, 1, dtype)
    near = exchange.Neighbourhood(case, {0: (0, 0, 0)}, 0)
    oracle, u = exchange.Oracle(near), np.empty(case.padded_shape, dtype)
    oracle.fill([u], 1)
    assert oracle.wrong([u], 1) > 0, "the halo is poisoned"
    before, wrapped = u.copy(), np.pad(u[1:-1, 1:-1, 1:-1], 1, "wrap")
    edge = [np.abs(np.arange(-1, n - 1) - (n - 3) / 2) > (n - 3) / 2 for n in u.shape]
    outside = sum(np.meshgrid(*edge, indexing="ij"), np.zeros(u.shape, int))
    filled_in = outside <= (3 if faces == "all" else 1)
    if faces == "x":
        filled_in &= ~(edge[0][:, None, None] | edge[1][None, :, None])
    u[...] = np.where(filled_in, wrapped, before)
    assert oracle.wrong([u], 1) == 0 and oracle.wrong([u], 2) > 0
    for place in (0, u.size // 2, u.size - 1):
        assert oracle.wrong([spoilt(u.copy(), place)], 1) == 1


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_transpose_is_compared_cell_by_cell(direction: str) -> None:
    case = transpose.TransposeCase((3, 4, 5), (1, 2, 0), "c16", "whole", direction)
    shapes = case.shapes[:: 1 if direction == "forward" else -1]
    blocks = [tuple(slice(0, n) for n in shape) for shape in shapes]
    oracle = transpose.TransposeOracle(case, *blocks)
    source, target = (np.empty(shape, "c16") for shape in shapes)
    oracle.fill(source, target, 1)
    assert oracle.wrong(target, 1) == target.size
    target[...] = source.transpose(case.source_axes)
    assert oracle.wrong(target, 1) == 0 and oracle.wrong(spoilt(target, 7), 1) == 1


@pytest.mark.parametrize(
    ("op", "elements"), [("sum", 70_000), ("sum", 1), ("prod", 70_000), ("min", 1), ("max", 70_000)]
)
def test_an_allreduce_is_compared_element_by_element(op: str, elements: int) -> None:
    case = allreduce.AllreduceCase(elements, "f4", op)
    arrays = [(np.empty(elements, "f4"), np.empty(elements, "f4")) for _ in range(3)]
    for rank, both in enumerate(arrays):
        oracle = allreduce.AllreduceOracle(case, rank, 3)
        oracle.fill(*both, 1)
        assert oracle.wrong(both[1], 1) == elements
    stacked = np.stack([source for source, _ in arrays])
    target = getattr(np, op)(stacked, axis=0)
    assert oracle.wrong(target, 1) == 0 and oracle.wrong(spoilt(target, -1), 1) == 1


def test_a_message_is_compared_word_by_word() -> None:
    case = messages.of_ddtbench(select(["NAS_MG_x/34x18x18"])[0])
    both = [messages.TripOracle(case, rank) for rank in range(2)]
    slabs = [np.empty(case.slab_bytes, "u1") for _ in range(2)]
    for oracle, slab in zip(both, slabs, strict=True):
        oracle.fill(slab, 0)
    there = [case.directions(rank)[0] for rank in range(2)]
    packed, (sent, received) = np.empty(case.nbytes, "u1"), (there[0].packed, there[1].unpacked)
    assert sent is not None and received is not None
    sent.pack([slabs[0]], packed)
    assert both[1].wrong(slabs[1], 0, (0,)) > 0
    slabs[1].view("u4")[messages.places(case, received)] = packed.view("u4")
    assert [both[k].wrong(slabs[k], 0, (0,)) for k in range(2)] == [0, 0]
    assert both[1].wrong(spoilt(slabs[1], 5), 0, (0,)) == 1


# Layouts by hand.

SMALLEST = [min(make(), key=lambda case: case.slab_bytes) for make, _ in PATTERNS.values()]


def places(case: Case) -> np.ndarray:
    """Return the numbers of the slab's bytes that the datatype packs, in order."""
    blocks = case.datatype().blocks(case.count).shifted(case.start)
    ends = np.cumsum(blocks.lengths)
    return np.repeat(blocks.offsets - ends + blocks.lengths, blocks.lengths) + np.arange(ends[-1])


@pytest.mark.parametrize("case", SMALLEST, ids=lambda case: case.name)
def test_the_datatype_is_the_layout_by_hand(case: Case) -> None:
    slab = filled(case.slab_bytes)
    assert np.array_equal(packed_bytes(case, slab), slab[places(case)])


# The table of targets.


ROWS = [
    Row("c", SELECTED, SELECTED, STREAM, 4.0, "peer/ll", details={"bytes_sent": 8}),
    Row("c", SELECTED, SELECTED, GRAPH, 3.0, "peer/ll"),
    Row("c", BASELINE, "hand", STREAM, 10.0),
    Row("c", "named", "peer", STREAM, 5.0, "peer/ll"),
    Row("d", SELECTED, SELECTED, STREAM, 2.0),
    Row("c", BASELINE, "absent", error="NCCL refuses"),
]


@pytest.mark.parametrize(
    ("form", "limit", "theirs", "wanted", "met"),
    [
        ("us", 5.0, ("absent", "hand"), 4.0, True),
        ("us", 3.9, (), 4.0, False),
        ("over", 0.5, ("hand",), 0.4, True),
        ("faster", 2.5, ("hand",), 2.5, True),
        ("faster", 2.6, ("absent", "hand"), 2.5, False),
        ("choice", 0.95, (), 1.0, True),
    ],
)
def test_a_figure(form: str, limit: float, theirs: Any, wanted: float, met: bool) -> None:
    target = Target(
        "exchange", APART, (), "x, <ranks> in a <mode>", "", {STREAM: limit}, theirs, form
    )
    if form != "choice":
        target = target._replace(case="c")
    (found,) = of_rows(target, ROWS, 2)
    assert (found["value"], found["met"], found["target"]) == (wanted, met, limit)
    if form != "choice":
        assert found["name"] == "x, 2 in a stream" and found["path"] == "peer/ll"
        assert found["others"] == {"selected": 4.0, "hand": 10.0, "peer": 5.0}
    json.dumps(found, allow_nan=False)


def test_a_figure_beside_another_case_and_without_its_method() -> None:
    target = Target(
        "exchange", APART, (), "x", "", {STREAM: 1.5}, (SELECTED,), case="c", their_case="d"
    )
    (found,) = of_rows(target, ROWS, 2)
    assert found["value"] == 2.0 and not found["met"]
    (found,) = of_rows(target._replace(ours="absent"), ROWS, 2)
    assert found["failed"] == "NCCL refuses"
    assert not [*of_rows(target._replace(theirs=("absent",)), ROWS, 2)]
