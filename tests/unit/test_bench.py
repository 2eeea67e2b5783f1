"""``halox bench``: every kind on one or two ranks, its rows, table and files; wrong command lines."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halox.cli import catalogue as packages
from halox.cli import main
from halox.errors import HaloxError, MissingPackageError
from halox.packing.host import HostPacker
from halox.runtime.gpu import cuda
from halox_bench.allreduce import baselines as allreduce
from halox_bench.allreduce.run import calls_to_pay
from halox_bench.common.plots import Plot, draw
from halox_bench.common.rows import CASE, METHOD, US, Row, Table, beside, choices
from halox_bench.common.timing import Timed
from halox_bench.exchange import baselines as exchange
from halox_bench.exchange import targets as exchange_targets
from halox_bench.pack import on_host
from halox_bench.pack.cases import catalogue, select
from halox_bench.pack.rows import COPY, rows_of
from halox_bench.ranks.clock import Timing
from halox_bench.transpose import baselines as transpose
from halox_bench.transpose import targets as transpose_targets
from halox_bench.trips import baselines as trips
from tests.support import halox_bench, require

OURS = {"selected", "host", "scatter_gather"}
BY_HAND = {trips.MPI_TYPES, trips.BY_HAND, trips.MPI_PACK, trips.HALOX_PACK, trips.REFERENCE}
EXCHANGES = {exchange.BY_HAND, exchange.MPI_TYPES, exchange.MPI_NEIGHBOUR}
TRIPS = {*OURS, *BY_HAND}

RUNS: dict[str, tuple[int, set[str], str]] = {
    "exchange --sizes 6,12x10x8 --faces x,all --fields 1,2": (8, OURS | EXCHANGES, "exchange-3d-x"),
    "allreduce --sizes 4,3000 --dtype f4,i8": (
        4,
        {"selected", "host", "hierarchical", allreduce.MPI},
        "allreduce-f4-sum",
    ),
    "transpose --sizes 6x5x4,12x10x8 --axes 012,210 --directions forward --divisions slabs": (
        4,
        OURS | {transpose.COPY, transpose.ALLTOALLW, transpose.ALLTOALLW_COPYTO},
        "transpose-transpose-210-slabs",
    ),
    "pingpong --where host --sizes 4,33": (8, TRIPS, "pingpong-vector-contiguous-host"),
    "ddtbench --where host --patterns NAS_LU_?/12,NAS_LU_?/33": (
        4,
        TRIPS,
        "ddtbench-NAS_LU_x-host",
    ),
    "scatter_gather --where host --patterns vector-1KiB/[13]*": (
        3,
        {*TRIPS, "scatter_gather, no key cache"},
        "scatter_gather-vector-1KiB-host",
    ),
}
"""Command lines, their number of cases, the names of their methods, and the first words of a figure's file."""


def bench(words: str) -> int:
    try:
        return main(["bench", *words.split()])
    except SystemExit as ended:
        return ended.code  # type: ignore[return-value]


