"""The GPU check, tested without a GPU: digest of the sources, figures, and selection of runs."""

from __future__ import annotations

import hashlib
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import require
from tools.gpu import check, junit
from tools.gpu.check import ROOT, fourier_figures, milc_figures, sources_sha256


def test_digest_of_sources(tmp_path: Path) -> None:
    package = tmp_path / "halox"
    for name, content in {"b.py": b"2", "a/z.cu": b"1", "a/__pycache__/z.pyc": b"no"}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(content)
    wanted = hashlib.sha256(b"halox/a/z.cu\x001" + b"halox/b.py\x002").hexdigest()
    assert sources_sha256(tmp_path) == wanted


def test_order_of_paths_is_beyond_doubt() -> None:
    """Orders by path text and by path components must agree, since either may be used for the digest."""
    paths = [p for p in (ROOT / "halox").rglob("*") if p.is_file()]
    assert sorted(paths) == sorted(paths, key=lambda p: p.as_posix())


def test_fourier_figures() -> None:
    common = {"class": "C", "device": "gpu", "verified": True, "relative_error": 1e-13}
    common |= {"time_s": 1.0, "graph": True}
    runs = [
        {
            "app": "nas_ft",
            "ranks": ranks,
            "exit_status": 0,
            "figures": {**common, "ranks": ranks, "mops": mops},
        }
        for ranks, mops in ((1, 2.0e6), (1, 2.1e6), (2, 1e6))
    ]
    bad = {"app": "nas_ft", "ranks": 4, "exit_status": 1, "figures": {"output": "no"}}
    found = fourier_figures([*runs, bad, {"app": "nas_mg", "exit_status": 0}])
    # Six times 340,300: the target.
    assert [one["target"] for one in found] == [2041800, 2041800, None]
    assert [one["met"] for one in found] == [False, True, None]
    assert fourier_figures([bad]) == []


def test_milc_figures() -> None:
    common = {"lattice": [16, 16, 16, 32], "operator": "improved", "precision": "double"}
    common |= {"device": "gpu", "verified": True, "time_s": 0.1, "graph": False}
    runs = [
        {
            "app": "milc",
            "exit_status": status,
            "figures": {**common, "ranks": ranks, "cg_gflops": gflops, "dslash_gflops": 2.0},
        }
        for ranks, gflops, status in ((1, 800.0, 0), (2, 600.0, 0), (4, 1.0, 1))
    ]
    mixed = {**runs[0], "figures": {**runs[0]["figures"], "precision": "mixed"}}
    found = milc_figures([*runs, mixed, {"app": "nas_mg", "exit_status": 0}])
    assert [(one["value"], one["baseline"]) for one in found] == [(800.0, 800.0), (600.0, 800.0)]
    assert found[1]["name"] == "MILC 16x16x16x32 improved double, 2 ranks, gpu"
    assert milc_figures(runs[2:]) == []


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_every_file_of_ranks_runs_once_on_two(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int | None, str]] = []

    def suite(path: str, ranks: int | None, scratch: Path, *others: str, **how: Any) -> list[Any]:
        ran.extend((file, ranks, how.get("how", "")) for file in (path, *others))
        return []

    monkeypatch.setattr(check, "suite", suite)
    for job in chain(*check.several_ranks(gpus)):
        job(tmp_path)
    on_two = sorted(file for file, ranks, how in ran if ranks == 2 and not how)
    assert on_two == check.rank_files()
    assert len(set(ran)) == len(ran)
    assert ((check.FAILURES, None, "") in ran) == (gpus > 1)


def test_a_run_without_a_report_tells_what_ran(tmp_path: Path) -> None:
    ran = tmp_path / "test_of_this.py"
    ran.write_text("import os\ndef test_a(): pass\ndef test_b(): os._exit(3)\n")
    report = tmp_path / "report.xml"
    command = ["-m", "pytest", "-q", "-p", "tools.gpu.junit", f"--rootdir={tmp_path}", str(ran)]
    status, _ = check.run(command, HALOX_JUNIT=str(report))
    assert (status, junit.running(report)) == (3, "test_of_this.py::test_b")
    report.touch()
    assert junit.running(report) == ""


