"""``halox bench pack`` on the CPU: the command line, the table, the files, wrong input."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halox.cli import catalogue as packages
from halox.cli import main
from halox.errors import MissingPackageError
from halox.packing.host import HostPacker
from halox.runtime.gpu import cuda
from halox_bench.common.timing import Timed
from halox_bench.pack import on_host, plots
from halox_bench.pack.cases import catalogue, select
from halox_bench.pack.options import PACKERS, Options
from halox_bench.pack.rows import COPY, TABLE, Row, line, rows_of
from tests.support import require

FEW = "NAS_LU_y/33,WRF_x_vec/8x8,SPECFEM3D_cm/c1,struct_24/4096,lower_triangle/1024"
COMMON: dict[str, Any] = {
    "pattern": "p",
    "size": "s",
    "payload_bytes": 2000,
    "block_bytes": 8,
    "sector_bytes": 4000,
    "direction": "pack",
    "destination": "device",
    "cache": "warm",
}


def bench(words: str) -> int:
    try:
        return main(["bench", *words.split()])
    except SystemExit as ended:
        return ended.code  # type: ignore[return-value]


class TestCommand:
    def test_from_end_to_end(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        require("mpi")
        file, folder = tmp_path / "result.json", tmp_path / "plots"
        words = f"pack --device cpu --patterns {FEW} --repeats 2 --direction both"
        assert bench(f"{words} --json {file} --plot {folder}") == 0
        out = capsys.readouterr().out
        result = json.loads(file.read_text())
        assert result["machine"]["device"] == "cpu"
        rows = result["rows"]
        assert {f"{row['pattern']}/{row['size']}" for row in rows} == set(FEW.split(","))
        methods = {COPY, "NumPy by hand", "mpi4py", "host"}
        for direction in ("pack", "unpack"):
            assert {row["method"] for row in rows if row["direction"] == direction} == methods
        assert not [row for row in rows if row["error"]]
        assert all(
            np.isclose(row["gb_per_s"], row["payload_bytes"] / row["us"] / 1e3) for row in rows
        )
        # As many lines as rows.
        assert sum(" memory warm" in text for text in out.splitlines()) == len(rows)
        assert (folder / "bandwidth.png").read_bytes().startswith(b"\x89PNG")
        assert f"wrote {folder / 'bandwidth.png'}" in out

    def test_without_baselines(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert bench("pack --device cpu --patterns FFT2/256 --no-baselines --repeats 2") == 0
        out = capsys.readouterr().out
        assert " host " in out and "by hand" not in out

    def test_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert bench("pack --list") == 0
        out = capsys.readouterr().out
        assert "DDTBench" in out and "8B-64KiB" in out
        assert all(f"\n{name}: " in f"\n{out}" for name in catalogue())

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
            ("pack --device cpu --contention", "not with --device cpu"),
            ("pack --device cpu --patterns vector_512/8B-64MiB", "too large"),
        ],
    )
    def test_wrong_command_lines(
        self, words: str, text: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert bench(words) == 2
        assert text in capsys.readouterr().err

    def test_no_gpu(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(cuda, "why_no_gpu", lambda: "it is on loan")
        for option in ("--device gpu", "--targets", "--headlines", "--contention"):
            assert bench(f"pack {option}") == 2
            assert "it is on loan" in capsys.readouterr().err

    def test_a_wrong_result_is_a_failing_status(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Wrong(HostPacker):
            def packing(self, out: np.ndarray) -> Callable[[], object]:
                call = super().packing(out)

                def wrong() -> None:
                    call()
                    out[-1] ^= 1

                return wrong

        monkeypatch.setattr(on_host, "HostPacker", Wrong)
        assert bench("pack --device cpu --patterns FFT2/256 --repeats 2") == 1
        out = capsys.readouterr().out
        assert "FAILED: HaloxError: wrong result: 1 wrong bytes" in out
        assert " mpi4py " in out, "the others go on"

    def test_bytes_written_beside_are_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Wrong(HostPacker):
            def unpacking(self, packed: np.ndarray) -> Callable[[], object]:
                call = super().unpacking(packed)

                def wrong() -> None:
                    call()
                    self._memory[40] ^= 1  # behind the first five doubles

                return wrong

        monkeypatch.setattr(on_host, "HostPacker", Wrong)
        options = Options(directions=("unpack",), repeats=1, baselines=False)
        rows = list(on_host.run(select(["NAS_LU_y/12"]), options, str.strip))
        (row,) = [row for row in rows if row.method == "host"]
        assert row.failed and "1 written beside" in row.error

    def test_imports_no_gpu_package_and_no_plots(self) -> None:
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


class TestRows:
    def test_shares_come_from_what_was_measured_beside(self) -> None:
        measured = [
            (COPY, "baseline", Timed(2.0), False),
            ("slow", "baseline", Timed(40.0), False),
            ("fast", "baseline", Timed(10.0), False),
            ("strided", "packer", Timed(4.0, 3.5, 5.0, "remark"), False),
            ("traversal", "packer", "does not take it", False),
        ]
        rows = {row.method: row for row in rows_of(COMMON, measured, 3.0)}
        ours = rows["strided"]
        assert (ours.of_copy, ours.of_bound, ours.speedup) == (0.5, 0.75, 2.5)
        assert ours.gb_per_s == 0.5 and ours.note == "remark"
        assert rows["slow"].speedup == 0.25
        assert rows["traversal"].us is None and not rows["traversal"].failed

    def test_without_anything_to_compare_with(self) -> None:
        (row,) = rows_of(COMMON, [("host", "packer", Timed(1.0), False)], None)
        assert row.of_copy is row.of_bound is row.speedup is None

    def test_lines_are_aligned(self) -> None:
        row = Row(
            **COMMON, method="strided", kind="packer", us=123456.0, gb_per_s=0.001, of_copy=1.2
        )
        shown = line(row)
        head = TABLE.header()
        assert shown.index("strided") == head.index("method")
        assert shown.index("1.235e+05") + 9 == head.index("us") + 2
        assert "120.0" in shown

    def test_errors_stand_in_the_place_of_numbers(self) -> None:
        wrong = Row(**COMMON, method="m", kind="packer", error="first\nsecond", failed=True)
        assert line(wrong).endswith("FAILED: first")
        refused = Row(**COMMON, method="m", kind="packer", error="not for this type")
        assert line(refused).endswith("  not for this type")


class TestPlots:
    def rows(self) -> list[Row]:
        rows = []
        for block in (8, 128, 4096):
            for payload in (1 << 16, 1 << 20):
                for destination in ("device", "host"):
                    for method, us in (("auto", 2.0), ("strided", 2.5), ("cudaMemcpy2D", 9.0)):
                        rows.append(
                            Row(
                                "vector",
                                f"{block}B-{payload}",
                                payload,
                                block,
                                2 * payload,
                                "pack",
                                destination,
                                "large",
                                method,
                                "baseline" if method == "cudaMemcpy2D" else "packer",
                                us=us * payload,
                                gb_per_s=1 / us,
                                of_bound=0.5,
                            )
                        )
        return rows

    def test_every_figure(self, tmp_path: Path) -> None:
        drawn = plots.draw(self.rows(), tmp_path / "new")
        names = [path.name for path in drawn]
        assert names == ["bandwidth.png", "memcpy2d.png", "destinations.png", "methods.png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)

    def test_nothing_to_draw(self, tmp_path: Path) -> None:
        assert plots.draw([Row(**COMMON, method="m", kind="packer", error="x")], tmp_path) == []

    def test_no_matplotlib(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(MissingPackageError, match="pip install matplotlib"):
            plots.draw(self.rows(), tmp_path)


def test_options_name_the_packers_that_there_are() -> None:
    from halox.packing.choosing import METHODS

    assert PACKERS == METHODS


def test_the_kernels_lie_beside_the_modules() -> None:
    folder = Path(str(files("halox_bench")))
    found = sorted(folder.rglob("*.cu"))
    assert [path.relative_to(folder).as_posix() for path in found] == [
        "allreduce/jacobi.cu",
        "common/bench.cu",
        "common/byhand.cu",
        "exchange/seven_point.cu",
        "transpose/tile.cu",
    ]
    for path in found:
        assert 'extern "C" __global__' in path.read_text()