@pytest.mark.parametrize("words", RUNS)
def test_two_ranks(words: str, tmp_path: Path) -> None:
    cases, names, figure = RUNS[words]
    file, folder = tmp_path / "rows.json", tmp_path / "plots"
    kind, *others = words.split()
    device = [] if "--where" in others else ["--device", "cpu", "-n", "2"]
    ended = halox_bench(
        *(kind, *others, *device, "--repeats", "1", "--json", str(file), "--plot", str(folder))
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(file.read_text())
    rows = result["rows"]
    assert result["machine"]["ranks"] == 2 and result["machine"]["device"] == "cpu"
    assert len({row["case"] for row in rows}) == cases
    # Without process_vm_readv the kernel's copies are impossible, and the rows say why.
    refused = [row for row in rows if row["us"] is None]
    assert {row["name"] for row in refused} <= {"scatter_gather"}
    assert all(row["error"] and not row["failed"] for row in refused)
    timed = [row for row in rows if row["us"] is not None]
    assert {row["name"] for row in timed} >= names - {
        "scatter_gather",
        "scatter_gather, no key cache",
    }
    assert {row["name"] for row in rows} <= names
    for row in timed:
        assert row["us"] > 0 and row["checked"] and not row["error"]
        assert row["name"] in ended.stdout and row["case"].split("/")[0] in ended.stdout
        baselines = {one["name"] for one in rows if one["kind"] == "baseline"}
        assert set(row["beside"]) <= baselines and row["beside"]
        if kind in ("pingpong", "ddtbench", "scatter_gather"):
            assert np.isclose(row["gb_per_s"], row["nbytes"] / row["us"] / 1e3)
        if kind == "allreduce" and row["kind"] != "baseline":
            calls = calls_to_pay(row["setup_us"], row["us"], row["beside"][allreduce.MPI])
            assert row["pays_after"] == {allreduce.MPI: calls} and row["first_setup_us"] > 0
    assert f"chosen {'algorithm' if kind == 'allreduce' else 'path'} over best" in ended.stdout
    compared = result["chosen_over_best"]
    assert len(compared["cases"]) == cases and 0 <= compared["share_within"] <= 1
    drawn = [path for path in folder.iterdir() if path.name.startswith(figure)]
    assert drawn and all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


ALONE = {
    "exchange --device cpu --sizes 5 --faces all --no-baselines": OURS,
    "allreduce --device cpu --sizes 8 --algorithms host --no-baselines": {"selected", "host"},
    "transpose --device cpu --sizes 6x5,4x5x6 --axes 10,021 --components 1,3": {
        *("selected", transpose.COPY, transpose.COPYTO),
    },
    "pack --device cpu --patterns NAS_LU_y/33,WRF_x_vec/8x8,SPECFEM3D_cm/c1,struct_24/4096,"
    "lower_triangle/1024 --direction pack,unpack": {COPY, "NumPy by hand", "mpi4py", "host"},
    "pack --device cpu --patterns FFT2/256 --no-baselines": {COPY, "host"},
}


@pytest.mark.parametrize("words", ALONE)
def test_one_process(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require("mpi")
    file = tmp_path / "result.json"
    assert bench(f"{words} --repeats 2 --json {file}") == 0
    rows = json.loads(file.read_text())["rows"]
    assert {row["name"] for row in rows} == ALONE[words]
    assert all(row["us"] > 0 and row["checked"] and not row["error"] for row in rows)
    out = capsys.readouterr().out
    assert len(out.splitlines()) >= len(rows) + 2 and rows[0]["case"].split("/")[0] in out


@pytest.mark.parametrize("kind", ["exchange", "transpose"])
def test_targets_of_numpy_arrays(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require("mpi")
    brief, file = Timing(batches=1, batch_s=1e-5), tmp_path / "found.json"
    monkeypatch.setattr(exchange_targets, "HOST_SHAPES", ((6, 5), (3, 4, 5)))
    monkeypatch.setattr(exchange_targets, "HOST_TIMING", brief)
    monkeypatch.setattr(transpose_targets, "ON_HOST", (6, 5, 4))
    monkeypatch.setattr(transpose_targets, "TIMING", brief)
    assert bench(f"{kind} --device cpu --targets --json {file}") == 0
    found = json.loads(file.read_text())["targets"]
    assert len(found) == 4 and all(one["value"] > 0 for one in found)
    out = capsys.readouterr().out
    assert "3x4x5 float64 a rank" in out or "times as fast as np.copyto" in out
    if kind == "exchange":
        monkeypatch.setattr(exchange.ByHand, "__call__", lambda self: None)
        assert bench(f"{kind} --device cpu --targets") == 1
        assert "wrong result" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ("pack", ["face_x/512", "lower_triangle/1024"]),
        ("exchange", ["768^3 f8 x", "16x16x16x8 c8[3] faces"]),
        ("allreduce", ["4B f4 sum", "128MiB f4 sum", "8B f8 max"]),
        ("transpose", ["8192x8192 f4 vector unpack", "256x256x512 c16 axes 210 pencils forward"]),
        ("pingpong --quick", ["vector/64", "transpose/2048"]),
        ("ddtbench", ["LAMMPS_atomic/1217-114", "FFT2/256"]),
        ("scatter_gather --quick", ["NAS_MG_y/512x66x66"]),
        ("milc", ["32x32x32x32 improved double", "16x16x16x16 naive single"]),
        ("checkpoint", ["512x512x512"]),
    ],
)
def test_lists(words: str, texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(f"{words} --list") == 0
    assert set(texts) <= set(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "WHAT"),
        ("walk", "walk"),
        ("pack --patterns nothing --device cpu", "known are contiguous"),
        ("pack --patterns face_x/7 --device cpu", "64, 128, 256, 512"),
        ("pack --methods fast", "traversal"),
        ("pack --destinations moon", "device, host, peer"),
        ("pack --max-blocks 0", "at least 1"),
        ("pack --repeats many", "whole number"),
        ("pack --device cpu --json /no/such/folder/x.json --patterns FFT2", "no such folder"),
        ("contention --device cpu", "contention needs a GPU"),
        ("exchange --sizes 0", "at least 1"),
        ("exchange --sizes 8x8 --faces z", "expected one of x, y, faces, all"),
        ("exchange --sizes 8 --halo 9", "wider than a block"),
        ("exchange --sizes 8 --dtype floaty", "not one of numbers"),
        ("exchange --sizes 1x2x3x4x5", "1 to 4 axes"),
        ("exchange --paths host,carrier", "there is no path 'carrier' between ranks; known are"),
        ("pingpong --paths local", "there is no path 'local'"),
        ("pingpong --patterns spiral", "known are vector"),
        ("pingpong --where moon", "host, 1gpu, 2gpus"),
        ("ddtbench --patterns vector", "no pattern is called 'vector'; known are WRF_x_vec"),
        ("ddtbench --patterns FFT2/100", "its sizes: 256, 512"),
        (
            "scatter_gather --patterns vector",
            "no pattern is called 'vector'; known are vector-1KiB",
        ),
        ("allreduce --sizes 0", "expected bytes"),
        ("allreduce --dtype floaty", "--dtype floaty"),
        ("allreduce --dtype f4 --op bitwise_and", "no meaning"),
        ("allreduce --device cpu --sizes 8 --algorithms magic", "expected host, hierarchical"),
        ("allreduce --targets --device cpu", "needs a GPU"),
        ("transpose --paths staged/pigeon", "known are staged/shared, staged/mpi"),
        ("transpose --sizes 4x5 --axes 021", "no order of 2 axes"),
        ("transpose --axes ab", "as in 10,021"),
        ("transpose --sizes 4x5x6 --axes 012,013", "expected an order of 012"),
        ("transpose --sizes 4x5x6 --methods vector", "nothing to measure"),
        ("transpose --divisions bricks", "whole, slabs, pencils"),
        ("transpose --device cpu --sizes 4x5 --divisions slabs", "whole arrays are for one rank"),
        ("transpose --sizes 7", "2 to 4 axes"),
        ("milc --lattices 8x8x8x7", "expected even numbers of sites"),
        ("milc --operators clover", "improved, naive"),
        ("checkpoint --device cpu --folder /no/such --cells 8", "no such folder"),
    ],
)
def test_wrong_command_lines(words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    require("mpi")
    assert bench(words) == 2
    assert text in capsys.readouterr().err


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cuda, "why_no_gpu", lambda: "it is on loan")
    for words in ("pack --device gpu", "pack --targets", "contention"):
        assert bench(words) == 2
        assert "it is on loan" in capsys.readouterr().err