@pytest.mark.parametrize(("gpus", "ranks"), [(1, [2]), (2, [2]), (4, [2, 4]), (8, [2, 4, 8])])
def test_one_command_measures_on_all_numbers_of_ranks(
    gpus: int, ranks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[tuple[str, Any]] = []
    apps: list[tuple[str, int]] = []
    result = SimpleNamespace(gpus=gpus, apps=[], skipped=[], is_good=True)
    result.add = lambda **found: None
    result.write = lambda: None

    def app(name: str, number: int, *options: str) -> dict[str, Any]:
        apps.append((name, number))
        return {"app": name, "ranks": number, "exit_status": 1}

    def targets(
        kind: str, number: int | None, scratch: Path, *words: object
    ) -> list[dict[str, Any]]:
        kinds.append((kind, number))
        return []

    monkeypatch.setattr(check, "Result", lambda parts: result)
    monkeypatch.setattr(check, "app", app)
    monkeypatch.setattr(check, "targets", targets)
    monkeypatch.setattr(check, "suite", None)  # no tests
    assert check.main(["--figures"]) == 0
    for kind in ("exchange", "allreduce", "transpose"):
        assert [number for name, number in kinds if name == kind] == ranks
    wanted = sorted({1, *range(1, min(gpus, 2) + 1), *ranks[1:]})
    assert sorted(number for name, number in apps if name == "nas_mg") == wanted


SUITES = {
    "skipped": "import pytest\npytest.importorskip('no_such_package')\ndef test_a(): pass\n",
    "each test skipped": "import pytest\n@pytest.mark.skip('no zarr')\ndef test_a(): pass\n",
    "passing": "def test_a(): pass\n",
    "empty": "",
    "broken": "import no_such_package\n",
    "crashing": "import os\ndef test_a(): os._exit(0)\n",
}
NO_PACKAGE = "could not import 'no_such_package': No module named 'no_such_package'"


@pytest.mark.parametrize(
    ("files", "options", "expected"),
    [
        ("skipped", "", ["skipped"]),
        ("each test skipped", "", ["skipped"]),
        ("skipped,passing", "", ["skipped", "passed"]),
        ("empty", "", ["exit status 5"]),
        ("passing", "-k nothing", ["exit status 5"]),
        ("skipped,passing", "-k nothing", ["skipped", "exit status 5"]),
        ("broken", "", ["error", "exit status 2"]),
        ("crashing", "", ["exit status 0 in test_0.py::test_a"]),
    ],
)
def test_only_files_that_are_skipped_may_run_nothing(
    files: str,
    options: str,
    expected: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    paths = [tmp_path / f"test_{n}.py" for n, _ in enumerate(files.split(","))]
    for path, name in zip(paths, files.split(","), strict=True):
        path.write_text(SUITES[name])
    words = (f"--rootdir={tmp_path}", *options.split())
    found = check.suite(str(paths[0]), None, tmp_path, *map(str, paths[1:]), options=words)
    assert [one["outcome"] for one in found] == expected
    reason = NO_PACKAGE if files.startswith("skipped") else "no zarr"
    assert all(one["reason"] == reason for one in found if one["outcome"] == "skipped")
    is_told = f"all skipped: {reason}" in capfd.readouterr().out
    assert is_told == (set(expected) == {"skipped"})


def test_ranks_that_skip_a_file_are_no_failure(tmp_path: Path) -> None:
    require("mpi")
    path = tmp_path / "test_0.py"
    path.write_text(SUITES["skipped"])
    (found,) = check.suite(str(path), 2, tmp_path, options=(f"--rootdir={tmp_path}",))
    assert (found["test"], found["outcome"], found["ranks"]) == ("test_0", "skipped", 2)
