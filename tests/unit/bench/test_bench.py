"""``halox bench``: commands, checks that find wrong values, layouts by hand, and the table of targets."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.cli import main
from halox_bench import allreduce, byhand, command, exchange, messages, targets, transpose
from halox_bench.bench import Bench, Method, Plan, timed
from halox_bench.checks import filled
from halox_bench.clock import Timing
from halox_bench.figures import measured, of_rows
from halox_bench.kernels import settings_of, source
from halox_bench.layouts import Boxes, Gathers, Triangle
from halox_bench.pack import packed_bytes
from halox_bench.patterns import PATTERNS, Case, select
from halox_bench.rows import BASELINE, GRAPH, SELECTED, STREAM, Row
from halox_bench.targets import APART, HOST, ONE, SHARED, TARGETS, Target
from tests.fakes.cpu_kernels import SHIM, shared_library
from tests.project.test_readme import MEASURED
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


def test_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in command.KINDS:
        assert main(["bench", kind, "--list", "--quick"]) == 0
        assert capsys.readouterr().out.strip(), kind


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


ENTRIES = """
extern "C" void run_boxes(unsigned grid, u64 array, u64 packed, const Boxes* table)
{
    launch_on_cpu(grid, THREADS, true, boxes, (unsigned char*)array, (unsigned char*)packed, *table);
}
extern "C" void run_gathers(unsigned grid, u64 array, u64 packed, const Gathers* table)
{
    launch_on_cpu(grid, THREADS, true, gathers, (unsigned char*)array, (unsigned char*)packed, *table);
}
extern "C" void run_faces(unsigned grid, const Box* table, unsigned each)
{
    launch_on_cpu(grid, THREADS, true, faces, table, each);
}
extern "C" void run_triangle(unsigned grid, u64 array, u64 packed, unsigned n)
{
    launch_on_cpu(grid, THREADS, true, triangle, (double*)array, (double*)packed, n);
}
"""


@cache
def kernels(word: int, unpack: int) -> ctypes.CDLL:
    """Compile the kernels by hand as C++."""
    settings = settings_of(WORD_BYTES=word, UNPACK=unpack, THREADS=256, EACH=4, PARTS=10)
    return shared_library(f'#include "{SHIM}"\n{source("byhand", settings)}\n{ENTRIES}', "-O1")


def run_by_hand(case: Case, slab: np.ndarray, packed: np.ndarray, unpack: int) -> None:
    ends = [ctypes.c_uint64(array.ctypes.data) for array in (slab, packed)]
    layout = case.by_hand
    if isinstance(layout, Boxes):
        boxes, blocks = byhand.box_table(layout, case.offsets, layout.word)
        kernels(layout.word, unpack).run_boxes(blocks, *ends, ctypes.byref(boxes))
    elif isinstance(layout, Gathers):
        lists = [part.index.astype(np.uint32) for part in layout.parts]
        places = [one.ctypes.data for one in lists]
        word = min(part.word for part in layout.parts)
        gathers, blocks = byhand.gather_table(layout, case.offsets, places, word)
        kernels(word, unpack).run_gathers(blocks, *ends, ctypes.byref(gathers))
    elif isinstance(layout, Triangle):
        kernels(8, unpack).run_triangle(7, *ends, layout.n)


def aligned(nbytes: int) -> np.ndarray:
    memory = np.zeros(nbytes + 512, "u1")
    return memory[-memory.ctypes.data % 512 :][:nbytes]


SOME = ("vector/8B-64KiB", "hypercube/4", "WRF_x_vec/8x8", "FFT2/256", "LAMMPS_full/1907-1662")
LISTS = ("SPECFEM3D_cm/c1", "random_indexed/dense-64KiB", "lower_triangle/1024")


@pytest.mark.parametrize("name", [*SOME, *LISTS])
@pytest.mark.part(2)
def test_kernels_by_hand(name: str) -> None:
    require("cxx")
    (case,) = select([name])
    slab, packed = aligned(case.slab_bytes), aligned(case.payload)
    slab[:] = filled(slab.size)
    run_by_hand(case, slab, packed, 0)
    here = places(case)
    assert np.array_equal(packed, slab[here])
    changed, there = aligned(slab.size), ~slab
    changed[:] = there
    run_by_hand(case, changed, packed, 1)
    there[here] = slab[here]
    assert np.array_equal(changed, there)


@pytest.mark.parametrize("faces", ["x", "all"])
def test_the_exchange_by_hand(faces: str) -> None:
    """A rank that is its own neighbour packs into the buffer from which it unpacks."""
    require("cxx")
    case = exchange.ExchangeCase((6, 5, 4), faces, 2, "f4", 2)
    near = exchange.Neighbourhood(case, {0: (0, 0, 0)}, 0)
    oracle, nbytes = exchange.Oracle(near), 4 * int(np.prod(case.padded_shape))
    fields = [aligned(nbytes).view("f4").reshape(case.padded_shape) for _ in range(2)]
    oracle.fill(fields, 3)
    sides = exchange.Segments(near.sends), exchange.Segments(near.receives)
    buffer = aligned(sides[1].nbytes)
    addresses = [field.ctypes.data for field in fields]
    assert [p.tag for p in near.sends] == [p.tag for p in near.receives]
    for unpack, pieces in enumerate((near.sends, near.receives)):
        places = [buffer.ctypes.data + at for at in sides[1].offsets]
        table, word, each = exchange.face_table(pieces, addresses, places)
        kernels(word, unpack).run_faces(len(pieces) * each, table, each)
    assert oracle.wrong(fields, 3) == 0


# The table of targets.

PLACES = [
    (HOST, 1),
    (HOST, 2),
    (HOST, 4),
    (ONE, 1),
    (SHARED, 2),
    (APART, 2),
    (APART, 4),
    (APART, 8),
]


def names(on: str, ranks: int) -> list[str]:
    """Return the names of all figures of a place, as they are written to the results of the GPU check."""
    return [
        target.name.replace("<ranks>", str(ranks)).replace("<mode>", mode)
        for target in targets.on(on, ranks)
        for best in target.limits
        for mode in ((STREAM, GRAPH) if best == targets.BEST else (best,))
    ]


def test_names_are_distinct() -> None:
    for on, ranks in PLACES:
        found = names(on, ranks)
        assert found and len({*found}) == len(found)


@pytest.mark.parametrize("name", sorted({one.kind for one in TARGETS}))
def test_words_select_the_cases(name: str) -> None:
    kind = command.KINDS[name]
    for target in TARGETS:
        if target.kind == name and target.form != targets.CHOICE:
            cases = [case.name for case in kind.cases(kind.parsed(target.words))]
            wanted = {target.case, target.their_case or target.case} - {""}
            assert wanted <= {*cases} if wanted else len(cases) == 1, target


PLACE_OF = {"gpu-check.json": (SHARED, 2), "gpu-check-two-gpus.json": (APART, 2)}
PLACE_OF |= {"gpu-check-four-gpus.json": (APART, 4)}


def test_the_table_has_the_rows_of_the_readme() -> None:
    for file, name in MEASURED.values():
        assert name in names(*PLACE_OF[file])


def test_plots_find_the_figures_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ROOT / "docs" / "_ext" / "measured.py"
    pytest.importorskip("docutils")
    spec = importlib.util.spec_from_file_location("measured", place)
    assert spec is not None and spec.loader is not None
    plots = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "measured", plots)
    spec.loader.exec_module(plots)
    for plot in plots.TIMES.values():
        on = {1: (SHARED, 2), 2: (APART, 2), 4: (APART, 4)}[plot.gpus]
        assert sum(bool(re.fullmatch(plot.pattern, name)) for name in names(*on)) >= 3, plot.title


def test_the_check_runs_the_kinds_of_the_table() -> None:
    assert targets.kinds_on(1, 1) == ["transpose", "fft", "pack", "calls", "steps", "checkpoint"]
    for gpus, ranks in ((1, 2), (2, 2), (4, 4), (8, 8)):
        found = {*targets.kinds_on(ranks, gpus)}
        assert {"transpose", "exchange"} <= found <= {*command.KINDS} - {"pack"}


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