def test_errors_of_all_ranks_are_printed_once() -> None:
    for kind in ("exchange --device cpu -n 2", "pingpong --where host"):
        ended = halox_bench(*kind.split(), "--json", "/no/such/x.json")
        assert ended.returncode == 2
        assert ended.stderr.count("there is no such folder as /no/such") == 1
        assert "Traceback" not in ended.stderr


def test_an_impossible_path_is_a_row_with_the_reason() -> None:
    words = "exchange -n 2 --device cpu --sizes 4 --faces x --paths host,peer --repeats 1"
    ended = halox_bench(*words.split(), "--no-baselines")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (refused,) = [text for text in ended.stdout.splitlines() if " peer " in text]
    assert "FAILED" not in refused and "these arrays are NumPy" in refused


@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_a_wrong_result_is_a_failing_status(
    direction: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require("mpi")

    class Wrong(HostPacker):
        def packing(self, out: np.ndarray) -> Callable[[], object]:
            return self._spoilt(super().packing(out), out, -1)

        def unpacking(self, packed: np.ndarray) -> Callable[[], object]:
            return self._spoilt(super().unpacking(packed), self._memory, 40)  # beside the blocks

        def _spoilt(self, call: Any, memory: Any, at: int) -> Callable[[], object]:
            def wrong() -> None:
                call()
                memory[at] ^= 1

            return wrong

    monkeypatch.setattr(on_host, "HostPacker", Wrong)
    words = f"pack --device cpu --patterns NAS_LU_y/12 --repeats 2 --direction {direction}"
    assert bench(words) == 1
    out = capsys.readouterr().out
    assert "FAILED: HaloxError: wrong result" in out and " mpi4py " in out, "the others go on"
    assert ("1 wrong bytes" in out) is (direction == "pack")
    assert ("1 written beside" in out) is (direction == "unpack")


def test_imports_no_gpu_package_and_no_plots() -> None:
    code = (
        "import sys; from halox.cli import main; main(['bench', 'pack', '--list']); "
        "assert not {'cupy', 'matplotlib', 'mpi4py.MPI'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500, capture_output=True)


def test_without_the_suite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages.package(packages.PACKAGE)
    found = importlib.import_module

    def missing(name: str) -> Any:
        if name == "halox_bench":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return found(name)

    monkeypatch.setattr(packages, "checkout", lambda: None)
    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.delitem(sys.modules, "halox_bench")
    assert bench("pack --list") == 2
    said = capsys.readouterr().err
    assert "neither the package 'halox_bench' nor" in said and "install halox" in said
    assert main(["info"]) == 0, "everything else does without"


def row(kind: str, name: str, us: float | None, **others: Any) -> Row:
    return Row("8^3", kind, name, us=us).with_(**others)


class TestRows:
    def test_baselines_of_the_same_mode_are_beside(self) -> None:
        rows = [row("selected", "selected", 2.0), row("selected", "selected", 1.0, mode="graph")]
        rows += [row("baseline", "a", 4.0), row("baseline", "b", 6.0)]
        rows.append(row("baseline", "a", 3.0, mode="graph"))
        found = beside(rows)
        assert found[0].beside == {"a": 4.0, "b": 6.0} and found[1].beside == {"a": 3.0, "b": 6.0}

    def test_chosen_over_best(self) -> None:
        rows = [
            row("selected", "selected", 12.0, path="staged/shared"),
            row("path", "staged", 11.0, path="staged/shared"),
            row("path", "peer", 10.0, path="peer/ll"),
            row("path", "ipc", None, error="no"),
            row("baseline", "by hand", 5.0),
            row("selected", "selected", 8.0, mode="graph", path="peer/ll"),
            row("path", "peer", 4.0, mode="graph", path="peer/ll"),
        ]
        result: dict[str, Any] = {}
        said = "\n".join(choices(rows, result))
        streamed, graph = result["chosen_over_best"]["cases"]
        assert streamed["best"] == "peer" and streamed["ratio"] == 1.2 and not streamed["same"]
        assert graph["ratio"] == 2.0 and graph["same"]
        assert result["chosen_over_best"]["share_within"] == 0.5
        assert "50.0 % of 2" in said and "worst 1.20 x" in said
        assert choices(rows[:1], result) == []
        assert result["chosen_over_best"]["share_within"] is None

    def test_lines_are_aligned(self) -> None:
        table = Table((CASE, METHOD, US))
        shown = table.line(row("baseline", "by hand", 123.456), 12.3456)
        assert shown.index("by hand") == table.header().index("method")
        assert shown.endswith("0.10 x")
        assert table.line(row("path", "ipc", None, error="no\nmore")).endswith("  no")
        broken = row("path", "ipc", None, error="why", failed=True)
        assert table.line(broken).endswith("FAILED: why")

    def test_ratios_of_packing(self) -> None:
        (case,) = select(["NAS_LU_y/12"])
        measured = [
            (COPY, "baseline", Timed(2.0), False),
            ("slow", "baseline", Timed(40.0), False),
            ("fast", "baseline", Timed(10.0), False),
            ("strided", "packer", Timed(4.0, 3.5, 5.0, "remark"), False),
            ("traversal", "packer", "does not take it", False),
        ]
        rows = {one.name: one for one in rows_of(case, {}, measured, 3.0)}
        ours = rows["strided"]
        assert (ours.of_copy, ours.of_bound, ours.speedup) == (0.5, 0.75, 2.5)
        assert ours.gb_per_s == 0.12 and ours.note == "remark"
        assert rows["slow"].speedup == 0.25
        assert rows["traversal"].us is None and not rows["traversal"].failed
        (alone,) = rows_of(case, {}, [("host", "packer", Timed(1.0), False)], None)
        assert alone.of_copy is alone.of_bound is alone.speedup is None


class TestPlots:
    PLOT = Plot("kind", "Kind", ("faces",), "nbytes", "bytes")
    ROWS = tuple(row("path", name, n / 8, faces="x", nbytes=n) for n in (8, 64) for name in "ab")

    def test_a_figure_for_each_group_with_several_sizes(self, tmp_path: Path) -> None:
        single = [row("path", "a", 1.0, faces="y", nbytes=8), row("path", "b", None)]
        (drawn,) = draw([self.PLOT], [*self.ROWS, *single], tmp_path / "new")
        assert drawn.name == "kind-x.png" and drawn.read_bytes().startswith(b"\x89PNG")
        assert draw([self.PLOT], single, tmp_path) == []

    def test_no_matplotlib(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(MissingPackageError):
            draw([self.PLOT], self.ROWS, tmp_path)

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(HaloxError, match="cannot be made"):
            draw([self.PLOT], self.ROWS, tmp_path / "file" / "plots")


def test_the_catalogue_has_quick_sizes() -> None:
    for pattern in catalogue().values():
        assert len(list(pattern.cases(quick=True))) == len(pattern.quick) > 0
